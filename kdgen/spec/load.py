"""From a YAML file to a validated `Spec`, with every fault of the file reported at once.

The order: read YAML with line marks, merge the file it builds on, apply `--set`, evaluate `${…}`, validate the file and each kernel's
parameters, check the rules between values, ask every family whether its kernel fits every target. A value that is reported once is
passed over afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard

from kdgen.errors import Fault, SpecError
from kdgen.kernels import families
from kdgen.spec.base import include_base
from kdgen.spec.checks import check_engine, check_targets
from kdgen.spec.derive import derive
from kdgen.spec.document import Document, Path, dotted
from kdgen.spec.explain import shown, validate
from kdgen.spec.model import FILES, EngineFile, EngineSpec, KernelFile
from kdgen.spec.overrides import apply_overrides
from kdgen.spec.spec import KernelSpec, Spec, digest_of
from kdgen.spec.yaml_marks import read_document
from kdgen.targets import TARGETS, Target

_MAX_THREADS = 1024  # of a block, on every CUDA device


def load_spec(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Spec:
    """Read, resolve and validate a spec file.

    Args:
        path: a kernel spec or an engine spec.
        overrides: `key=value` texts, as given to `--set`. A key is a path from the root; in a kernel spec the leading `params.`, in
            an engine spec `kernels.NAME.params.` may be shortened to nothing and `NAME.`.

    Raises:
        SpecError: with every fault found.
    """
    document = read_document(os.fspath(path))
    if document.is_suspect(()):
        raise SpecError(document.faults)
    include_base(document)
    if document.is_suspect(()):
        raise SpecError(_ordered(document.faults))
    apply_overrides(document, overrides)
    kind = document.data.get("kind")
    if not isinstance(kind, str) or kind not in FILES:
        if not document.is_suspect(("kind",)):
            allowed = " or ".join(FILES)
            document.fault(("kind",), f"value {shown(kind)}, allowed {allowed}" if "kind" in document.data else f"missing; needs {allowed}")
        raise SpecError(_ordered(document.faults))
    derive(document)
    file = validate(FILES[kind], document, (), document.data)
    kernels = _kernels(document)
    check_targets(document)
    if kind == "engine":
        check_engine(document)
    for kernel, place in kernels:
        _check_fit(document, kernel, place)
    if document.faults or file is None:
        raise SpecError(_ordered(document.faults))
    return _assemble(file, document.file, tuple(kernel for kernel, _ in kernels))


def _assemble(file: KernelFile | EngineFile, path: str, kernels: tuple[KernelSpec, ...]) -> Spec:
    engine = None
    if isinstance(file, EngineFile):
        engine = EngineSpec.model_validate({name: getattr(file, name) for name in EngineSpec.model_fields})
    digest = digest_of(name=file.name, kind=file.kind, targets=file.targets, kernels=kernels, engine=engine, description=file.description)
    return Spec(file.name, file.kind, path, digest, file.targets, kernels, engine)


def _ordered(faults: list[Fault]) -> list[Fault]:
    return sorted(dict.fromkeys(faults), key=lambda fault: fault.line)


def _kernels(document: Document) -> list[tuple[KernelSpec, Path]]:
    """The kernels whose parameters are valid, each with its place; faults of the others are reported."""
    if document.data["kind"] == "kernel":
        name = document.data.get("name")
        found = _kernel(document, (), document.data, name if isinstance(name, str) else "kernel")
        return [(found, ())] if found else []
    entries = document.data.get("kernels")
    kernels: list[tuple[KernelSpec, Path]] = []
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        place: Path = ("kernels", name)
        kernel = _kernel(document, place, entry, name) if isinstance(entry, dict) else None
        if kernel:
            kernels.append((kernel, place))
    return kernels


def _kernel(document: Document, place: Path, entry: dict[str, Any], name: str) -> KernelSpec | None:
    family_name, params = entry.get("family"), entry.get("params", {})
    if not isinstance(family_name, str) or not isinstance(params, dict):
        return None  # the file's own model has said so
    family = families().get(family_name)
    if family is None:
        if not document.is_suspect((*place, "family")):
            near = get_close_matches(family_name, families(), 1)
            guess = f"; did you mean '{near[0]}'?" if near else ""
            document.fault((*place, "family"), f"value '{family_name}', allowed one of {', '.join(families()) or 'none'}{guess}")
        return None
    suspects = len(document.faults)
    valid = validate(family.params, document, (*place, "params"), params)
    spoiled = len(document.faults) > suspects or any(path[: len(place) + 1] == (*place, "params") for path in document.suspects)
    if valid is None or spoiled:
        return None
    line = document.line_of(place if place else ("name",))
    return KernelSpec(_kernel_name(name), family, valid, entry.get("allow_spill") is True, line)


def _kernel_name(name: str) -> str:
    """A kernel spec's name as a kernel name: file names may have dots and dashes, symbols may not."""
    cleaned = name.replace("-", "_").replace(".", "_")
    return cleaned if cleaned[:1].isalpha() else f"k_{cleaned}"


def _check_fit(document: Document, kernel: KernelSpec, place: Path) -> None:
    """Ask the family for the kernel's contract and shared memory on each target."""
    names = document.data.get("targets")
    targets = [TARGETS[name] for name in dict.fromkeys(names) if name in TARGETS] if _is_texts(names) else []
    refusals: dict[str, list[str]] = {}
    for target in targets:
        for message in _refusals(kernel, target):
            refusals.setdefault(message, []).append(target.name)
    key = dotted(place) or kernel.name
    for message, where in refusals.items():
        document.faults.append(Fault(document.file, kernel.line, key, f"on {', '.join(where)}: {message}"))


def _refusals(kernel: KernelSpec, target: Target) -> list[str]:
    try:
        contract = kernel.family.contract(kernel.params, target)
        shared = kernel.family.shared(kernel.params, target)
    except (ValueError, ArithmeticError) as error:
        return [str(error)]
    refused = []
    needed = max([shared.total, *(launch.shared_bytes for launch in contract.launches)])
    if needed > target.shared_limit:
        refused.append(f"needs {needed} bytes of shared memory per block, allowed {target.shared_limit}")
    for launch in contract.launches:
        if not 1 <= launch.block <= _MAX_THREADS:
            refused.append(f"'{launch.entry}' has blocks of {launch.block} threads, allowed 1…{_MAX_THREADS}")
    return refused


def _is_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
