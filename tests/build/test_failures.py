"""Builds that fail: every fault reported, nothing published."""

from pathlib import Path

import pytest

from kdgen.build import build_spec
from kdgen.errors import CompileError, KdgenError, ResourceError, ToolchainError
from kdgen.targets import get_target
from tests.build.fakes import SPILL, demo_spec, fake_kernel, fake_spec, tree

SM_120, HOST = get_target("sm_120"), get_target("host")

pytestmark = pytest.mark.usefixtures("inline")


def test_all_compile_errors_are_reported_and_nothing_is_published(tmp_path: Path, cache: Path) -> None:
    build_spec(demo_spec(), [SM_120, HOST], tmp_path / "out")
    before = tree(tmp_path / "out")
    spec = fake_spec(
        fake_kernel("first", body="oops"), fake_kernel("good", value=77), fake_kernel("third", body='asm volatile("no.such;");')
    )
    with pytest.raises(CompileError) as caught:
        build_spec(spec, [SM_120, HOST], tmp_path / "out", jobs=2)
    message = str(caught.value)
    assert 'templates/first.cu.j2:41: error: identifier "oops" is undefined' in message
    assert "templates/third.cu.j2:41: error: Not a name of any known instruction: 'no'" in message
    assert "first.cpp, target host" in message
    assert "Traceback" not in message
    assert tree(tmp_path / "out") == before
    assert not list((cache / "tmp").iterdir())
    # What did compile is in the cache: the repaired spec needs only the others.
    repaired = fake_spec(fake_kernel("first"), fake_kernel("good", value=77))
    statuses = [kernel.status for kernel in build_spec(repaired, [SM_120], tmp_path / "out").targets[0].kernels]
    assert statuses == ["reused", "reused"]


def test_broken_host_runtime_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.build import fakes

    broken = {**fakes.HEADERS[True], "device/host_runtime.cpp": "oops;\n"}
    monkeypatch.setattr(fakes, "HEADERS", {**fakes.HEADERS, True: broken})
    with pytest.raises(CompileError) as caught:
        build_spec(demo_spec(), [HOST], tmp_path)
    assert str(caught.value).count("templates/device/host_runtime.cpp:1") == 1
    assert "without a result" not in str(caught.value), "kernels that waited for it did not fail themselves"


def test_spills_are_refused_with_figures_unless_allowed(tmp_path: Path) -> None:
    build_spec(demo_spec(), [SM_120], tmp_path)
    before = tree(tmp_path / "fake")
    with pytest.raises(ResourceError) as caught:
        build_spec(fake_spec(fake_kernel("first", body=SPILL)), [SM_120, HOST], tmp_path)
    message = str(caught.value)
    assert message.startswith("kernel 'first' for sm_120, entry first: spills registers: ")
    assert "bytes of stores and" in message
    assert "64 registers of at most 255" in message
    assert "allow_spill: true" in message
    assert "published: host" in message, "the target without the fault is published"
    assert {name: content for name, content in tree(tmp_path / "fake").items() if name.startswith("sm_120/")} == before

    report = build_spec(fake_spec(fake_kernel("first", body=SPILL, allow_spill=True)), [SM_120], tmp_path)
    assert report.targets[0].kernels[0].resources["first"]["spill_bytes"] > 0


def test_stack_without_spills_is_no_fault(tmp_path: Path) -> None:
    body = "float v[256]; for (int i = 0; i < 256; i++) v[i] = out[i]; out[3] = v[int(out[2]) & 255];"
    report = build_spec(fake_spec(fake_kernel("first", body=body)), [SM_120], tmp_path)
    figures = report.targets[0].kernels[0].resources["first"]
    assert figures["stack_bytes"] >= 1024
    assert figures["spill_bytes"] == 0


@pytest.mark.parametrize(("dynamic", "fits"), [(101_376, True), (101_377, False)])
def test_shared_memory_at_the_limit(tmp_path: Path, dynamic: int, fits: bool) -> None:
    spec = fake_spec(fake_kernel("first", shared=dynamic))
    if fits:
        assert build_spec(spec, [SM_120], tmp_path).targets[0].kernels[0].resources["first"]["shared_bytes"] == dynamic
        return
    with pytest.raises(ResourceError, match=r"needs 101,377 bytes of shared memory \(101,377 dynamic, 0 static\), the limit is 101,376"):
        build_spec(spec, [SM_120], tmp_path)
    assert not (tmp_path / "fake").exists()


def test_static_and_dynamic_shared_memory_count_together(tmp_path: Path) -> None:
    body = "__shared__ float all[1024]; all[threadIdx.x] = out[0]; __syncthreads(); out[1] = all[threadIdx.x ^ 1];"
    with pytest.raises(ResourceError, match=r"needs 104,096 bytes of shared memory \(100,000 dynamic, 4,096 static\)"):
        build_spec(fake_spec(fake_kernel("first", body=body, shared=100_000)), [SM_120], tmp_path)


def test_killed_compiler_names_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker that dies without a word, as from the out-of-memory killer.
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif 'unit0.json' in ' '.join(sys.orig_argv): os.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(KdgenError, match=r"sm_120 first: the compiler process ended without a result"):
        build_spec(demo_spec(), [SM_120], tmp_path / "out")


def test_missing_host_compiler_stops_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("KDGEN_CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="KDGEN_CXX"):
        build_spec(demo_spec(), [SM_120, HOST], tmp_path)
    assert not cache.exists()


def test_missing_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(ToolchainError, match=r"ninja.*is not installed: pip install 'kdgen\[compiler\]'"):
        build_spec(demo_spec(), [SM_120], tmp_path)
