"""Several processes, and processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdgen.build import build_spec
from kdgen.build import graph as graph_module
from kdgen.build import locks as locks_module
from kdgen.targets import get_target
from tests.build.fakes import demo_spec, tree

ROOT = Path(__file__).resolve().parents[2]


def start(out: Path, target: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.build.fakes", str(out), target],
        cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def slow_compiler(place: Path, seconds: float) -> str:
    """A g++ that takes its time, and leaves a note when it starts."""
    place.write_text(f'#!/bin/sh\nif [ "$1" = -v ]; then exec g++ -v; fi\ntouch {place}.started\nsleep {seconds}\nexec g++ "$@"\n')
    place.chmod(0o755)
    return str(place)


def test_two_builds_at_once(tmp_path: Path) -> None:
    builds = [start(tmp_path / "out", "sm_120") for _ in range(2)]
    answers = [build.communicate(timeout=60) for build in builds]
    assert [build.returncode for build in builds] == [0, 0], answers
    # Each kernel was compiled by one of them, unless one had finished before the other looked.
    words = [word for answer in answers for word in answer[0].split()]
    assert sorted(words) == ["built", "built", "reused", "reused"]
    assert sorted(tree(tmp_path / "out" / "fake" / "sm_120")) == [
        "device/cuda.cuh", "first.cu", "first.cubin", "manifest.json", "second.cu", "second.cubin",
    ]  # fmt: skip
    assert not list((tmp_path / "out").glob(".staging-*"))


@pytest.mark.usefixtures("inline")
def test_kill_9_and_build_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    compiler = slow_compiler(tmp_path / "cxx", 1.0)
    build = start(out, "host", KDGEN_CXX=compiler)
    wait_for(lambda: Path(f"{compiler}.started").exists())
    build.send_signal(signal.SIGKILL)
    build.communicate(timeout=10)
    assert not (out / "fake").exists()
    assert len(list((cache / "tmp").iterdir())) >= 1, "the killed build could not clean up"

    monkeypatch.setenv("KDGEN_CXX", compiler)
    report = build_spec(demo_spec(), [get_target("host")], out)
    assert sorted(tree(out / "fake" / "host")) == [
        "device/host.hpp", "device/host_runtime.cpp", "first.cpp", "first.so", "manifest.json", "second.cpp", "second.so",
    ]  # fmt: skip
    assert report.targets[0].changed
    wait_for(lambda: not [path for path in (cache / "tmp").iterdir() if f"-{build.pid}-" in path.name])


def test_lock_names_its_holder_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.lock"
    code = (
        "import sys, time; from pathlib import Path; from kdgen.build.locks import hold\n"
        "with hold(Path(sys.argv[1]), 'it', print):\n  print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    monkeypatch.setattr(locks_module, "PATIENCE", 0.2)
    told: list[str] = []

    def tell(message: str) -> None:
        told.append(message)
        holder.kill()  # dies without releasing
        holder.wait()

    with locks_module.hold(path, "the compilation of x", tell):
        assert told == [f"waiting for process {holder.pid}, which holds the compilation of x (lock {path})"]


def test_waiting_is_told_while_ninja_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = tmp_path / "unit0.waiting"
    note.write_text("waiting for process 7")
    graph_module._pass_on_waits(tmp_path)
    assert capsys.readouterr().err == "kdgen: waiting for process 7\n"
    assert not note.exists()


@pytest.mark.usefixtures("inline")
def test_interrupt_stops_the_compilers(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = slow_compiler(tmp_path / "cxx", 30.0)
    monkeypatch.setenv("KDGEN_CXX", compiler)
    real = graph_module._pass_on_waits

    def interrupt(directory: Path) -> None:
        real(directory)
        if Path(f"{compiler}.started").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(graph_module, "_pass_on_waits", interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build_spec(demo_spec(), [get_target("host")], tmp_path / "out")
    assert time.monotonic() - started < 15
    assert not list((cache / "tmp").iterdir())
    assert not (tmp_path / "out").exists()
