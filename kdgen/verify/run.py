"""Verification of whole specs: which kernels, on which schedules, built where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kdgen.errors import UsageError
from kdgen.spec import KernelSpec, Spec
from kdgen.verify.artifacts import Artifacts, load_for, target_of
from kdgen.verify.ddtree_cases import load_cases
from kdgen.verify.ddtree_check import CaseVerdict, check_case, draft_of
from kdgen.verify.kernel import Verdict, Watcher, verify_kernel
from kdgen.verify.schedules import Schedule, device_schedules, host_schedules
from kdgen.verify.tree_step import TreeKernels

DEFAULT_SCHEDULES = 4
DEFAULT_REGROUPINGS = 2
GENERATED = Path("generated")


def _ignore(kernel: str, case: str, schedule: str) -> None:
    pass


def schedules_for(device: str, count: int, seed: int) -> tuple[Schedule, ...]:
    """The schedules to run on `device`."""
    return host_schedules(count, seed) if device == "host" else device_schedules(count)


def verify_spec(
    spec: Spec,
    device: str = "host",
    *,
    seed: int = 0,
    schedules: int = DEFAULT_SCHEDULES,
    regroup: int = DEFAULT_REGROUPINGS,
    sanitize: bool = False,
    only: str = "",
    out: Path = GENERATED,
    watch: Watcher = _ignore,
) -> Iterator[Verdict]:
    """Run every kernel of a spec on the cases of its family; yields a verdict as soon as a kernel is done.

    Args:
        spec: its kernels are taken from `out` when they are current there, else built privately.
        device: `host`, `cuda` or `cuda:N`.
        seed: of the cases, and of the random schedules.
        schedules: how many runs of each case; on the host each has its own thread order and copy timing.
        regroup: how many other groupings of each case's rows are run: shuffled, alone, in part; they must not change a bit.
        sanitize: use the sanitizer build (host only; the process must have been started for it, see `kdgen.verify.sanitize`).
        only: a regular expression; kernels whose names it does not match are left out.
        out: the directory `kdgen build` writes to.
        watch: called before each launch with kernel, case and schedule.

    Raises:
        UsageError: `only` is no regular expression, or matches no kernel.
        KdgenError: a kernel cannot be built or loaded, or there is no such device. A kernel that is wrong raises nothing.
    """
    try:
        chosen = [kernel for kernel in spec.kernels if re.search(only, kernel.name)]
    except re.error as error:
        raise UsageError(f"--only {only}: no regular expression: {error}") from error
    if not chosen:
        raise UsageError(f"--only {only}: no such kernel; {spec.path} has {', '.join(kernel.name for kernel in spec.kernels)}")
    plan = schedules_for(device, schedules, seed)
    with Artifacts(target_of(device, sanitize=sanitize), out) as artifacts:
        kits = load_for(artifacts.directory(spec), plan, device)
        for kernel in chosen:
            yield verify_kernel(kernel, {schedule: kit[kernel.name] for schedule, kit in kits.items()}, seed, watch, regroup)


def verify_cases(
    spec: Spec,
    path: Path,
    device: str = "host",
    *,
    seed: int = 0,
    schedules: int = DEFAULT_SCHEDULES,
    sanitize: bool = False,
    out: Path = GENERATED,
    watch: Watcher = _ignore,
) -> Iterator[CaseVerdict]:
    """Run a file of worked DDTree cases through a spec's tree kernels; yields a verdict for each case.

    A case that fits the spec's kernels runs on them, padded; another one on variants of them with changed parameters, and its
    verdict says so. Arguments and errors as in `verify_spec`; also ArtifactError for a bad file and UsageError for a spec that
    lacks a tree kernel.
    """
    cases = load_cases(path)
    plan = schedules_for(device, schedules, seed)
    chosen = [TreeKernels.for_draft(spec, draft_of(case), case.start + case.nodes) for case in cases]
    # Cases that need the same changes share one variant. All variants are built together, as one spec of their own.
    names = {changes: f"variant{i}" for i, changes in enumerate(dict.fromkeys(kernels.changes for kernels in chosen if kernels.changes))}
    chosen = [kernels.named(names[kernels.changes]) if kernels.changes else kernels for kernels in chosen]
    variants: dict[str, KernelSpec] = {kernel.name: kernel for kernels in chosen if kernels.changes for kernel in kernels.kernels}
    with Artifacts(target_of(device, sanitize=sanitize), out) as artifacts:
        own = load_for(artifacts.directory(spec), plan, device)
        others = own
        if variants:
            others = load_for(artifacts.directory(replace(spec, name=f"{spec.name}-cases", kernels=tuple(variants.values()))), plan, device)
        for case, kernels in zip(cases, chosen, strict=True):
            yield check_case(case, kernels, others if kernels.changes else own, watch)
