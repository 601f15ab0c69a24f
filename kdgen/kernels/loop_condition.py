"""`loop_condition`: whether a loop that runs on the device goes on: while some sequence is still active.

Definition: again[0] is 1 when running[0] is positive, else 0. When `handle` is not 0 it is a conditional handle of the CUDA graph that the
launch is part of, and the loop's condition becomes again[0].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.contract import Argument, Contract, Launch
from kdgen.kernels.base import Arrays, Case, Family, FamilyParams, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """There is nothing to choose."""


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one thread."""
    return Contract(
        family="loop_condition",
        arguments=(
            Argument("running", "i32", (1,), doc="sequences still active"),
            Argument("handle", "u64", (), "scalar", "of the loop's condition; 0: there is no loop"),
            Argument("again", "i32", (1,), "out", "1: the loop goes on"),
        ),
        capacities={},
        launches=(Launch("loop_condition", (1, 1, 1), 32),),
    )


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The output, from the definition; exact."""
    return {"again": (inputs["running"] > 0).astype(np.int32)}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """None, one, many."""
    for count in (0, 1, 64, -1):
        yield Case(f"{count} running", {"running": np.array([count], np.int32), "handle": np.array(0, np.uint64)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Without a loop."""
    yield Workload("one", {"running": np.ones(1, np.int32), "handle": np.array(0, np.uint64)})


FAMILY = Family(
    name="loop_condition",
    summary="whether a loop on the device goes on",
    params=Params,
    contract=contract,
    reference=reference,
    cases=cases,
    workloads=workloads,
    device_runtime=True,
)
