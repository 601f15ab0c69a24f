"""Configurations to cubins and what their code holds: on all cores, through the cache of compiled objects.

Each core has a process of its own, so that a compiler that crashes ends neither the sweep nor the other compilations.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdgen.build.cache import SCHEMA, CorruptObjectError, ObjectCache, cache_directory
from kdgen.build.graph import core_count
from kdgen.build.unit import Unit
from kdgen.compile.ptxas import Resources
from kdgen.contract import Contract
from kdgen.errors import KdgenError, RenderError
from kdgen.spec import KernelSpec
from kdgen.sweep.orphans import die_with_parent
from kdgen.targets import Target

#: Raised when `kdgen.sweep.instructions` counts otherwise.
_ANALYSIS = 1


@dataclass(frozen=True)
class Compiled:
    """A compiled configuration.

    Attributes:
        contract: of the kernel.
        key: of its object in the cache.
        resources: entry to what ptxas reported.
        code: entry to `kdgen.sweep.instructions.analyse`; empty when there is no nvdisasm for it.
        seconds: of compiling; 0 when it was in the cache.
    """

    contract: Contract
    key: str
    resources: Mapping[str, Resources]
    code: Mapping[str, Any]
    seconds: float


def unit_of(kernel: KernelSpec, target: Target) -> tuple[Unit, Contract]:
    """What compiles a kernel; the same unit, and so the same cached object, as in `kdgen build`.

    Raises:
        RenderError: its family does not admit it for the target.
    """
    from kdgen.build.plan import plan_target
    from kdgen.spec import Spec

    (planned,) = plan_target(Spec.of(kernel.name, kernel), target).kernels
    return planned.unit, planned.source.contract


class Compiler:
    """Compiles units on several cores; a context manager.

    Args:
        jobs: processes; None for one per core.
    """

    def __init__(self, jobs: int | None = None):
        self._jobs = jobs or core_count()
        self._cache = ObjectCache(cache_directory())
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Compiler:
        try:
            self._cache.sweep()
        except OSError as error:
            raise KdgenError(f"the cache {self._cache.root} cannot be used: {error.strerror}; set KDGEN_CACHE_DIR") from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)

    @property
    def cache(self) -> ObjectCache:
        """Where the objects are."""
        return self._cache

    @property
    def jobs(self) -> int:
        """How many compile at once."""
        return self._jobs

    def compile(self, kernels: Mapping[str, KernelSpec], target: Target) -> Iterator[tuple[str, Compiled | KdgenError]]:
        """Compile kernels; yields (key of the mapping, result) as they are done, in no order. What fails is given back, not raised."""
        waiting: dict[str, tuple[Unit, Contract]] = {}
        for name, kernel in kernels.items():
            try:
                waiting[name] = unit_of(kernel, target)
            except RenderError as error:
                yield name, error
        pending = {self._submit(unit): name for name, (unit, _) in waiting.items()}
        suspects: list[str] = []
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                name = pending.pop(future)
                try:
                    yield name, _result(future.result(), waiting[name][1])
                except BrokenProcessPool:
                    suspects.append(name)
            if suspects and not pending:
                self._pool = None
        # A process died. Nobody says whose compilation it was: each is tried once more, alone.
        for name in suspects:
            self._pool = None
            try:
                yield name, _result(self._submit(waiting[name][0]).result(), waiting[name][1])
            except BrokenProcessPool:
                yield name, KdgenError("the compiler's process ended without a result (killed, or out of memory?)")
                self._pool = None

    def _submit(self, unit: Unit) -> Future[dict[str, Any]]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, context, initializer=die_with_parent, initargs=(os.getpid(),))
        try:
            return self._pool.submit(compile_one, unit.to_json(), str(self._cache.root))
        except BrokenProcessPool:
            failed: Future[dict[str, Any]] = Future()
            failed.set_exception(BrokenProcessPool())
            return failed


def _result(data: dict[str, Any], contract: Contract) -> Compiled | KdgenError:
    if "error" in data:
        from kdgen.build.worker import error_from

        return error_from(data)
    resources = {entry: Resources(**item) for entry, item in data["resources"].items()}
    return Compiled(contract, data["key"], resources, data["code"], data["seconds"])


def compile_one(text: str, root: str) -> dict[str, Any]:
    """Compile one unit in this process; the result as JSON data."""
    from kdgen.build.worker import compile_unit

    unit, cache = Unit.from_json(text), ObjectCache(Path(root))
    note = Path(tempfile.gettempdir()) / f"kdgen-sweep-{os.getpid()}.json"
    try:
        _, seconds = compile_unit(unit, cache, False, note)
        found = cache.load(unit.key)
        if found is None:
            raise KdgenError(f"{unit.label}: its object vanished from the cache")
        code = _code(found.files[unit.binary], cache)
        return {"key": unit.key, "resources": found.facts["resources"], "code": code, "seconds": seconds}
    except KdgenError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except OSError as error:
        return {"error": "KdgenError", "message": f"{error.filename or root}: {error.strerror}; free some space, or set KDGEN_CACHE_DIR"}
    except CorruptObjectError as error:
        return {"error": "KdgenError", "message": f"{unit.label}: its object in {cache.place(unit.key)} is damaged: {error}"}
    finally:
        note.with_suffix(".waiting").unlink(missing_ok=True)


def _code(cubin: bytes, cache: ObjectCache) -> dict[str, Any]:
    """The analysis of a cubin's code, cached: disassembling takes a good part of what compiling takes."""
    from kdgen.compile.sass import disassemble, nvdisasm_id
    from kdgen.sweep.instructions import analyse

    content = {"schema": SCHEMA, "kind": f"analysis {_ANALYSIS}", "cubin": hashlib.sha256(cubin).hexdigest(), "tool": nvdisasm_id()}
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    try:
        found = cache.load(key)
    except CorruptObjectError:
        found = None
    if found:
        return dict(json.loads(found.files["code.json"]))
    code = analyse(disassemble(cubin))
    with cache.lock(key, "an analysis", lambda message: None):
        cache.store(key, {"code.json": json.dumps(code).encode()}, {})
    return code


def stage_of(kernel: KernelSpec, target: Target, compiled: Compiled) -> tuple[str, str]:
    """(`shared` or `spill`, the reason) for a kernel that may not be published; ("", "") for one that may."""
    from kdgen.build.policy import refusals

    for reason in refusals(kernel.name, target, compiled.contract, compiled.resources, kernel.allow_spill):
        return ("spill" if "spills registers" in reason else "shared"), reason.split(", entry ", 1)[-1]
    return "", ""


def publish(kernels: Sequence[tuple[str, KernelSpec]], target: Target, out: Path) -> None:
    """Build kernels from the cache into `out/NAME/TARGET`, to be loaded; each as a spec of its own, called by its id."""
    from kdgen.build import build_spec
    from kdgen.spec import Spec

    for name, kernel in kernels:
        build_spec(Spec.of(name, kernel), [target], out)
