"""The commands, end to end on the tiny engine."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kdgen import cli
from kdgen.spec import load_spec
from tests.cli.conftest import TINY

KERNELS = tuple(kernel.name for kernel in load_spec(TINY).kernels)
ALL = f"{len(KERNELS)} of {len(KERNELS)} passed"
CASES = str(Path(__file__).parents[1] / "golden" / "ddtree_cases.json")
Capture = pytest.CaptureFixture[str]


def output(capsys: Capture, *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.run(list(arguments)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def document(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    return json.loads(output(capsys, *arguments, code=code))


def test_build_reports_every_kernel_and_reuses_them(built: Path, capsys: Capture) -> None:
    text = output(capsys, "build", TINY, "--arch", "sm_120", "--out", str(built))
    assert "registers" in text
    for name in KERNELS:
        (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
        assert "reused" in line
    report = document(capsys, "build", TINY, "--arch", "sm_120", "--out", str(built), "--json")
    assert {kernel["status"] for target in report["targets"] for kernel in target["kernels"]} == {"reused"}


def test_dry_run_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    text = output(capsys, "build", TINY, "--arch", "host", "--out", str(tmp_path / "out"), "--dry-run")
    assert all(name in text for name in KERNELS)
    assert list(tmp_path.iterdir()) == []


def test_build_of_a_wrong_spec_reports_the_line(tmp_path: Path, capsys: Capture) -> None:
    spec = tmp_path / "bad.yaml"
    spec.write_text("kind: kernel\nname: bad\nfamily: tree_build\nparams:\n  depth: 99\n  top_k: 4\n  budget: 8\ntargets: [host]\n")
    assert cli.run(["build", str(spec)]) == 2
    assert f"{spec}:5: params.depth" in capsys.readouterr().err


def test_render_is_clean_unless_marks_are_wanted(capsys: Capture) -> None:
    clean = output(capsys, "render", TINY, "tree_build", "--arch", "sm_120")
    assert '#include "device/cuda.cuh"' in clean
    assert "#line" not in clean
    assert "#line" in output(capsys, "render", TINY, "tree_build", "--arch", "sm_120", "--marks")
    every = output(capsys, "render", TINY)
    assert all(f"// {name}:" in every for name in KERNELS)
    assert "// " not in output(capsys, "render", TINY, "nothing", code=2)


def test_inspect(built: Path, capsys: Capture) -> None:
    (target,) = document(capsys, "inspect", str(built / "tiny" / "sm_120"), "--json")
    kernels = {kernel["name"]: kernel for kernel in target["kernels"]}
    assert set(kernels) == set(KERNELS)
    build = kernels["tree_build"]
    assert 0 < build["registers"] <= 255
    assert 0 < build["shared_bytes"] <= 101_376
    assert build["spill_bytes"] == 0
    assert 0 < build["occupancy"] <= 1
    assert {"stack_bytes", "arguments", "launches", "pinned", "hash", "params"} <= build.keys()
    text = output(capsys, "inspect", str(built / "tiny" / "sm_120"), "--kernel", "tree_build")
    assert re.search(r"^log_probs +in +f32 +\[S, 7, 8\]", text, re.MULTILINE)
    assert "launch: tree_build, grid S × 1 × 1, 32 threads" in text
    assert "kv_compact" not in text
    both = document(capsys, "inspect", str(built / "tiny"), "--json")
    assert [target["target"]["name"] for target in both] == ["host", "sm_120"]


def test_inspect_refuses(built: Path, tmp_path: Path, capsys: Capture) -> None:
    assert cli.run(["inspect", str(tmp_path)]) == 1
    assert "holds no manifest.json" in capsys.readouterr().err
    assert cli.run(["inspect", str(built / "tiny"), "--kernel", "nix"]) == 2
    assert f"it holds: {', '.join(sorted(KERNELS))}" in capsys.readouterr().err
    copy = tmp_path / "copy"
    shutil.copytree(built / "tiny" / "sm_120", copy)
    binary = copy / "tree_build.cubin"
    binary.write_bytes(binary.read_bytes()[:-1])
    assert cli.run(["inspect", str(copy)]) == 1
    assert "tree_build.cubin" in capsys.readouterr().err


def test_diff(built: Path, tmp_path: Path, capsys: Capture) -> None:
    first = str(built / "tiny" / "sm_120")
    assert output(capsys, "diff", first, first).count("identical") == len(KERNELS)
    options = ("--set", "tree.budget=12", "--set", "tree_build.depth_bonus=0.5")
    output(capsys, "build", TINY, "--arch", "sm_120", "--out", str(tmp_path), *options)
    second = str(tmp_path / "tiny" / "sm_120")
    (changes,) = document(capsys, "diff", first, second, "--json")
    build = changes["kernels"]["tree_build"]
    assert build["bit_compatible"] is False
    found = {(change["what"], change["name"]): (change["first"], change["second"]) for change in build["changes"]}
    assert found["parameter", "budget"] == (24, 12)
    assert found["pinned", "depth_bonus"] == (0.0, 0.5)
    assert ("resource", "shared_bytes") in found
    assert ("instructions", "instructions") in found
    assert changes["kernels"]["tree_accept"]["bit_compatible"] is True
    assert changes["kernels"]["gemm_probe"]["changes"] == []
    text = output(capsys, "diff", first, second)
    assert "tree_build: RESULT BITS MAY DIFFER" in text
    assert "tree_accept: same result bits" in text


def test_verify_passes_on_the_host(built: Path, capsys: Capture) -> None:
    text = output(capsys, "verify", TINY, "--out", str(built), "--schedules", "3", "--cases", CASES)
    lines = text.splitlines()
    assert lines[-1] == f"{len(KERNELS) + 9} of {len(KERNELS) + 9} passed on host, seed 0"  # and nine worked cases
    assert [line.split()[:2] for line in lines[: len(KERNELS)]] == [["pass", name] for name in KERNELS]
    assert any("case rand_L7_K8_B64" in line and "variant kernels: tree_build" in line for line in lines)


def test_verify_json_and_failure(built: Path, capsys: Capture, tmp_path: Path) -> None:
    result = document(capsys, "verify", TINY, "--out", str(built), "--schedules", "1", "--json")
    assert result["passed"] is True
    assert {kernel["kernel"] for kernel in result["kernels"]} == set(KERNELS)
    cases = json.loads(Path(CASES).read_text())
    cases["cases"] = cases["cases"][:1]
    cases["cases"][0]["verify"]["bonus_next_token"] += 1
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(cases))
    text = output(capsys, "verify", TINY, "--out", str(built), "--schedules", "1", "--cases", str(wrong), code=3)
    assert "FAIL  case worked_L3_K3_B6" in text
    assert "bonus token: got 61, want 62" in text
    assert f"{len(KERNELS)} of {len(KERNELS) + 1} passed" in text


def test_verify_builds_what_is_not_current(tmp_path: Path, capsys: Capture) -> None:
    text = output(capsys, "verify", TINY, "--out", str(tmp_path / "nothing"), "--set", "tree.budget=5", "--schedules", "1")
    assert ALL in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_verify_with_sanitizers(built: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", TINY, "--out", str(built), "--schedules", "1", "--sanitize"]) == 0
    assert ALL in capfd.readouterr().out


def test_tree(built: Path, capsys: Capture) -> None:
    text = output(capsys, "tree", TINY, "--out", str(built))
    # The tiny engine seeds its trees with a chain, the example does not.
    assert text.startswith("(the example needs other kernels than the spec's: tree_build chain_seed=false)\n")
    drawing = text.split("\n\n", maxsplit=1)[0].splitlines()[1:]
    assert [line.split("   node")[0] for line in drawing] == [
        "token 7 *",
        "+- token 11 *",
        "|  +- token 21",
        "|  |  `- token 31",
        "|  `- token 22 *",
        "`- token 12",
        "   `- token 21",
    ]
    assert "probability 0.231" in drawing[3]
    assert "acceptance length 3" in text
    assert "next round: root token 61 at position 103" in text


def test_clean_removes_only_its_own(built: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    shutil.copytree(built / "tiny", out / "tiny")
    foreign = out / "mine" / "things" / "manifest.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text('{"name": "not kdgen"}')
    assert "would remove" in output(capsys, "clean", "--out", str(out), "--dry-run")
    assert (out / "tiny" / "host" / "manifest.json").exists()
    output(capsys, "clean", "--out", str(out))
    assert not (out / "tiny").exists()
    assert foreign.exists()
    assert "0 B in all" in output(capsys, "clean", "--out", str(tmp_path / "nowhere"))


def test_clean_of_a_cache_spares_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path))
    own, foreign = tmp_path / "objects" / "ab" / ("ab" * 32), tmp_path / "objects" / "photos" / "2026"
    for directory in (own, foreign):
        directory.mkdir(parents=True)
        (directory / "object.json").write_text("{}")
    assert "would remove 1 compiled objects" in output(capsys, "clean", "--out", str(tmp_path / "out"), "--cache", "--dry-run")
    assert own.exists()
    output(capsys, "clean", "--out", str(tmp_path / "out"), "--cache")
    assert not own.parent.exists()
    assert foreign.exists()


def test_schema(tmp_path: Path, capsys: Capture) -> None:
    assert document(capsys, "schema", "kernel")["$schema"].startswith("https://json-schema.org/")
    output(capsys, "schema", "--write", str(tmp_path))
    assert json.loads((tmp_path / "engine.json").read_text()) == document(capsys, "schema", "engine")


def test_doctor(capsys: Capture) -> None:
    report = document(capsys, "doctor", "--json")
    assert report["ok"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["nvrtc"]["status"] == "ok"
    assert checks["target sm_120"]["detail"] == "compiled as sm_120f"
    assert {checks[f"probe {name}"]["status"] for name in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "host")} == {"ok"}
    assert "gpu" in checks or "gpu 0" in checks


def test_doctor_fails_without_what_is_needed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("KDGEN_CXX", "no-such-compiler")
    report = document(capsys, "doctor", "--json", code=1)
    assert report["ok"] is False
    assert {check["name"]: check["status"] for check in report["checks"]}["probe host"] == "failed"


def test_verify_some_kernels(built: Path, capsys: Capture) -> None:
    lines = output(capsys, "verify", TINY, "--out", str(built), "--schedules", "1", "--only", "^tree_(build|accept)$").splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["pass", "tree_build"], ["pass", "tree_accept"]]
    assert lines[-1] == "2 of 2 passed on host, seed 0"
    for only, message in (("nothing", "no such kernel"), ("(", "no regular expression")):
        assert cli.run(["verify", TINY, "--out", str(built), "--only", only]) == 2
        assert message in capsys.readouterr().err
