"""Kernels for the tests of verification that compute with the family's reference, right or sabotaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kdgen.spec import KernelSpec
from kdgen.targets import get_target

Sabotage = Callable[[dict[str, np.ndarray]], None]


class FakeArray:
    def __init__(self, value: np.ndarray):
        self.value = value.copy()

    def numpy(self) -> np.ndarray:
        return self.value


class FakeDevice:
    def array(self, value: np.ndarray) -> FakeArray:
        return FakeArray(value)

    def synchronize(self) -> None:
        pass


class FakeKernel:
    """Calls behave as a kernel's: outputs are written in place. `sabotage` may change the results before."""

    def __init__(self, spec: KernelSpec, sabotage: Sabotage = lambda results: None):
        self.spec = spec
        self.contract = spec.family.contract(spec.params, get_target("host"))
        self.device = FakeDevice()
        self.sabotage = sabotage

    def __call__(self, *, dims: Mapping[str, int], **arguments: Any) -> None:
        inputs = {a.name: arguments[a.name].value for a in self.contract.arguments if a.role in ("in", "inout")}
        results = self.spec.family.reference(self.spec.params, inputs)
        self.sabotage(results)
        for name, value in results.items():
            arguments[name].value[...] = value
