"""A validated spec: what the rest of kdgen works with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

from kdgen.errors import SpecError, UsageError
from kdgen.kernels.base import Family, FamilyParams
from kdgen.spec.document import Document
from kdgen.spec.explain import validate
from kdgen.spec.model import EngineSpec

Kind = Literal["kernel", "engine"]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to build.

    Attributes:
        name: its key in the manifest and the stem of its files.
        family: the kernel family.
        params: the family's parameters, validated.
        allow_spill: register spills are no error.
        line: where it stands in the spec file; 0 when it does not come from a file.
    """

    name: str
    family: Family
    params: FamilyParams
    allow_spill: bool = False
    line: int = 0

    def with_params(self, **changes: Any) -> KernelSpec:
        """The same kernel with some parameters changed; a nested parameter is replaced as a whole.

        Raises:
            SpecError: the changed parameters are not valid.
        """
        document = Document(f"kernel '{self.name}'", data={"params": {**self.params.model_dump(mode="json"), **_plain(changes)}})
        params = validate(self.family.params, document, ("params",), document.data["params"])
        if params is None:
            raise SpecError(document.faults)
        return replace(self, params=params)


@dataclass(frozen=True)
class Spec:
    """A spec file, validated and resolved.

    Attributes:
        name: of the spec and of its output directory.
        kind: `kernel` (one kernel) or `engine` (a model and its kernels).
        path: the file, as the user gave it.
        digest: sha256 of everything the spec says, overrides applied and defaults filled in; not of where it stands.
        targets: names of the targets built by default.
        kernels: in the order of the file.
        engine: the model, tree, drafter and cache of an engine spec.
    """

    name: str
    kind: Kind
    path: str
    digest: str
    targets: tuple[str, ...]
    kernels: tuple[KernelSpec, ...]
    engine: EngineSpec | None = None

    @classmethod
    def of(cls, name: str, *kernels: KernelSpec) -> Spec:
        """A spec that is in no file: these kernels, built for whatever target is asked for."""
        digest = digest_of(name=name, kind="kernel", targets=(), kernels=kernels, engine=None, description="")
        return cls(name, "kernel", "", digest, (), kernels)

    def kernel(self, name: str) -> KernelSpec:
        """The kernel called `name`; UsageError naming the others when there is none."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        names = [kernel.name for kernel in self.kernels]
        near = get_close_matches(name, names, 1)
        guess = f"; did you mean '{near[0]}'?" if near else ""
        raise UsageError(f"spec '{self.name}' has no kernel '{name}'{guess} (it has: {', '.join(names) or 'none'})")


def digest_of(
    *, name: str, kind: Kind, targets: tuple[str, ...], kernels: tuple[KernelSpec, ...], engine: EngineSpec | None, description: str
) -> str:
    """sha256, in hexadecimal, of the resolved spec as canonical JSON."""
    content = {
        "name": name,
        "kind": kind,
        "description": description,
        "targets": targets,
        "engine": engine.model_dump(mode="json") if engine else None,
        "kernels": [
            {"name": item.name, "family": item.family.name, "params": item.params.model_dump(mode="json"), "allow_spill": item.allow_spill}
            for item in kernels
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.model_dump(mode="json") if isinstance(value, FamilyParams) else value for key, value in changes.items()}
