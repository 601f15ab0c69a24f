"""Building specs: what is compiled, what is reused, what is published."""

import json
from pathlib import Path

import pytest

from kdgen.build import BuildReport, build_spec
from kdgen.errors import KdgenError, UsageError
from kdgen.runtime.manifest import parse_manifest, read_manifest
from kdgen.spec import Spec
from kdgen.targets import get_target
from tests.build.fakes import demo_spec, fake_kernel, fake_spec, tree

SM_120, HOST = get_target("sm_120"), get_target("host")

pytestmark = pytest.mark.usefixtures("inline")


def statuses(report: BuildReport) -> dict[str, list[str]]:
    return {target.target: [kernel.status for kernel in target.kernels] for target in report.targets}


class Recorder:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def start(self, total: int) -> None:
        self.calls.append(total)

    def advance(self, label: str) -> None:
        self.calls.append(label)

    def finish(self) -> None:
        self.calls.append("finish")


def test_first_second_and_changed_build(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "out"
    progress = Recorder()
    first = build_spec(demo_spec(), [SM_120, HOST], out, jobs=2, progress=progress)
    assert statuses(first) == {"sm_120": ["built", "built"], "host": ["built", "built"]}
    assert first.built == 4
    assert progress.calls[0] == 5, "four kernels and the host runtime"
    assert progress.calls[-1] == "finish"
    assert sorted(map(str, progress.calls[1:-1])) == ["host first", "host runtime", "host second", "sm_120 first", "sm_120 second"]
    assert all(target.changed for target in first.targets)
    assert sorted(tree(out / "fake" / "sm_120")) == [
        "device/cuda.cuh",
        "first.cu",
        "first.cubin",
        "manifest.json",
        "second.cu",
        "second.cubin",
    ]
    assert sorted(tree(out / "fake" / "host")) == [
        "device/host.hpp", "device/host_runtime.cpp", "first.cpp", "first.so", "manifest.json", "second.cpp", "second.so",
    ]  # fmt: skip
    assert not list((cache / "tmp").iterdir())
    assert not list(out.glob(".staging-*"))

    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    quiet = Recorder()
    second = build_spec(demo_spec(), [SM_120, HOST], out, progress=quiet)
    assert statuses(second) == {"sm_120": ["reused", "reused"], "host": ["reused", "reused"]}
    assert not any(target.changed for target in second.targets)
    assert quiet.calls == []
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*")}, "a build without changes touches nothing"

    third = build_spec(demo_spec(value=5), [SM_120, HOST], out)
    assert statuses(third) == {"sm_120": ["built", "reused"], "host": ["built", "reused"]}
    assert b"= 5;" in (out / "fake" / "sm_120" / "first.cu").read_bytes()


def test_manifest_is_what_the_runtime_reads(tmp_path: Path) -> None:
    spec = fake_spec(fake_kernel("first", value=3, shared=2048))
    build_spec(spec, [SM_120, HOST], tmp_path, keep=["ptx", "sass"])
    manifest = read_manifest(tmp_path / "fake" / "sm_120")
    assert manifest.spec == {"name": "fake", "kind": "engine", "digest": spec.digest}
    assert (manifest.target.name, manifest.target.nvrtc_arch, manifest.target.capability) == ("sm_120", "sm_120f", (12, 0))
    kernel = manifest.kernels["first"]
    assert kernel.params == {"value": 3, "body": "", "shared": 2048}
    assert kernel.contract.entries == ("first",)
    assert set(kernel.files) == {"source", "binary", "ptx", "sass"}
    figures = kernel.resources["first"]
    assert figures["registers"] > 0
    assert (figures["shared_bytes"], figures["spill_bytes"], figures["stack_bytes"]) == (2048, 0, 0)
    assert figures["occupancy"] == round(32 / 48, 4)
    assert b"STG" in kernel.files["sass"].path.read_bytes()
    assert b".visible .entry first" in kernel.files["ptx"].path.read_bytes()
    text = (tmp_path / "fake" / "sm_120" / "manifest.json").read_text()
    assert text == json.dumps(manifest.data, sort_keys=True, indent=1) + "\n"
    assert str(tmp_path) not in text

    host = read_manifest(tmp_path / "fake" / "host")
    assert host.target.isa
    assert set(host.kernels["first"].files) == {"source", "binary"}
    assert host.kernels["first"].resources["first"]["registers"] is None


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b/deeper"):
        build_spec(demo_spec(), [SM_120, HOST], tmp_path / name, force=True, keep=["ptx", "sass"])
    assert tree(tmp_path / "a" / "fake") == tree(tmp_path / "b" / "deeper" / "fake")


def test_published_source_has_no_line_marks(tmp_path: Path) -> None:
    build_spec(demo_spec(), [SM_120], tmp_path)
    assert b"#line" not in (tmp_path / "fake" / "sm_120" / "first.cu").read_bytes()
    assert b"first.cu.j2" in (tmp_path / "fake" / "sm_120" / "first.cubin").read_bytes(), "the binary is of the marked text"


def test_force_compiles_again(tmp_path: Path) -> None:
    build_spec(demo_spec(), [SM_120], tmp_path)
    report = build_spec(demo_spec(), [SM_120], tmp_path, force=True)
    assert statuses(report) == {"sm_120": ["built", "built"]}
    assert not report.targets[0].changed, "the bytes are the same"


def test_dry_run_writes_nothing(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "out"
    report = build_spec(demo_spec(), [SM_120], out, dry_run=True)
    assert report.dry_run
    assert statuses(report) == {"sm_120": ["to build", "to build"]}
    assert not out.exists()
    assert not cache.exists()
    build_spec(demo_spec(), [SM_120], out)
    before = tree(tmp_path)
    report = build_spec(demo_spec(value=9), [SM_120], out, dry_run=True)
    assert statuses(report) == {"sm_120": ["to build", "reused"]}
    assert tree(tmp_path) == before
    assert json.dumps(report.to_json())


def test_dropped_kernels_and_kept_files_leave_the_directory(tmp_path: Path) -> None:
    build_spec(demo_spec(), [SM_120], tmp_path, keep=["ptx"])
    build_spec(fake_spec(fake_kernel("second", value=2)), [SM_120], tmp_path)
    assert sorted(tree(tmp_path / "fake" / "sm_120")) == ["device/cuda.cuh", "manifest.json", "second.cu", "second.cubin"]


@pytest.mark.parametrize(
    ("name", "damage"),
    [("kernel.cubin", "flip"), ("kernel.cubin", "truncate"), ("kernel.ptx", "remove"), ("object.json", "flip"), ("object.json", "remove")],
)
def test_damaged_objects_are_compiled_again(tmp_path: Path, cache: Path, name: str, damage: str) -> None:
    spec = fake_spec(fake_kernel("first"))
    build_spec(spec, [SM_120], tmp_path / "a")
    (path,) = cache.glob(f"objects/*/*/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    report = build_spec(spec, [SM_120], tmp_path / "b")
    (kernel,) = report.targets[0].kernels
    assert kernel.status == "built"
    assert "damaged" in kernel.note
    assert tree(tmp_path / "a" / "fake") == tree(tmp_path / "b" / "fake")
    assert statuses(build_spec(spec, [SM_120], tmp_path / "b")) == {"sm_120": ["reused"]}


def test_damaged_output_is_published_again(tmp_path: Path) -> None:
    build_spec(demo_spec(), [SM_120], tmp_path)
    path = tmp_path / "fake" / "sm_120" / "first.cubin"
    good = path.read_bytes()
    path.write_bytes(good[:100])
    report = build_spec(demo_spec(), [SM_120], tmp_path)
    assert statuses(report) == {"sm_120": ["reused", "reused"]}
    assert report.targets[0].changed
    assert path.read_bytes() == good


def test_headers_and_contract_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.build import fakes

    def keys() -> set[str]:
        report = build_spec(demo_spec(), [SM_120, HOST], tmp_path, dry_run=True)
        return {kernel.key for target in report.targets for kernel in target.kernels}

    before = keys()
    assert len(before) == 4
    assert keys() == before
    changed = {kind: {name: text + "\n" for name, text in files.items()} for kind, files in fakes.HEADERS.items()}
    monkeypatch.setattr(fakes, "HEADERS", changed)
    with_headers = keys()
    assert not with_headers & before
    real = fakes.contract_of
    monkeypatch.setattr(fakes, "contract_of", lambda name, params: real(name, params.model_copy(update={"shared": 64})))
    assert not keys() & with_headers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": ["cubin"]}, "'cubin' cannot be kept; allowed: ptx, sass"),
        ({"jobs": 0}, "0 jobs"),
        ({"targets": []}, "no target"),
        ({"spec": fake_spec()}, "spec 'fake' has no kernels"),
    ],
)
def test_wrong_questions(tmp_path: Path, change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"spec": demo_spec(), "targets": [SM_120], "out": tmp_path / "out", **change}
    with pytest.raises(UsageError, match=message):
        build_spec(**arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(KdgenError, match="set KDGEN_CACHE_DIR"):
        build_spec(demo_spec(), [SM_120], tmp_path / "out")


def test_spec_of_a_manifest(tmp_path: Path) -> None:
    spec: Spec = demo_spec()
    build_spec(spec, [SM_120], tmp_path)
    path = tmp_path / "fake" / "sm_120" / "manifest.json"
    again = parse_manifest(path, path.read_bytes())
    assert list(again.kernels) == ["first", "second"]
