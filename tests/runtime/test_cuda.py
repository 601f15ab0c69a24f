"""`CudaDevice`, on a GPU (marked `cuda`) and, for everything above the driver, on a fake one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdgen.contract import Argument
from kdgen.errors import ArtifactError, DeviceError, LaunchError
from kdgen.runtime.device import Device
from kdgen.runtime.kit import Kernel, Kit, load
from kdgen.runtime.manifest import TargetRecord
from kdgen.runtime.open import open_device
from tests.runtime.fake_cuda import World, installed
from tests.runtime.gpu_builds import CONTRACTS, SCALE, compile_cubin, install_kernels, write_gpu_build


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World()
    install_kernels(world)
    with installed(world, monkeypatch):
        yield world


@pytest.fixture(scope="session")
def cubin() -> bytes:
    device = open_device("cuda")
    return compile_cubin(device.target_names[0])


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.cuda)])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """OUT/SPEC with a build for the device at hand."""
    image = b"fake"
    if request.param == "fake":
        request.getfixturevalue("world")
    else:
        image = request.getfixturevalue("cubin")
    name = open_device("cuda").target_names[0]
    write_gpu_build(tmp_path / "small" / name, image, name)
    return tmp_path / "small"


@pytest.fixture
def kit(built: Path) -> Kit:
    return load(built, "cuda")


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def test_launches_with_and_without_a_stream(kit: Kit) -> None:
    device, scale = kit.device, kit["scale"]
    assert isinstance(device, Device)
    x = device.array(rows(5))
    for stream in (None, device.stream()):
        out = scale.allocate(T=5)["out"]
        scale(x, 2.0, out, stream=stream)
        np.testing.assert_array_equal(out.numpy(stream), rows(5) * 2)
        np.testing.assert_array_equal(out.numpy(), rows(5) * 2)


def test_streams_of_other_kinds(kit: Kit) -> None:
    stream = kit.device.stream()

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    class Old:
        cuda_stream = stream.handle

    x, out = kit.device.array(rows(1)), kit["scale"].allocate(T=1)["out"]
    for number, kind in enumerate((Protocol(), Old(), stream.handle)):
        kit["scale"](x, float(number), out, stream=kind)
        np.testing.assert_array_equal(out.numpy(kind), rows(1) * number)
    with pytest.raises(LaunchError, match="stream: got a str"):
        kit["scale"](x, 1.0, out, stream="fast")
    with pytest.raises(LaunchError, match="'order' is an option of the host device"):
        kit["scale"](x, 1.0, out, options={"order": "random"})


def test_copies_in_both_directions(kit: Kit) -> None:
    device = kit.device
    for values in (
        rows(3),
        np.array(7, np.int64),
        np.empty((0, 3), np.float32),
        rows(4).T,
        np.ones(3, ml_dtypes.bfloat16),
        np.arange(1 << 18),
    ):
        array = device.array(values)
        assert array.shape == values.shape
        assert array.pointer % 256 == 0
        np.testing.assert_array_equal(array.numpy(), values)
        array.copy_from(values * 2)
        np.testing.assert_array_equal(array.numpy(), values * 2)
    with pytest.raises(LaunchError, match="cannot copy f64"):
        device.array(rows(2)).copy_from(np.zeros((2, 4)))


def test_more_shared_memory_than_launches_get_by_default(kit: Kit) -> None:
    last = 200 * 1024 - 1
    out = kit.device.array(np.zeros(1, np.uint32))
    kit["big"](out, last)
    assert out.numpy()[0] == sum(i * 7 % 256 for i in range(last + 1))


def test_programmatic_and_cooperative_launches(kit: Kit) -> None:
    out = kit.device.array(np.zeros(1, np.int32))
    stream = kit.device.stream()
    kit["chained"](out, stream=stream)
    kit["together"](out, stream=stream)
    assert out.numpy()[0] == 4


def test_bf16(kit: Kit) -> None:
    values = np.arange(8).astype(ml_dtypes.bfloat16)
    out = kit.device.array(np.zeros(8, ml_dtypes.bfloat16))
    kit["copy"](kit.device.array(values), out)
    np.testing.assert_array_equal(out.numpy(), values)
    kit["copy"](kit.device.array(values.view(np.uint16)), out)


def test_events_measure_time(kit: Kit) -> None:
    stream = kit.device.stream()
    x, out = kit.device.array(rows(1000)), kit["scale"].allocate(T=1000)["out"]
    start = stream.record()
    for _ in range(10):
        kit["scale"](x, 1.0, out, stream=stream)
    end = stream.record(kit.device.event())
    other = kit.device.stream()
    other.wait(end)
    other.synchronize()
    assert 0 < end.elapsed_ms(start) < 1000
    with pytest.raises(DeviceError, match="have both been recorded"):
        end.elapsed_ms(kit.device.event())


@pytest.mark.parametrize("own_stream", [False, True])
def test_graphs_repeat_and_keep_what_they_use(kit: Kit, own_stream: bool) -> None:
    device, scale = kit.device, kit["scale"]
    x, out = device.array(rows(4)), device.array(np.zeros((4, 4), np.float32))
    stream = device.stream() if own_stream else None
    with device.capture(stream) as graph:
        between = device.empty((4, 4), "f32")
        scale(x, 2.0, between, stream=graph.stream)
        bound = scale.bind(between, 3.0, out, stream=graph.stream)
        bound.launch(graph.stream)
    assert len(graph) == 2
    assert out.numpy().max() == 0
    graph.launch()
    np.testing.assert_array_equal(out.numpy(), rows(4) * 6)
    x.copy_from(rows(4) + 1)
    kept = weakref.ref(between)
    del between, bound
    gc.collect()
    graph.launch(device.stream())
    np.testing.assert_array_equal(out.numpy(), (rows(4) + 1) * 6)
    assert kept() is not None


def test_captures_that_fail_leave_the_stream_usable(kit: Kit) -> None:
    device, stream = kit.device, kit.device.stream()
    x, out = device.array(rows(1)), kit["scale"].allocate(T=1)["out"]
    kept: list[Any] = []

    def half_done() -> None:
        with device.capture(stream) as graph:
            kept.append(graph)
            kit["scale"](x, 1.0, out, stream=stream)
            kit["scale"](x, "two", out, stream=stream)

    with pytest.raises(LaunchError, match="expected a number"):
        half_done()
    with pytest.raises(DeviceError, match="not complete"):
        kept[0].launch()
    with pytest.raises(DeviceError, match="reading arrays, is not possible while a graph is being captured"), device.capture(stream):
        out.numpy()
    with pytest.raises(DeviceError, match="a default stream cannot be captured"), device.capture(1):
        pass
    kit["scale"](x, 3.0, out, stream=stream)
    np.testing.assert_array_equal(out.numpy(), rows(1) * 3)


def test_arrays_in_the_wrong_place(kit: Kit) -> None:
    x, out = kit.device.array(rows(2)), kit["scale"].allocate(T=2)["out"]
    for value, message in (
        (rows(2), r"'x': a ndarray in the CPU's memory, the kernel runs on cuda:0; copy it with device\.array"),
        (open_device("host").array(rows(2)), "'x': the array lies on host, the kernel runs on cuda:0"),
        (None, "'x': got None, expected an array on cuda:0"),
        (kit.device.array(rows(2).astype(np.float64)), r"'x' is f64, expected f32 \[T, 4\]"),
        (kit.device.array(rows(3)), "T = 2 .* but T = 3 by 'x'"),
    ):
        with pytest.raises(LaunchError, match=message):
            kit["scale"](value, 1.0, out)
    kit["scale"](x, 1.0, out)


def test_empty_batches(kit: Kit) -> None:
    bound = kit["scale"].bind(kit.device.empty((0, 4), "f32"), 1.0, kit["scale"].allocate(T=0)["out"])
    assert len(bound) == 0
    bound.launch()


class CudaInterface:
    """An array of a library that knows only `__cuda_array_interface__`."""

    def __init__(self, array: Any, **changes: Any):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


class Dlpack:
    """An array of a library that knows only DLPack."""

    def __init__(self, array: Any):
        self.array, self.streams = array, list[Any]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream, max_version=max_version)


def test_arrays_of_other_libraries(kit: Kit) -> None:
    device = kit.device
    stream = device.stream()
    lent = Dlpack(device.array(rows(2)))
    for x in (lent, CudaInterface(device.array(rows(2))), CudaInterface(device.array(rows(2)), stream=stream.handle)):
        out = kit["scale"].allocate(T=2)["out"]
        kit["scale"](x, 2.0, Dlpack(out), stream=stream)
        np.testing.assert_array_equal(out.numpy(), rows(2) * 2)
    kit["scale"](lent, 2.0, out)
    assert lent.streams == [stream.handle, 1]
    with device.capture(stream):
        kit["scale"](lent, 2.0, out, stream=stream)
    assert lent.streams[-1] == -1
    with pytest.raises(LaunchError, match="no memory of a GPU"):
        kit["scale"](CudaInterface(device.array(rows(2)), data=(rows(2).ctypes.data, False)), 2.0, out)
    with pytest.raises(LaunchError, match="'out' is read-only"):
        kit["scale"](device.array(rows(2)), 2.0, CudaInterface(out, data=(out.pointer, True)))
    with pytest.raises(LaunchError, match="not C-contiguous"):
        kit["scale"](CudaInterface(device.array(rows(2)), strides=(4, 8)), 2.0, out)


def test_builds_are_chosen_by_capability(built: Path) -> None:
    own = next(built.iterdir())
    major, minor = int(own.name[3:-1]), int(own.name[-1])
    image = (own / "scale.cubin").read_bytes()
    write_gpu_build(built / "sm_70", image, "sm_70")
    write_gpu_build(built / "host", image, "sm_70")
    assert load(built, "cuda").manifest.target.name == own.name
    assert load(built).manifest.target.name == own.name
    assert load(own).device.name == "cuda:0"
    with pytest.raises(
        ArtifactError, match=rf"it was built for sm_70, and .* is sm_{major}{minor}; build for it with: kdgen build SPEC --arch {own.name}"
    ):
        load(built / "sm_70", "cuda")
    os.rename(own, built.parent / own.name)
    with pytest.raises(ArtifactError, match=f"holds builds for host, sm_70; cuda:0 .* needs another: kdgen build SPEC --arch {own.name}"):
        load(built, "cuda")


def test_which_code_runs_where(built: Path) -> None:
    device = open_device("cuda")
    major, minor = device.capability

    def refused(arch: str, capability: tuple[int, int]) -> bool:
        return bool(device.refuse(TargetRecord(arch, arch, capability, 0)))

    for suffix in ("", "a", "f"):
        assert not refused(f"sm_{major}{minor}{suffix}", (major, minor))
        assert refused(f"sm_{major}{minor}{suffix}", (major, minor + 1))
        assert refused(f"sm_{major}{minor}{suffix}", (major + 1, 0))
    assert device.target_names[0] == f"sm_{major}{minor}"


def test_kernels_that_need_too_much_shared_memory(built: Path) -> None:
    own = next(built.iterdir())
    contracts = {"big": CONTRACTS["big"]}
    launch = contracts["big"].launches[0]
    contracts["big"] = type(SCALE)(**{**vars(contracts["big"]), "launches": (type(launch)(**{**vars(launch), "shared_bytes": 300_000}),)})
    target = load(built, "cuda").manifest.target
    write_gpu_build(built / "bad", (own / "big.cubin").read_bytes(), target.name, contracts)
    with pytest.raises(ArtifactError, match=r"'big' needs 300,000 bytes of shared memory per block; cuda:0 \(sm_\d+\) has [\d,]+"):
        load(built / "bad", "cuda")


def test_a_cubin_that_does_not_fit_its_manifest(built: Path) -> None:
    own = next(built.iterdir())
    target = load(built, "cuda").manifest.target
    for number, (arguments, sizes) in enumerate(
        (
            ((*SCALE.arguments[:2], Argument("factor", "f64", (), "scalar"), SCALE.arguments[3]), "8, 4, 8, 8"),
            ((*SCALE.arguments, Argument("more", "f32", (), "scalar")), "8, 4, 4, 8, 4"),
        )
    ):
        wrong = type(SCALE)(**{**vars(SCALE), "arguments": arguments})
        write_gpu_build(built / f"bad{number}", (own / "scale.cubin").read_bytes(), target.name, {"scale": wrong})
        with pytest.raises(ArtifactError, match=rf"the cubin takes arguments of \[8, 4, 4, 8\] bytes, the manifest says \[{sizes}\]"):
            load(built / f"bad{number}", "cuda")


def test_an_image_that_the_driver_refuses(built: Path) -> None:
    target = load(built, "cuda").manifest.target
    write_gpu_build(built / "bad", b"refused", target.name)
    with pytest.raises(
        ArtifactError,
        match=r"the driver does not accept the cubin .* made by a compiler .*; the driver knows CUDA \d+\.\d+.* kdgen build SPEC",
    ):
        load(built / "bad", "cuda")


def test_no_memory_left(kit: Kit) -> None:
    with pytest.raises(DeviceError, match=r"allocating .* CUDA_ERROR_OUT_OF_MEMORY .*free arrays"):
        kit.device.empty((1 << 45,), "u8")


def test_no_such_gpu(built: Path) -> None:
    with pytest.raises(DeviceError, match="no GPU 99: there are"):
        open_device("cuda:99")


# ------------------------------------------------------------------------------------------------ what only a fake can show
@pytest.fixture
def fake(world: World, tmp_path: Path) -> Kit:
    write_gpu_build(tmp_path / "sm_90", b"fake", "sm_90")
    return load(tmp_path / "sm_90", "cuda")


@pytest.mark.parametrize("counts", [False, True])
def test_a_cubin_that_takes_more_than_its_manifest_says(fake: Kit, world: World, tmp_path: Path, counts: bool) -> None:
    world.counts_parameters = counts
    wrong = type(SCALE)(**{**vars(SCALE), "arguments": SCALE.arguments[:3]})
    write_gpu_build(tmp_path / "bad", b"fake", "sm_90", {"scale": wrong})
    if counts:
        with pytest.raises(ArtifactError, match=r"takes arguments of \[8, 4, 4, 8\] bytes, the manifest says \[8, 4, 4\]"):
            load(tmp_path / "bad", "cuda")
    else:  # such a driver cannot tell; the manifest's hash of the cubin is what protects there
        load(tmp_path / "bad", "cuda")


def test_memory_is_freed_with_the_last_reference(fake: Kit, world: World) -> None:
    before = len(world.memory)
    array = fake.device.empty((3,), "i32")
    bound = fake["wild"].bind(array, 0)
    assert len(world.memory) == before + 1
    del array
    gc.collect()
    assert len(world.memory) == before + 1
    del bound
    gc.collect()
    assert len(world.memory) == before


def test_attributes_are_passed_on(fake: Kit, world: World) -> None:
    out = fake.device.array(np.zeros(1, np.int32))
    for name, expected in (("chained", "PROGRAMMATIC_STREAM_SERIALIZATION"), ("together", "COOPERATIVE")):
        world.log.clear()
        fake[name](out)
        assert ("attributes", expected) in world.log


def test_other_streams_are_waited_for(fake: Kit, world: World) -> None:
    stream, out = fake.device.stream(), fake["scale"].allocate(T=2)["out"]
    for producer, waits in ((None, False), (1, True), (stream.handle, False), (0x999, True)):
        x = CudaInterface(fake.device.array(rows(2)), stream=producer)
        world.log.clear()
        fake["scale"](x, 1.0, out, stream=stream)
        expected = [("record", producer), ("wait", stream.handle)] if waits else []
        assert world.log == [*expected, ("launch", stream.handle)]


def test_other_contexts_come_back(fake: Kit, world: World) -> None:
    x, out = fake.device.array(rows(2)), fake["scale"].allocate(T=2)["out"]
    world.current = 0x5555
    fake["scale"](x, 2.0, out)
    np.testing.assert_array_equal(out.numpy(), rows(2) * 2)
    assert (world.current, world.stack) == (0x5555, [])
    open_device("cuda:1")
    assert world.current == 0x5555


def test_a_stream_of_another_gpu_is_refused(fake: Kit) -> None:
    stream = open_device("cuda:1").stream()
    with pytest.raises(LaunchError, match="stream: it belongs to cuda:1, the kernel runs on cuda:0"):
        fake["scale"](fake.device.array(rows(1)), 1.0, fake["scale"].allocate(T=1)["out"], stream=stream)


def test_driver_errors_in_plain_words(fake: Kit, world: World) -> None:
    x, out = fake.device.array(rows(1)), fake["scale"].allocate(T=1)["out"]
    world.fail["launch"] = world.driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(
        DeviceError,
        match=r"launching 'scale' of kernel 'scale' on cuda:0 \(grid \(1, 1, 1\), 32 threads, 0 bytes .*CUDA_ERROR_INVALID_VALUE",
    ):
        fake["scale"](x, 1.0, out)
    world.fail["synchronize"] = world.driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match=r"a kernel went outside its arrays.*compute-sanitizer"):
        fake.device.synchronize()


def test_own_arrays_are_lent_after_waiting(fake: Kit, world: World) -> None:
    array = fake.device.array(rows(1))
    for stream, waits in ((None, True), (1, True), (-1, False)):
        world.log.clear()
        array.__dlpack__(stream=stream)
        assert (("synchronize",) in world.log) == waits


# ------------------------------------------------------------------------------------------------ what only a GPU can show
@pytest.mark.cuda
def test_a_wild_write_is_reported_in_plain_words(tmp_path: Path, cubin: bytes) -> None:
    name = open_device("cuda").target_names[0]
    write_gpu_build(tmp_path / name, cubin, name)
    script = (
        "import sys, kdgen; kit = kdgen.load(sys.argv[1], device='cuda'); out = kit['wild'].allocate(N=4)['out']\n"
        "kit['wild'](out, 1 << 36)\n"
        "try: kit.device.synchronize()\n"
        "except kdgen.errors.DeviceError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / name)], capture_output=True, text=True, check=False)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in done.stdout, done.stderr
    assert "cannot use the GPU any more" in done.stdout


@pytest.mark.cuda
def test_a_bound_launch_costs_little(tmp_path: Path, cubin: bytes) -> None:
    import time

    name = open_device("cuda").target_names[0]
    kernel: Kernel = load(write_gpu_build(tmp_path / name, cubin, name), "cuda")["scale"]
    stream = kernel.device.stream()
    bound = kernel.bind(kernel.device.array(rows(1)), 1.0, kernel.allocate(T=1)["out"])
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            bound.launch(stream)
        best = min(best, (time.perf_counter() - start) / 200)
        stream.synchronize()
    assert best < 15e-6


@pytest.mark.cuda
def test_torch_tensors_on_the_gpu(tmp_path: Path, cubin: bytes) -> None:
    torch = pytest.importorskip("torch")
    name = open_device("cuda").target_names[0]
    kit = load(write_gpu_build(tmp_path / name, cubin, name), "cuda")
    x = torch.arange(8, dtype=torch.float32, device="cuda").reshape(2, 4)
    out = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kit["scale"](x, 2.0, out, stream=stream)
    stream.synchronize()
    assert torch.equal(out, x * 2)
    kit["scale"](x, 3.0, out)
    assert torch.equal(out, x * 3)
    a, b = torch.arange(8, device="cuda").to(torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    kit["copy"](a, b)
    assert torch.equal(a, b)
    assert torch.equal(torch.from_dlpack(kit.device.array(rows(2))).cpu(), torch.from_numpy(rows(2)))
    with pytest.raises(LaunchError, match="in the CPU's memory"):
        kit["scale"](x.cpu(), 1.0, out)
    with pytest.raises(LaunchError, match="DLPack"):
        kit["scale"](x.clone().requires_grad_(), 1.0, out)
