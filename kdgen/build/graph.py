"""The build graph: one ninja edge for each unit that the cache lacks, run on as many cores as asked for."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import kdgen
from kdgen.build.cache import ObjectCache
from kdgen.build.report import Progress
from kdgen.build.unit import Unit
from kdgen.build.worker import CACHE_VARIABLE, FORCE_VARIABLE, error_from
from kdgen.errors import KdgenError, ToolchainError

_STATUS = "kdgen-unit "
_DONE = re.compile(rf"^{_STATUS}(\d+)/(\d+) (.*)$")
_POLL = 0.5  # seconds between looks at what workers wait for


@dataclass(frozen=True)
class Outcome:
    """How one unit went.

    Attributes:
        status: `built`, or `reused` when another build compiled it meanwhile.
        seconds: what it took.
    """

    status: str
    seconds: float


def run_graph(units: Sequence[Unit], cache: ObjectCache, *, jobs: int | None, force: bool, progress: Progress | None) -> dict[str, Outcome]:
    """Compile units into the cache; host runtimes before what is linked with them.

    Args:
        units: what to compile; keys are distinct.
        cache: where objects go, and where the graph's private directory is.
        jobs: how many at once; None for one per core.
        force: compile even what is in the cache.
        progress: told of every finished unit.

    Returns:
        key to outcome.

    Raises:
        KdgenError: units failed. All others were still compiled; the message has every failure. Its class is that of the first.
    """
    ninja = find_ninja()
    with cache.temporary() as directory:
        names = {unit.key: f"unit{number}" for number, unit in enumerate(units)}
        for unit in units:
            (directory / f"{names[unit.key]}.json").write_text(unit.to_json(), "utf-8")
        (directory / "build.ninja").write_text(graph_text(units, names), "utf-8")
        if progress:
            progress.start(len(units))
        try:
            output = _run(ninja, directory, jobs, _environment(cache, force), progress)
        finally:
            if progress:
                progress.finish()
        return _outcomes(units, names, directory, output)


def find_ninja() -> str:
    """The ninja program: that of the Python package, else the one on PATH.

    Raises:
        ToolchainError: there is none.
    """
    try:
        import ninja
    except ImportError:
        found = None
    else:
        found = shutil.which("ninja", path=ninja.BIN_DIR)
    found = found or shutil.which("ninja")
    if found is None:
        raise ToolchainError("ninja, which drives the compilers, is not installed: pip install 'kdgen[compiler]'")
    return found


def graph_text(units: Sequence[Unit], names: Mapping[str, str]) -> str:
    """The text of `build.ninja`.

    Args:
        units: one edge for each.
        names: key to the stem of the unit's files.
    """
    # -P: the working directory, which holds generated files, is no place for modules.
    command = f"{shlex.quote(sys.executable)} -P -m kdgen.build.worker $in".replace("$in", "\0").replace("$", "$$").replace("\0", "$in")
    lines = ["rule compile", f"  command = {command}", "  description = $label", ""]
    for unit in units:
        needs = f" | {names[unit.runtime]}.done" if unit.runtime in names else ""
        label = unit.label.replace("$", "$$")
        lines += [f"build {names[unit.key]}.done: compile {names[unit.key]}.json{needs}", f"  label = {label}"]
    return "\n".join(lines) + "\n"


def core_count() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment(cache: ObjectCache, force: bool) -> dict[str, str]:
    environment = {**os.environ, "NINJA_STATUS": f"{_STATUS}%f/%t ", CACHE_VARIABLE: str(cache.root), FORCE_VARIABLE: "1" if force else "0"}
    # Workers start in another directory, so a package found through the working directory must be named. One that is installed is
    # found anyway; naming its directory would put all packages before the standard library.
    package = str(Path(kdgen.__file__).resolve().parent.parent)
    if package not in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # A sanitized caller must not have its sanitizer in every compiler.
    if "asan" in environment.get("LD_PRELOAD", ""):
        del environment["LD_PRELOAD"]
    return environment


def _run(ninja: str, directory: Path, jobs: int | None, environment: Mapping[str, str], progress: Progress | None) -> str:
    """Run ninja to its end; returns what it printed beside its status lines."""
    # -k 0: a failed unit does not keep the others from being compiled, so that all failures are reported together.
    command = [ninja, "-k", "0", "-j", str(jobs or core_count())]
    try:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise ToolchainError(f"{ninja} does not run: {error.strerror}; pip install --force-reinstall ninja") from error
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    assert process.stdout is not None  # it is a pipe
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    other: list[str] = []
    try:
        while True:
            try:
                line = lines.get(timeout=_POLL)
            except queue.Empty:
                _pass_on_waits(directory)
                continue
            if line is None:
                break
            if found := _DONE.match(line):
                if progress:
                    progress.advance(found[3])
            else:
                other.append(line)
        process.wait()
    except BaseException:
        process.terminate()  # ninja stops its children
        process.wait()
        raise
    return "".join(other)


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _pass_on_waits(directory: Path) -> None:
    """Print what workers wait for: ninja holds back their own output until they end."""
    for note in directory.glob("*.waiting"):
        print(f"kdgen: {note.read_text('utf-8')}", file=sys.stderr, flush=True)
        note.unlink()


def _outcomes(units: Sequence[Unit], names: Mapping[str, str], directory: Path, output: str) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    errors: list[KdgenError] = []
    failed: set[str] = set()
    for unit in units:
        stem = directory / names[unit.key]
        if (done := stem.with_suffix(".done")).exists():
            outcomes[unit.key] = Outcome(**json.loads(done.read_text("utf-8")))
            continue
        failed.add(unit.key)
        if (error := stem.with_suffix(".error")).exists():
            errors.append(error_from(json.loads(error.read_text("utf-8"))))
        elif unit.runtime not in failed:
            tail = "\n".join(output.strip().splitlines()[-10:])
            errors.append(
                KdgenError(f"{unit.label}: the compiler process ended without a result (killed, or out of memory?)\n{tail}".rstrip())
            )
    if errors:
        raise _combined(errors)
    return outcomes


def _combined(errors: Sequence[KdgenError]) -> KdgenError:
    """One error with the text of all, each once, of the class of the first."""
    return type(errors[0])("\n\n".join(dict.fromkeys(str(error) for error in errors)))
