"""Compiles one unit: `python -m kdgen.build.worker UNIT.json`, which ninja runs for each unit that the cache lacks.

It writes `UNIT.done` when the object is in the cache, or `UNIT.error`; both are JSON. While it waits for another process it leaves a
message in `UNIT.waiting`. It imports only what compiling needs, because it starts once per kernel.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kdgen.errors
from kdgen.build.cache import CorruptObjectError, ObjectCache
from kdgen.build.unit import BINARY, PTX, Unit
from kdgen.errors import KdgenError, ToolchainError
from kdgen.targets import get_target

CACHE_VARIABLE = "KDGEN_BUILD_CACHE"
FORCE_VARIABLE = "KDGEN_BUILD_FORCE"


def main(job: Path) -> int:
    """Compile the unit in `job`; returns the exit code."""
    # The compilers' files go where later builds look for leftovers, should this process be killed.
    tempfile.tempdir = str(job.parent.resolve())
    try:
        unit = Unit.from_json(job.read_text("utf-8"))
        status, seconds = compile_unit(unit, ObjectCache(Path(os.environ[CACHE_VARIABLE])), os.environ.get(FORCE_VARIABLE) == "1", job)
        _write(job.with_suffix(".done"), {"status": status, "seconds": seconds})
    except KdgenError as error:
        _write(job.with_suffix(".error"), {"error": type(error).__name__, "message": str(error)})
        return 1
    except OSError as error:
        message = (
            f"{error.filename or os.environ[CACHE_VARIABLE]}: {error.strerror}; free some space, or set KDGEN_CACHE_DIR to another place"
        )
        _write(job.with_suffix(".error"), {"error": "KdgenError", "message": message})
        return 1
    except Exception as error:  # whatever it is, the build has to name the unit
        _write(job.with_suffix(".error"), {"error": "KdgenError", "message": f"internal error: {type(error).__name__}: {error}"})
        return 1
    return 0


def compile_unit(unit: Unit, cache: ObjectCache, force: bool, job: Path) -> tuple[str, float]:
    """Put a unit's object into the cache; returns `built`, or `reused` when another process has just done it, and the seconds it took."""
    with cache.lock(unit.key, f"the compilation of {unit.label}", lambda message: _tell(job, message)):
        if not force:
            try:
                if cache.load(unit.key):
                    return "reused", 0.0
            except CorruptObjectError:
                pass  # stored anew below
        started = time.monotonic()  # waiting for the lock is not compiling
        files, facts = _compile(unit, cache)
        cache.store(unit.key, files, facts)
        return "built", time.monotonic() - started


def _compile(unit: Unit, cache: ObjectCache) -> tuple[dict[str, bytes], dict[str, Any]]:
    target = get_target(unit.target)
    if unit.kind == "cuda":
        from kdgen.compile.identity import nvrtc_library
        from kdgen.compile.nvrtc import compile_cuda, loaded_path

        expected = nvrtc_library()[2]
        if Path(loaded_path()).resolve() != expected:
            raise ToolchainError(
                f"NVRTC was loaded from {loaded_path()}, not from {expected}: remove one, or unset LD_LIBRARY_PATH and LD_PRELOAD"
            )
        cuda = compile_cuda(unit.text, unit.file_name, unit.headers, target, unit.options)
        resources = {entry: asdict(item) for entry, item in cuda.resources.items()}
        return {BINARY["cuda"]: cuda.cubin, PTX: cuda.ptx}, {"resources": resources, "warnings": cuda.log}
    from kdgen.compile.host import compile_host, compile_host_runtime

    if unit.kind == "host_runtime":
        return {BINARY["host_runtime"]: compile_host_runtime(unit.headers, target)}, {"resources": {}, "warnings": ""}
    try:
        runtime = cache.load(unit.runtime)
    except CorruptObjectError as error:
        raise KdgenError(f"the compiled host runtime in {cache.place(unit.runtime)} was damaged during the build: {error}") from error
    if runtime is None:
        raise KdgenError(f"the compiled host runtime vanished from {cache.place(unit.runtime)} during the build; build again")
    host = compile_host(unit.text, unit.file_name, unit.headers, target, runtime.files[BINARY["host_runtime"]])
    return {BINARY["host"]: host.library}, {"resources": {}, "warnings": host.log}


def error_from(data: dict[str, str]) -> KdgenError:
    """The exception that a worker wrote down."""
    kind = getattr(kdgen.errors, data["error"], KdgenError)
    return kind(data["message"]) if isinstance(kind, type) and issubclass(kind, KdgenError) else KdgenError(data["message"])


def _tell(job: Path, message: str) -> None:
    job.with_suffix(".waiting").write_text(message, "utf-8")


def _write(path: Path, data: dict[str, Any]) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(data), "utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
