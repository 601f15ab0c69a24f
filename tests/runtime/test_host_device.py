from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdgen.dtypes import dtype_name, numpy_dtype
from kdgen.errors import DeviceError, KernelFault, LaunchError
from kdgen.runtime import dlpack
from kdgen.runtime.device import Device
from kdgen.runtime.host import HostDevice
from kdgen.runtime.host_memory import ZONE_BYTES
from kdgen.runtime.kit import Kit, load
from kdgen.runtime.views import view_cuda_interface, view_dlpack


def test_it_is_a_device() -> None:
    assert isinstance(HostDevice(), Device)


@pytest.mark.parametrize(
    ("offset", "place"), [(3, "past the end"), (66, "past the end"), (-1, "before the start"), (-64, "before the start")]
)
def test_writes_outside_an_array_are_found(kit: Kit, offset: int, place: str) -> None:
    out = kit["stray"].allocate(N=3)["out"]
    first = offset * 4 if offset > 0 else offset * 4 + 3
    with pytest.raises(
        KernelFault, match=rf"kernel 'stray': it wrote {place} of argument 'out': byte offset {first} of i32 \[3\], 12 bytes"
    ):
        kit["stray"](out, offset)
    kit["stray"](out, 1)  # the zones are whole again
    assert out.numpy().tolist() == [-1, 7, -1]


def test_zones_reach_as_far_as_they_say(kit: Kit) -> None:
    out = kit["stray"].allocate(N=3)["out"]
    with pytest.raises(KernelFault):
        kit["stray"](out, 2 + ZONE_BYTES // 4)


def test_faults_of_the_kernel_are_passed_on(kit: Kit) -> None:
    with pytest.raises(KernelFault, match=r"kernel 'stray': templates/stray\.cu\.j2:7: deadlock, by thread 3"):
        kit["stray"](kit["stray"].allocate(N=3)["out"], 1000)


def test_fresh_arrays_are_nan_and_aligned() -> None:
    for dtype in ("f32", "bf16", "f64", "i32"):
        array = HostDevice().empty((3, 5), dtype)
        values = array.numpy()
        assert array.pointer % 256 == 0
        assert array.pointer == values.__array_interface__["data"][0]
        assert (values == -1).all() if dtype == "i32" else np.isnan(values.astype(np.float64)).all()


def test_copies_check_shape_and_dtype() -> None:
    array = HostDevice().array(np.zeros((2, 3), np.float32))
    array.copy_from(np.arange(6, dtype=np.float32).reshape(3, 2).T)
    assert array.numpy().tolist() == [[0, 2, 4], [1, 3, 5]]
    for values in (np.zeros((3, 2), np.float32), np.zeros((2, 3))):
        with pytest.raises(LaunchError, match=r"into an array of f32 \[2, 3\]"):
            array.copy_from(values)


@pytest.mark.parametrize("options", [{"order": "sideways"}, {"copies": "never"}, {"threads": -1}])
def test_options_are_checked_when_the_device_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match="allowed"):
        HostDevice(**options)


def test_device_options_reach_the_kernel(built: Any) -> None:
    kernel = load(built, HostDevice(order="random", copies="latest", seed=9, threads=2))["probe"]
    out = kernel.allocate()["out"]
    kernel(out, dims={"S": 1})
    assert out.numpy().tolist()[4:] == [2, 2, 1, 9]
    kernel(out, dims={"S": 1}, options={"seed": 10})
    assert out.numpy().tolist()[4:] == [2, 2, 1, 10]


def test_streams_events_and_time(kit: Kit) -> None:
    stream = kit.device.stream()
    start = stream.record()
    kit["stray"](kit["stray"].allocate(N=3)["out"], 0, stream=stream)
    end = stream.record(kit.device.event())
    stream.wait(end)
    stream.synchronize()
    end.synchronize()
    kit.device.synchronize()
    assert end.elapsed_ms(start) > 0
    with pytest.raises(DeviceError, match="never recorded"):
        end.elapsed_ms(kit.device.event())


def test_graphs_replay_what_they_recorded(kit: Kit) -> None:
    kernel, device = kit["scale"], kit.device
    x, y, out = (device.array(np.ones((2, 4), np.float32)) for _ in range(3))
    out.copy_from(np.zeros((2, 4), np.float32))
    with device.capture() as graph:
        kernel(x, 2.0, y, stream=graph.stream)
        kernel(y, 3.0, out, stream=graph.stream, options={"order": "reverse"})
        kernel(x, 5.0, device.empty((2, 4), "f32"))  # on another stream: not recorded
    assert len(graph) == 2
    assert out.numpy()[0, 0] == 0
    graph.launch()
    assert out.numpy()[0, 0] == 6
    x.copy_from(np.full((2, 4), 10, np.float32))
    kept = weakref.ref(x)
    del x, y, kernel
    gc.collect()
    graph.launch(device.stream())
    assert out.numpy()[0, 0] == 60
    assert kept() is not None


def test_graphs_that_failed_cannot_be_launched(kit: Kit) -> None:
    device, stream = kit.device, kit.device.stream()
    with pytest.raises(ValueError, match="boom"), device.capture(stream) as graph:
        raise ValueError("boom")
    with pytest.raises(DeviceError, match="not complete"):
        graph.launch()
    with device.capture(stream) as again, pytest.raises(DeviceError, match="already being captured"), device.capture(stream):
        pass
    again.launch()


def test_numpy_sees_host_arrays() -> None:
    device = HostDevice()
    array = device.array(np.arange(6, dtype=np.int16).reshape(2, 3))
    lent = np.from_dlpack(array)
    assert np.shares_memory(lent, array.numpy())
    assert np.asarray(array).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.asarray(device.array(np.ones(2, ml_dtypes.bfloat16))).dtype == ml_dtypes.bfloat16
    assert np.array(array, copy=True).ctypes.data != array.pointer


def test_loans_end_with_their_borrower() -> None:
    before = len(dlpack._loans)
    array = HostDevice().array(np.arange(3))
    alive = weakref.ref(array)
    lent = np.from_dlpack(array)
    del array
    gc.collect()
    assert alive() is not None
    assert lent.tolist() == [0, 1, 2]
    del lent
    gc.collect()
    assert alive() is None
    for version in (None, (1, 0)):
        capsule = HostDevice().array(np.arange(3)).__dlpack__(max_version=version)
        assert len(dlpack._loans) == before + 1
        del capsule
        assert len(dlpack._loans) == before


@pytest.mark.parametrize("dtype", dlpack.DLPACK)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_dlpack_round_trip(dtype: str, version: Any) -> None:
    array = HostDevice().empty((2, 1, 3), dtype)
    found = dlpack.read_capsule(array.__dlpack__(max_version=version))
    assert found == dlpack.Borrowed(array.pointer, (2, 1, 3), dtype, (dlpack.CPU, 0), False, True)


def test_arrays_of_other_libraries_through_dlpack(kit: Kit) -> None:
    class Foreign:
        def __init__(self, values: np.ndarray[Any, Any], place: tuple[int, int] = (1, 0), old: bool = False):
            self.values, self.place, self.old = values, place, old

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.place

        def __dlpack__(self, **options: Any) -> Any:
            if self.old and "max_version" in options:
                raise TypeError("unexpected keyword argument 'max_version'")
            return self.values.__dlpack__(**options)

    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    for old in (False, True):
        out = kit["scale"].allocate(T=2)["out"]
        kit["scale"](Foreign(values, old=old), 2.0, out)
        np.testing.assert_array_equal(out.numpy(), values * 2)
    with pytest.raises(LaunchError, match="not C-contiguous"):
        kit["scale"](Foreign(np.zeros((4, 4), np.float32)[::2]), 1.0, out)
    with pytest.raises(LaunchError, match="'x': a Foreign on cuda:1, the kernel runs on host"):
        kit["scale"](Foreign(values, (2, 1)), 1.0, out)
    values.flags.writeable = False
    kit["scale"](Foreign(values), 1.0, out)
    with pytest.raises(LaunchError, match="'out' is read-only"):
        kit["scale"](np.array(values), 1.0, Foreign(values))


def test_objects_with_an_array_interface(kit: Kit) -> None:
    class Foreign:
        def __init__(self, values: np.ndarray[Any, Any]):
            self.values = values
            self.__array_interface__ = values.__array_interface__

    out = kit["scale"].allocate(T=1)["out"]
    kit["scale"](Foreign(np.ones((1, 4), np.float32)), 2.0, out)
    assert out.numpy().tolist() == [[2.0] * 4]


def test_dlpack_errors_are_launch_errors() -> None:
    class Refusing:
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it records gradients")

    with pytest.raises(LaunchError, match="a Refusing that cannot be lent through DLPack: it records gradients"):
        view_dlpack(Refusing(), None)


@pytest.mark.parametrize(
    ("interface", "dtype", "contiguous", "stream"),
    [
        ({"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 2}, "f32", True, None),
        ({"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": (12, 4), "version": 3, "stream": 7}, "f32", True, 7),
        ({"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "strides": (4, 8), "version": 3, "stream": 1}, "f32", False, 1),
        ({"shape": (2, 1), "typestr": "<V2", "data": (4096, True), "strides": (2, 99), "version": 3}, "bf16", True, None),
        ({"shape": (0,), "typestr": "|i1", "data": (None, False), "strides": (5,), "version": 3}, "i8", True, None),
    ],
)
def test_cuda_array_interface(interface: dict[str, Any], dtype: str, contiguous: bool, stream: int | None) -> None:
    class Foreign:
        __cuda_array_interface__ = interface

    view, producer = view_cuda_interface(Foreign())
    assert (view.shape, view.dtype, view.contiguous, producer) == (interface["shape"], dtype, contiguous, stream)
    assert (view.pointer, view.readonly) == (interface["data"][0] or 0, interface["data"][1])


def test_dtype_names_are_their_own_inverse() -> None:
    for name in dlpack.DLPACK:
        assert dtype_name(numpy_dtype(name)) == dtype_name(name) == name
    assert dtype_name(bool) == "u8"
    assert dtype_name("float32") == "f32"


def test_torch_tensors(kit: Kit) -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    out = torch.zeros(2, 4)
    kit["scale"](values, 2.0, out)
    assert out.tolist() == (values * 2).tolist()
    target = torch.zeros((2, 4), dtype=torch.bfloat16)
    kit["copy"](torch.ones((2, 4), dtype=torch.bfloat16), target)
    assert target.tolist() == [[1.0] * 4] * 2
    assert torch.from_dlpack(kit.device.array(np.ones(2, ml_dtypes.bfloat16))).dtype == torch.bfloat16


def test_parts_share_memory_with_the_whole() -> None:
    device = HostDevice()
    whole = device.array(np.arange(24, dtype=np.float32).reshape(4, 6))
    assert whole[1].numpy().tolist() == [6, 7, 8, 9, 10, 11]
    assert whole[1].pointer == whole.pointer + 24
    assert whole.reshape(2, 12)[1].numpy()[0] == 12
    part = whole.part(4, (2, 3))
    part.copy_from(np.zeros((2, 3), np.float32))
    assert whole.numpy().reshape(-1)[3:11].tolist() == [3, 0, 0, 0, 0, 0, 0, 10]
    part.copy_from(whole.part(12, (2, 3)))
    assert part.numpy().tolist() == [[12, 13, 14], [15, 16, 17]]
    alive = weakref.ref(whole._memory)
    del whole
    gc.collect()
    assert alive() is not None
    assert part.numpy()[1, 2] == 17


@pytest.mark.parametrize(("first", "shape"), [(-1, (2,)), (23, (2,)), (0, (5, 6))])
def test_parts_stay_within_the_whole(first: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(LaunchError, match="which has 24"):
        HostDevice().empty((4, 6), "f32").part(first, shape)


def test_a_part_past_the_first_axis() -> None:
    whole = HostDevice().empty((4, 6), "f32")
    with pytest.raises(IndexError, match="index 4 of an array with 4 entries"):
        whole[4]
    with pytest.raises(LaunchError, match=r"cannot be given the shape \[5, 5\]"):
        whole.reshape(5, 5)


def test_a_kernel_takes_a_part(kit: Kit) -> None:
    out = HostDevice().empty((2, 3), "i32")
    mine = kit["stray"].device.empty((2, 3), "i32")
    kit["stray"](mine[1], 1)
    assert mine.numpy().tolist() == [[-1, -1, -1], [-1, 7, -1]]
    assert out.shape == (2, 3)


def test_outputs_are_made_for_the_arguments_that_are_given(kit: Kit) -> None:
    arrays = kit["stray"].complete({"N": 3}, at=1)
    assert set(arrays) == {"out", "at"}
    kit["stray"](**arrays)
    assert arrays["out"].numpy().tolist() == [-1, 7, -1]
