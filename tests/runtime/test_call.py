from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.errors import ArtifactError, LaunchError
from kdgen.runtime.call import float_bits
from kdgen.runtime.geometry import Geometries
from kdgen.runtime.host import HostDevice
from kdgen.runtime.kit import Kernel, Kit


@pytest.fixture
def scale(kit: Kit) -> Kernel:
    return kit["scale"]


def rows(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count * 4, dtype=np.float32).reshape(count, 4)


def test_arguments_by_position_and_by_name(scale: Kernel) -> None:
    for call in (
        lambda out: scale(rows(2), 2, out),
        lambda out: scale(rows(2), factor=np.float32(2), out=out),
        lambda out: scale(out=out, x=rows(2), factor=np.array(2.0)),
    ):
        out = scale.allocate(T=2)
        call(out["out"])
        np.testing.assert_array_equal(out["out"].numpy(), rows(2) * 2)


def test_conditions_choose_launches(scale: Kernel) -> None:
    for count, added in ((4, 0), (5, 1), (8, 1)):
        bound = scale.bind(rows(count), 1.0, **scale.allocate(T=count))
        assert len(bound) == 1 + added
        out = scale.allocate(T=count)["out"]
        scale(rows(count), 1.0, out)
        np.testing.assert_array_equal(out.numpy(), rows(count) + added)


def test_grids_come_from_dimensions(kit: Kit) -> None:
    out = kit["probe"].allocate()["out"]
    kit["probe"](out, dims={"S": 5}, options={"order": "reverse", "copies": "random", "seed": (1 << 64) - 1, "threads": 3})
    assert out.numpy().tolist() == [5, 3, 3, 0, 3, 1, 2, (1 << 64) - 1]


def test_an_empty_batch_launches_nothing(scale: Kernel) -> None:
    out = scale.allocate(T=0)["out"]
    assert out.shape == (0, 4)
    bound = scale.bind(np.empty((0, 4), np.float32), 1.0, out)
    assert len(bound) == 0
    bound.launch()


def test_an_empty_batch_of_a_kernel_with_blocks_left_is_refused(kit: Kit) -> None:
    with pytest.raises(LaunchError, match="S = 0, batch was built for 1…4"):
        kit["batch"](np.empty(0, np.int32))


def test_scalars_arrive_bit_for_bit(kit: Kit) -> None:
    out = kit["types"].allocate()["out"]
    kit["types"](out, -1.5, -3, math.pi, (1 << 64) - 1)
    assert out.numpy().tolist() == [0xBFC0, (1 << 64) - 3, struct.unpack("<Q", struct.pack("<d", math.pi))[0], (1 << 64) - 1]


@given(st.floats(width=32))
def test_bf16_scalars_round_like_ml_dtypes(value: float) -> None:
    want = int(np.float32(value).astype(ml_dtypes.bfloat16).view(np.uint16))
    if math.isnan(value):
        assert float_bits(value, "bf16") & 0x7FFF > 0x7F80
    else:
        assert float_bits(value, "bf16") == want


def unaligned(count: int) -> np.ndarray[Any, Any]:
    memory = np.zeros(count * 16 + 32, np.uint8)
    start = -memory.__array_interface__["data"][0] % 16 + 4
    return memory[start : start + count * 16].view(np.float32).reshape(count, 4)


def readonly(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


FAULTS: dict[str, tuple[Callable[[Kernel], object], str]] = {
    "missing output": (lambda k: k(rows(2), 1.0), r"missing 'out' \(out\); outputs and workspaces are made by kernel\.allocate\(T=…\)"),
    "missing input": (lambda k: k(factor=1.0, out=rows(2)), r"missing 'x' \(in\)$"),
    "too many": (lambda k: k(rows(2), 1.0, rows(2), 3), "got 4 positional arguments; it takes 3: x, factor, out"),
    "twice": (lambda k: k(rows(2), 1.0, rows(2), x=rows(2)), "'x' is given twice"),
    "unknown name": (lambda k: k(rows(2), 1.0, y=rows(2)), "no argument 'y'; it takes x, factor, out"),
    "dimension argument": (lambda k: k(rows(2), 1.0, rows(2), rows=2), "no argument 'rows'"),
    "None": (lambda k: k(None, 1.0, rows(2)), "'x': got None, expected an array"),
    "list": (lambda k: k([[1.0] * 4], 1.0, rows(2)), r"'x': got a list.*device\.array"),
    "text": (lambda k: k("x", 1.0, rows(2)), "'x': got a str, expected"),
    "dtype": (lambda k: k(rows(2).astype(np.float64), 1.0, rows(2)), r"'x' is f64, expected f32 \[T, 4\]"),
    "no dtype": (lambda k: k(rows(2).astype(np.complex64), 1.0, rows(2)), "'x': arrays of complex64 cannot be given"),
    "byte order": (lambda k: k(rows(2).astype(">f4"), 1.0, rows(2)), "'x': arrays of >f4 cannot be given"),
    "rank": (lambda k: k(rows(2).reshape(-1), 1.0, rows(2)), r"'x' has the shape \[8\], expected 2 dimensions: \[T, 4\]"),
    "fixed extent": (lambda k: k(np.zeros((2, 5), np.float32), 1.0, rows(2)), r"'x' has the shape \[2, 5\], expected \[2, 4\] \(T = 2\)"),
    "two values": (lambda k: k(rows(2), 1.0, rows(3)), r"'out' \[3, 4\]: T = 3 \(axis 0\), but T = 2 by 'x' \[2, 4\]"),
    "dims against": (lambda k: k(rows(2), 1.0, rows(2), dims={"T": 3}), r"'x' \[2, 4\]: T = 2 \(axis 0\), but T = 3 by dims=\{'T': 3\}"),
    "unknown dims": (lambda k: k(rows(2), 1.0, rows(2), dims={"Q": 3}), "no dimension 'Q'; it has T"),
    "fractional dims": (lambda k: k(rows(2), 1.0, rows(2), dims={"T": 2.0}), "T = 2.0; a dimension is an integer"),
    "beyond capacity": (lambda k: k(rows(9), 1.0, rows(9)), "T = 9, scale was built for 1…8"),
    "strided": (lambda k: k(rows(4)[::2], 1.0, rows(2)), r"'x' \(f32 \[2, 4\]\) is not C-contiguous; pass a contiguous copy"),
    "column-major": (lambda k: k(np.asfortranarray(rows(2)), 1.0, rows(2)), "not C-contiguous"),
    "unaligned": (lambda k: k(unaligned(2), 1.0, rows(2)), "no multiple of 16; pass an aligned copy"),
    "read-only": (lambda k: k(rows(2), 1.0, readonly(rows(2))), r"'out' is read-only, and the kernel writes it \(role out\)"),
    "scalar of the wrong kind": (lambda k: k(rows(2), "1", rows(2)), "'factor' is '1', expected a number"),
    "bool for a number": (lambda k: k(rows(2), True, rows(2)), "'factor' is True, expected a number"),
    "stream": (lambda k: k(rows(2), 1.0, rows(2), stream=7), "stream: got a int"),
    "option": (lambda k: k(rows(2), 1.0, rows(2), options={"speed": 1}), "unknown launch option 'speed'; the host device has order"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_calls_are_refused_and_launch_nothing(scale: Kernel, fault: str) -> None:
    call, message = FAULTS[fault]
    with pytest.raises(LaunchError, match=message):
        call(scale)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 128, 0.0, 0), r"'c' is 128, expected i8: an integer from -128 to 127"),
        ((0.0, 1.0, 0.0, 0), r"'c' is the float 1.0, expected an integer \(i8\)"),
        ((0.0, 0, 0.0, -1), r"'e' is -1, expected u64"),
    ],
)
def test_scalars_out_of_range(kit: Kit, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        kit["types"](kit["types"].allocate()["out"], *arguments)


def test_dimensions_that_nothing_gives(kit: Kit) -> None:
    with pytest.raises(LaunchError, match=r"no array's shape gives the dimension S; pass dims=\{'S': …\}"):
        kit["probe"](**kit["probe"].allocate())


def test_read_only_inputs_are_fine(scale: Kernel) -> None:
    out = scale.allocate(T=2)
    scale(readonly(rows(2)), 1.0, **out)
    np.testing.assert_array_equal(out["out"].numpy(), rows(2))


def test_allocate_checks_its_dimensions(scale: Kernel) -> None:
    for dims, message in (
        ({}, "unknown name 'T'"),
        ({"Q": 1}, "no dimension 'Q'"),
        ({"T": 9}, "T = 9, scale was built for 1…8"),
        ({"T": -1}, "T = -1"),
    ):
        with pytest.raises(LaunchError, match=message):
            scale.allocate(**dims)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.uint16])
def test_bf16_comes_as_itself_or_as_uint16(kit: Kit, dtype: Any) -> None:
    a = np.arange(8, dtype=np.uint16).view(dtype).reshape(2, 4)
    b = kit.device.array(np.zeros((2, 4), ml_dtypes.bfloat16))
    kit["copy"](a, b)
    assert b.numpy().view(np.uint16).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(LaunchError, match="'a' is i16, expected bf16"):
        kit["copy"](a.view(np.int16), b)


def test_shapes_by_formula(kit: Kit) -> None:
    with pytest.raises(LaunchError, match=r"'b' has the shape \[2, 5\], expected \[2, 4\] \(S = 2\)"):
        kit["copy"](np.zeros((2, 4), np.uint16), np.zeros((2, 5), np.uint16))


def test_a_bound_call_sees_new_contents_and_keeps_its_arrays(scale: Kernel) -> None:
    x, out = scale.device.array(rows(2)), scale.allocate(T=2)["out"]
    bound = scale.bind(x, 2.0, out)
    bound.launch()
    x.copy_from(rows(2) + 1)
    bound.launch()
    np.testing.assert_array_equal(out.numpy(), (rows(2) + 1) * 2)
    assert bound.dims == {"T": 2}
    del x
    bound.launch(order="random", seed=3)
    assert "T = 2: 1 launches" in repr(bound)


def contract(grid: Any = (1, 1, 1), shape: Any = ("T",), when: str = "", dtype: str = "i32") -> Contract:
    return Contract("f", (Argument("a", dtype, shape),), {"T": Capacity(0, 1 << 40)}, (Launch("f", grid, 32, when=when),))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (contract(grid=("T +", 1, 1)), "not an expression"),
        (contract(when="T <"), "not an expression"),
        (contract(dtype="f7"), "unknown dtype 'f7'"),
    ],
)
def test_damaged_contracts_are_refused_when_loaded(made: Contract, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Geometries("k", made)


@pytest.mark.parametrize(
    ("made", "dims", "message"),
    [
        (contract(grid=(1, "T", 1)), {"T": 65_536}, r"grid \(1, 65536, 1\) of 'f' at T = 65536"),
        (contract(grid=("T", 1, 1)), {"T": 1 << 31}, "at most"),
        (contract(grid=("1 - T", 1, 1)), {"T": 3}, "grid"),
        (contract(grid=("1 // T", 1, 1)), {"T": 0}, "division|modulo"),
        (contract(shape=("T", "4 - T")), {"T": 5}, r"would have the shape \[5, -1\]"),
    ],
)
def test_impossible_geometries(made: Contract, dims: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Geometries("k", made).at(dims)


def test_geometries_are_kept_and_bounded() -> None:
    made = Geometries("k", contract(grid=("T", 1, 1)))
    first = made.at({"T": 1})
    assert made.at({"T": 1}) is first
    for t in range(2, 2000):
        made.at({"T": t})
    assert len(made._kept) <= 512


def test_devices_allocate_what_they_are_asked_for() -> None:
    device = HostDevice()
    assert device.empty(3, "bf16").nbytes == 6
    assert device.empty((2, 0), np.float64).numpy().shape == (2, 0)
    assert device.empty((), "i32").numpy().tolist() == -1
    for shape, dtype, message in (
        ((-1,), "f32", "at least 0"),
        ((1.5,), "f32", "integers"),
        ((1 << 60,), "f32", "2\\^48"),
        ((1,), "f7", "f7"),
        ((1,), object, "object"),
    ):
        with pytest.raises(LaunchError, match=message):
            device.empty(shape, dtype)
