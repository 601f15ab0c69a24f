"""Building a spec: plan, compile what the cache lacks, check, publish."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kdgen.build.cache import SCHEMA, CachedObject, CorruptObjectError, ObjectCache, cache_directory
from kdgen.build.graph import Outcome, core_count, run_graph
from kdgen.build.manifest import FILE_NAME, ManifestKernel, manifest_bytes
from kdgen.build.plan import KernelPlan, TargetPlan, plan_target
from kdgen.build.policy import figures, refusals
from kdgen.build.publish import publish
from kdgen.build.report import BuildReport, KernelReport, Progress, Status, TargetReport
from kdgen.build.unit import PTX, SASS, Unit
from kdgen.compile.ptxas import Resources
from kdgen.compile.sass import disassemble, nvdisasm_id
from kdgen.errors import KdgenError, ResourceError, UsageError
from kdgen.targets import Target

if TYPE_CHECKING:
    from kdgen.spec import Spec

KEEP = ("ptx", "sass")


def build_spec(
    spec: Spec,
    targets: Sequence[Target],
    out: Path,
    *,
    jobs: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> BuildReport:
    """Build every kernel of a spec for every target into `out/SPEC/TARGET/`.

    Compilation is one stage: when a kernel does not compile, for whatever target, all failures are reported and nothing is published. A
    target with a kernel that spills or does not fit is not published; the other targets are.

    Args:
        spec: what to build.
        targets: what to build for.
        out: the output directory.
        jobs: how many kernels to compile at once; None for one per core.
        force: compile everything, whatever the cache holds.
        dry_run: only find out what would be compiled; nothing is written, neither to `out` nor to the cache.
        keep: also publish `ptx` and `sass` of GPU kernels.
        progress: told of every compiled unit.

    Raises:
        CompileError, ToolchainError, RenderError, ResourceError: a kernel cannot be built; the message has all that cannot.
        UsageError: the spec has no kernels, or `keep` or `jobs` is wrong.
        KdgenError: the cache or `out` cannot be written.
    """
    started = time.monotonic()
    _check_arguments(spec, targets, jobs, keep)
    plans = [plan_target(spec, target) for target in dict.fromkeys(targets)]
    compiled = _Compiled(ObjectCache(cache_directory()), force)
    missing = [unit for plan in plans for unit in compiled.missing(plan)]
    if dry_run:
        planned = tuple(_dry_report(plan, spec, out, compiled) for plan in plans)
        return BuildReport(spec.name, planned, time.monotonic() - started, dry_run=True)
    if missing:
        compiled.compile(missing, jobs, progress)
    reports: list[TargetReport] = []
    refused: list[str] = []
    for plan in plans:
        reasons = [reason for kernel in plan.kernels for reason in _refusals(kernel, plan.target, compiled)]
        refused += reasons
        if not reasons:
            if "sass" in keep and not plan.target.is_host:
                compiled.disassemble([kernel.unit for kernel in plan.kernels], jobs)
            reports.append(_publish(plan, spec, out, compiled, keep))
    if refused:
        others = f"\npublished: {', '.join(report.target for report in reports)}" if reports else ""
        raise ResourceError("\n".join(refused) + others)
    return BuildReport(spec.name, tuple(reports), time.monotonic() - started)


def _check_arguments(spec: Spec, targets: Sequence[Target], jobs: int | None, keep: Sequence[str]) -> None:
    if not spec.kernels:
        raise UsageError(f"{spec.path}: spec '{spec.name}' has no kernels to build")
    if not targets:
        raise UsageError(f"{spec.path}: no target to build for")
    if jobs is not None and jobs < 1:
        raise UsageError(f"{jobs} jobs; allowed: 1 or more")
    for kind in keep:
        if kind not in KEEP:
            raise UsageError(f"'{kind}' cannot be kept; allowed: {', '.join(KEEP)}")


@dataclass
class _Compiled:
    """The objects of a build: from the cache at first, compiled then.

    Attributes:
        cache: where they are.
        force: what the cache held before the build does not count.
        objects: key to object.
        notes: key to why an object in the cache was no good.
        outcomes: key to how its compilation went.
        sass: key to machine code as text, once `disassemble` has made it.
    """

    cache: ObjectCache
    force: bool
    objects: dict[str, CachedObject] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    sass: dict[str, bytes] = field(default_factory=dict)

    def missing(self, plan: TargetPlan) -> list[Unit]:
        """The units of a plan that must be compiled."""
        kernels = [kernel.unit for kernel in plan.kernels if not self._find(kernel.unit)]
        # Without kernels to link, nobody needs the host runtime.
        runtime = [plan.runtime] if plan.runtime and kernels and not self._find(plan.runtime) else []
        return [*runtime, *kernels]

    def _find(self, unit: Unit) -> bool:
        if self.force:
            return False
        try:
            found = self.cache.load(unit.key)
        except CorruptObjectError as error:
            self.notes[unit.key] = f"the object in the cache was damaged ({error}) and is compiled anew"
            return False
        if found:
            self.objects[unit.key] = found
        return found is not None

    def compile(self, units: Sequence[Unit], jobs: int | None, progress: Progress | None) -> None:
        """Compile units, and read their objects."""
        try:
            self.cache.sweep()
            self.outcomes = run_graph(units, self.cache, jobs=jobs, force=self.force, progress=progress)
        except OSError as error:
            raise KdgenError(
                f"the cache {self.cache.root} cannot be used: {error.strerror} ({error.filename}); set KDGEN_CACHE_DIR"
            ) from error
        for unit in units:
            try:
                found = self.cache.load(unit.key)
            except CorruptObjectError as error:
                raise KdgenError(
                    f"{unit.label}: its object in {self.cache.place(unit.key)} is damaged right after it was stored: {error}"
                ) from error
            if found is None:
                raise KdgenError(f"{unit.label}: its object vanished from {self.cache.place(unit.key)} during the build; build again")
            self.objects[unit.key] = found

    def resources(self, kernel: KernelPlan) -> dict[str, Resources]:
        """Entry to what ptxas reported; empty on the host."""
        return {entry: Resources(**item) for entry, item in self.objects[kernel.unit.key].facts["resources"].items()}

    def report(self, kernel: KernelPlan, target: Target) -> KernelReport:
        """What happened to a kernel."""
        key = kernel.unit.key
        found = self.objects.get(key)
        outcome = self.outcomes.get(key)
        status: Status = "to build" if found is None else "built" if outcome and outcome.status == "built" else "reused"
        return KernelReport(
            name=kernel.kernel.name,
            status=status,
            key=key,
            hash=kernel.source.content_hash,
            resources=figures(kernel.source.contract, target, self.resources(kernel)) if found else {},
            bytes=len(found.files[kernel.unit.binary]) if found else 0,
            seconds=round(outcome.seconds, 3) if outcome and status == "built" else 0.0,
            warnings=found.facts["warnings"] if found else "",
            note=self.notes.get(key, ""),
        )

    def disassemble(self, units: Sequence[Unit], jobs: int | None) -> None:
        """Have the machine code of units as text in `sass`, by key."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(jobs or core_count()) as pool:
            texts = pool.map(self._disassemble, [self.objects[unit.key].files[unit.binary] for unit in units])
            self.sass |= dict(zip((unit.key for unit in units), texts, strict=True))

    def _disassemble(self, cubin: bytes) -> bytes:
        # Cached like an object: nvdisasm takes longer than a build without changes.
        content = {"schema": SCHEMA, "kind": "sass", "cubin": hashlib.sha256(cubin).hexdigest(), "tool": nvdisasm_id()}
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        try:
            found = self.cache.load(key)
        except CorruptObjectError:
            found = None
        if found:
            return found.files[SASS]
        text = disassemble(cubin).encode()
        with self.cache.lock(key, "a disassembly", lambda message: print(f"kdgen: {message}", file=sys.stderr, flush=True)):
            self.cache.store(key, {SASS: text}, {})
        return text


def _refusals(kernel: KernelPlan, target: Target, compiled: _Compiled) -> list[str]:
    return refusals(kernel.kernel.name, target, kernel.source.contract, compiled.resources(kernel), kernel.kernel.allow_spill)


def _publish(plan: TargetPlan, spec: Spec, out: Path, compiled: _Compiled, keep: Sequence[str]) -> TargetReport:
    files: dict[str, bytes] = {name: text.encode() for name, text in plan.headers.items()}
    kernels: dict[str, ManifestKernel] = {}
    for kernel in plan.kernels:
        own = _kernel_files(kernel, compiled, keep)
        files |= dict(own.values())
        kernels[kernel.kernel.name] = ManifestKernel(
            family=kernel.kernel.family.name,
            hash=kernel.source.content_hash,
            params=kernel.kernel.params.model_dump(mode="json"),
            contract=kernel.source.contract,
            files={kind: path for kind, (path, _) in own.items()},
            resources=figures(kernel.source.contract, plan.target, compiled.resources(kernel)),
        )
    files[FILE_NAME] = manifest_bytes(
        spec={"name": spec.name, "kind": spec.kind, "digest": spec.digest},
        target=plan.target,
        isa=plan.isa,
        compiler=plan.compiler,
        kernels=kernels,
        contents=files,
    )
    changed = publish(out, spec.name, plan.target.name, files)
    return TargetReport(plan.target.name, out / spec.name / plan.target.name, changed, _reports(plan, compiled))


def _kernel_files(kernel: KernelPlan, compiled: _Compiled, keep: Sequence[str]) -> Mapping[str, tuple[str, bytes]]:
    """Kind to published path and contents."""
    name, found = kernel.kernel.name, compiled.objects[kernel.unit.key].files
    binary = found[kernel.unit.binary]
    own = {
        "source": (kernel.source_file, kernel.source.text.encode()),
        "binary": (f"{name}.{'so' if kernel.unit.kind == 'host' else 'cubin'}", binary),
    }
    if kernel.unit.kind == "cuda":
        if "ptx" in keep:
            own["ptx"] = (f"{name}.ptx", found[PTX])
        if "sass" in keep:
            own["sass"] = (f"{name}.sass", compiled.sass[kernel.unit.key])
    return own


def _dry_report(plan: TargetPlan, spec: Spec, out: Path, compiled: _Compiled) -> TargetReport:
    return TargetReport(plan.target.name, out / spec.name / plan.target.name, False, _reports(plan, compiled))


def _reports(plan: TargetPlan, compiled: _Compiled) -> tuple[KernelReport, ...]:
    return tuple(compiled.report(kernel, plan.target) for kernel in plan.kernels)
