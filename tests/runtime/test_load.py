from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kdgen
from kdgen.errors import ArtifactError, DeviceError
from kdgen.runtime import host_library, open_device
from kdgen.runtime.host import HostDevice, sanitizer_environment
from kdgen.runtime.kit import Kit, load
from kdgen.runtime.open import gpu_count
from tests.runtime.builds import CONTRACTS, compile_library, edit_manifest, write_build


@pytest.mark.parametrize("place", [".", "host", "host/manifest.json"])
@pytest.mark.parametrize("device", ["host", "auto"])
def test_every_way_to_say_what_to_load(built: Path, place: str, device: str) -> None:
    kit = kdgen.load(built / place, device=device)
    assert isinstance(kit, Kit)
    assert sorted(kit) == sorted(CONTRACTS)
    assert (kit.device.name, kit.manifest.target.name) == ("host", "host")
    assert "scale" in repr(kit)


def test_unknown_kernels(kit: Kit) -> None:
    with pytest.raises(KeyError) as error:
        kit["tree"]
    assert str(error.value).endswith("it has batch, copy, probe, scale, stray, types")
    assert kit.get("tree") is None


def test_the_asked_for_host_build_is_taken(built: Path, library: bytes) -> None:
    write_build(built / "host_asan", dict.fromkeys(CONTRACTS, library), name="host_asan")
    assert load(built, "host").manifest.target.name == "host"
    with pytest.raises(ArtifactError, match="AddressSanitizer is not in this process; start Python with LD_PRELOAD="):
        load(built, "host_asan")
    with pytest.raises(ArtifactError, match="sanitizer build"):
        load(built / "host_asan", HostDevice())


def test_builds_for_other_devices_are_refused(built: Path, library: bytes) -> None:
    gpu = {"name": "sm_120", "nvrtc_arch": "sm_120f", "capability": [12, 0]}
    write_build(built / "sm_120", dict.fromkeys(CONTRACTS, library), **gpu)
    with pytest.raises(
        ArtifactError, match="cannot run on host: it was built for sm_120, a GPU; build for it with: kdgen build SPEC --arch host"
    ):
        load(built / "sm_120", "host")
    os.rename(built / "host", built.parent / "elsewhere")
    with pytest.raises(ArtifactError, match="holds builds for sm_120; host needs another: kdgen build SPEC --arch host"):
        load(built, "host")


def test_damaged_builds_of_other_targets_do_not_matter(built: Path) -> None:
    (built / "sm_120").mkdir()
    (built / "sm_120" / "manifest.json").write_text("{")
    assert load(built, "host").manifest.target.name == "host"


@pytest.mark.parametrize("place", ["absent", "."])
def test_nothing_to_load(tmp_path: Path, place: str) -> None:
    with pytest.raises(ArtifactError, match="kdgen build SPEC"):
        load(tmp_path / place)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tpu", {}, "unknown device 'tpu'; allowed: auto, host"),
        ("cuda:x", {}, "unknown device"),
        ("cuda", {"order": "random"}, "takes no options"),
        ("host", {"speed": 3}, "has no such option"),
    ],
)
def test_devices_that_are_none(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        open_device(name, **options)


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_no_gpu(built: Path) -> None:
    with pytest.raises(DeviceError, match="no GPU 0: none found"):
        load(built, "cuda")
    assert open_device("auto").name == "host"


def test_a_cpu_that_lacks_instructions_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host_library, "_cpu_flags", lambda: frozenset(host_library._LEVELS["x86-64-v2"]) | {"avx", "fma"})
    assert host_library.refuse_isa("x86-64-v2") == host_library.refuse_isa("x86-64") == host_library.refuse_isa("") == ""
    assert host_library.refuse_isa("x86-64-v3") == "it was built for x86-64-v3, and this CPU lacks avx2, bmi1, bmi2, f16c, abm, movbe"
    edit_manifest(built / "host", lambda data: data["target"].update(isa="x86-64-v3"))
    with pytest.raises(ArtifactError, match="this CPU lacks avx2"):
        load(built, "host")
    assert "this machine is x86_64" in host_library.refuse_isa("aarch64")


def test_libraries_of_other_machines_and_no_libraries_are_refused(built: Path, library: bytes) -> None:
    other = bytearray(library)
    other[18:20] = (183 if platform.machine() != "aarch64" else 62).to_bytes(2, "little")
    for image, message in ((bytes(other), "was built for (aarch64|x86_64), this machine is"), (b"MZ" + library[2:], "no shared library")):
        write_build(built / "host", dict.fromkeys(CONTRACTS, image))
        with pytest.raises(ArtifactError, match=message):
            load(built, "host")


def test_a_library_without_its_entry_is_refused(built: Path, tmp_path: Path) -> None:
    source = 'extern "C" void kdgen_release() {} extern "C" void kdgen_poison(void*, unsigned long, int) {}'
    image = compile_library(tmp_path / "empty.so", source=source)
    write_build(built / "host", dict.fromkeys(CONTRACTS, image))
    with pytest.raises(ArtifactError, match="no entry 'probe'; rebuild"):
        load(built, "host")


def test_loaded_code_survives_a_rebuild(built: Path, library: bytes) -> None:
    kernel = load(built, "host")["scale"]
    # Writing over a mapped file would crash the process.
    (built / "host" / "scale.so").write_bytes(b"\0" * len(library))
    out = kernel.allocate(T=1)["out"]
    kernel(np.ones((1, 4), np.float32), 3.0, out)
    assert out.numpy().tolist() == [[3.0] * 4]


def test_loading_imports_no_compiler(built: Path) -> None:
    script = (
        "import sys, kdgen; kit = kdgen.load(sys.argv[1], device='host')\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('jinja2', 'pydantic', 'yaml', 'typer', 'rich', 'cuda')"
        " or m.startswith(('kdgen.kernels', 'kdgen.compile', 'kdgen.build', 'kdgen.spec', 'kdgen.render'))]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script, built], check=True)


def test_importing_kdgen_imports_nothing_heavy() -> None:
    script = (
        "import sys, kdgen, kdgen.runtime, kdgen.kdtr, kdgen.runtime.manifest; assert 'numpy' not in sys.modules and 'json' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_sanitizer_finds_what_red_zones_cannot(tmp_path: Path) -> None:
    image = compile_library(tmp_path / "asan.so", "-fsanitize=address", "-DPOISON")
    write_build(tmp_path / "small" / "host_asan", dict.fromkeys(CONTRACTS, image), name="host_asan")
    script = (
        "import sys, kdgen; kernel = kdgen.load(sys.argv[1], device='host_asan')['stray']\n"
        "out = kernel.allocate(N=3)['out']; kernel(out, int(sys.argv[2])); print(out.numpy()[2], flush=True)"
    )
    environment = {**os.environ, **sanitizer_environment()}

    def run(offset: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, str(tmp_path / "small"), str(offset)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    good, bad = run(2), run(3)
    assert (good.returncode, good.stdout) == (0, "7\n"), good.stderr
    assert bad.returncode != 0
    assert "AddressSanitizer: use-after-poison" in bad.stderr


def test_a_process_may_load_hundreds_of_kernels(tmp_path: Path) -> None:
    """A search over parameters does. Static thread-local storage, of which there is little, would end it after some two hundred."""
    from kdgen.build import build_spec
    from kdgen.kernels import get_family
    from kdgen.spec import KernelSpec, Spec
    from kdgen.targets import get_target

    family = get_family("ceiling_read")
    build_spec(Spec.of("many", KernelSpec("read", family, family.params())), [get_target("host")], tmp_path)
    image = (tmp_path / "many" / "host" / "read.so").read_bytes()
    kept = [host_library.map_library(image + number.to_bytes(2, "little"), "read") for number in range(600)]
    assert len({id(library) for library in kept}) == 600


def test_what_a_kernel_keeps_between_launches_goes_with_it(tmp_path: Path) -> None:
    """Stacks with guard pages are two mappings each, and a process may have 65,530."""
    import gc

    from kdgen.build import build_spec
    from kdgen.kernels import get_family
    from kdgen.spec import KernelSpec, Spec
    from kdgen.targets import get_target

    family = get_family("ceiling_read")
    build_spec(Spec.of("big", KernelSpec("read", family, family.params())), [get_target("host")], tmp_path)

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    before = mappings()
    kernel = load(tmp_path / "big" / "host", "host")["read"]
    kernel(data=kernel.device.array(np.zeros((64, 4), np.uint32)), **kernel.allocate(G=1), dims={"G": 1})
    assert mappings() > before + 512  # a block of 512 threads
    del kernel
    gc.collect()
    assert mappings() < before + 64
