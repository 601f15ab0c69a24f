"""The command as people use it: real compilations of a small kernel, real kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdgen import cli
from kdgen.spec import load_spec
from kdgen.sweep.store import Store
from tests.sweep.fakes import ROOT, comparable, write_sweep

SPACE = "  sequences: [1, 2, 4, 8, 16]\n  width_cap: [0, 4, 8]\n"
SHAPES = "  - {B: [8, 64]}\n"


@pytest.fixture
def swept(tmp_path):
    return write_sweep(tmp_path, SPACE, shapes=SHAPES, base="tree_build", constraints="  - 'sequences != 2 or width_cap == 0'\n")


def rows_in(directory):
    with Store(directory, read_only=True) as store:
        return {place: store.rows(place) for place, *_ in store.sweeps()}


def run(capsys, *arguments):
    code = cli.run(["sweep", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_sweep_without_a_gpu_from_end_to_end(swept, tmp_path, capsys):
    out = tmp_path / "out"
    code, said, told = run(capsys, swept, "--arch", "sm_90", "--out", out)
    assert code == 0, told
    assert "invalid: constraint      2" in said
    assert "compiled                14" in said, "thirteen points, and the base"
    assert f"report: {out / 'report.html'}" in said
    assert "invalid: constraint: sequences != 2 or width_cap == 0" in told
    code, said, told = run(capsys, swept, "--arch", "sm_90", "--out", out, "--json")
    assert code == 0
    document = json.loads(said)
    assert told == ""
    assert document["stages"] == {"invalid: constraint": 2, "compiled": 14}
    assert not document["measured"]
    assert len(document["ranking"]) == 14
    assert document["choices"][0]["bucket"] == "all"
    code, said, _ = run(capsys, "--replay", out, "--strategy", "random", "--seed", "3", "--budget", "10", "--json")
    assert code == 0
    assert json.loads(said)["evaluated"] == 10
    code, said, _ = run(capsys, "apply", out, "-o", tmp_path / "tuned.yaml")
    assert code == 0
    assert "predicted" in said
    assert load_spec(tmp_path / "tuned.yaml").kernels[0].family.name == "tree_build"
    assert run(capsys, "report", out)[0] == 0
    code, said, _ = run(capsys, "export", out, tmp_path / "rows.csv")
    assert (code, said.strip()) == (0, f"{tmp_path / 'rows.csv'}: 44 rows")


def children_of(parent):
    """Process numbers of the children of a process."""
    return [int(pid) for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_sweep_ends_with_the_same_rows_when_it_is_started_again(swept, tmp_path):
    command = [sys.executable, "-m", "kdgen.cli", "sweep", str(swept), "--arch", "sm_90", "-j", "2", "--out"]
    environment = {**os.environ, "KDGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    victim = subprocess.Popen([*command, str(tmp_path / "parts")], env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        try:
            if sum(map(len, rows_in(tmp_path / "parts").values())) >= 9:
                break
        except Exception:
            pass
        time.sleep(0.05)
    assert victim.poll() is None, "it is to be killed half-way"
    helpers = children_of(victim.pid)
    assert helpers
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    time.sleep(1.0)
    assert not [pid for pid in helpers if is_running(pid)], "nothing of it goes on"
    before = rows_in(tmp_path / "parts")
    assert 9 <= sum(map(len, before.values())) < 44
    subprocess.run([*command, str(tmp_path / "parts")], env=environment, check=True, capture_output=True)
    subprocess.run([*command, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    parts, whole = rows_in(tmp_path / "parts"), rows_in(tmp_path / "whole")
    assert parts == whole
    assert sum(str(row.stage) == "compiled" for rows in whole.values() for row in rows) == 14 * 3
    ((place, rows),) = before.items()
    assert {row["configuration"] for row in comparable(rows)} <= {row["configuration"] for row in comparable(parts[place])}


def test_a_sweep_in_which_nothing_can_be_chosen_fails(tmp_path, monkeypatch, capsys):
    from kdgen.errors import CompileError
    from kdgen.sweep.compiling import Compiler

    monkeypatch.setattr(Compiler, "compile", lambda self, kernels, target: iter((name, CompileError("refused")) for name in kernels))
    path = write_sweep(tmp_path, "  sequences: [1, 2]\n", shapes=SHAPES, base="tree_build")
    code, said, told = run(capsys, path, "--arch", "sm_90", "--out", tmp_path / "out")
    assert code == 1
    assert "none of 3 configurations can be chosen:\n3 × does not compile: refused" in told
    assert "does not compile      3" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_90"], "kdgen sweep needs --out"),
        (
            ["--arch", "sm_90", "--out", "o", "--budget", "ten"],
            "--budget ten: allowed are a number of configurations such as 100, or a time",
        ),
        (["--arch", "host", "--out", "o"], "sweeps are for GPUs"),
        (["--arch", "sm_1", "--out", "o"], "unknown target 'sm_1'"),
        (["--arch", "sm_90", "--out", "o", "--strategy", "luck"], "unknown strategy 'luck'"),
        (["--arch", "sm_90", "--out", "o", "--device", "host"], "--device host: allowed are none, cuda, cuda:N"),
        (["--arch", "sm_90", "--replay", "o"], "--replay needs no sweep file"),
    ],
)
def test_wrong_use_is_explained(swept, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, told = run(capsys, swept, *arguments)
    assert code == 2
    assert message in told


def test_help_and_stores_that_are_not_there(tmp_path, capsys):
    assert run(capsys, "--help")[0] == 0
    assert run(capsys, "run", "--help")[0] == 0
    for command in ("apply", "report"):
        code, _, told = run(capsys, command, tmp_path)
        assert code == 1
        assert "holds no sweep.sqlite" in told


def test_times_of_budgets():
    from kdgen.cli.sweep import parse_budget

    assert parse_budget("10m") == (None, 600.0)
    assert parse_budget("1.5h") == (None, 5400.0)
    assert parse_budget("12") == (12, None)
    assert parse_budget("") == (None, None)


@pytest.mark.cuda
def test_a_sweep_on_a_gpu(tmp_path, capsys):
    from kdgen.runtime import open_device

    arch = next(name for name in open_device("cuda").target_names if name in ("sm_90", "sm_120", "sm_100", "sm_89", "sm_80"))
    path = write_sweep(tmp_path, "  stages: [4, 8]\n  slices: [2, 4]\n", shapes="  - {T: [1, 16]}\n")
    code, said, told = run(capsys, path, "--arch", arch, "--device", "cuda", "--out", tmp_path / "out", "--json")
    assert code == 0, told
    document = json.loads(said)
    assert document["measured"]
    assert document["stages"]["measured"] >= 4
    assert document["ceilings"]["read"] > 1e11


def test_a_sweep_with_a_gpu_that_is_played(tmp_path, monkeypatch, capsys):
    from kdgen.sweep import session

    real = session.open_worker
    monkeypatch.setattr(session, "open_worker", lambda *arguments: real(*arguments, "tests.sweep.fakes:make"))
    path = write_sweep(tmp_path, "  stages: [2, 4, 7, 8]\n  slices: [2, 4]\n", shapes="  - {T: [1, 16]}\n")
    out = tmp_path / "out"
    arguments = (path, "--arch", "sm_90", "--device", "cuda", "--out", out)
    code, said, told = run(capsys, *arguments, "--json")
    assert code == 0, told
    document = json.loads(said)
    assert document["device"] == "Fake GPU"
    assert document["stages"] == {"wrong": 2, "launch failed": 2, "measured": 4}
    assert document["choices"][0]["configuration"] == document["incumbent"]
    assert document["ceilings"] == {"read": 4e12, "mma": 6e14}
    assert set(document["rank_correlation"]) == {"T = 1", "T = 16"}
    code, said, told = run(capsys, *arguments)
    assert code == 0
    assert told == "", "nothing is done twice"
    assert "chosen for all: " in said
    assert "predicted vs measured: mean rank correlation" in said
    code, said, _ = run(capsys, "--replay", out, "--strategy", "halving", "--seed", "1", "--json")
    assert json.loads(said)["behind"] <= 0.02
    code, _, told = run(capsys, path, "--arch", "sm_120", "--device", "cuda", "--out", out)
    assert code == 2
    assert "the GPU is a Fake GPU, which runs sm_90" in told
