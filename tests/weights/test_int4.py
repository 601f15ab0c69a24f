from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdgen.dtypes import numpy_dtype
from kdgen.kdtr import pack_int4
from kdgen.weights.int4 import Int4Weight, dequantize, group_scales, pack, quantize, unpack
from tests.weights.regenerate import GOLDEN
from tests.weights.samples import BF16, Array, sample

RNG = np.random.default_rng(0)


def random_weight(rows: int, columns: int, group: int = 32, seed: int = 0, lead: tuple[int, ...] = ()) -> Int4Weight:
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 2**32, size=(*lead, rows, columns // 8), dtype=np.uint32).view(np.int32)
    scale = rng.integers(1, 0x7F80, size=(*lead, rows, columns // group)).astype(np.uint16).view(BF16)
    return Int4Weight(packed, scale, group)


def load(case: dict[str, Any], name: str) -> Array:
    item = case[name]
    dtype = BF16 if item["dtype"] == "bfloat16" else np.dtype(item["dtype"])
    return np.frombuffer(bytes.fromhex(item["hex"]), dtype).reshape(item["shape"])


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: f"{case['weight']['dtype']}-{case['group']}")
def test_golden_of_the_library(case: dict[str, Any]) -> None:
    tensors = {name: load(case, name) for name in ("weight_packed", "weight_scale", "weight_shape")}
    got = Int4Weight.quantize(load(case, "weight"), group=case["group"])
    for name, array in got.tensors().items():
        assert array.tobytes() == tensors[name].tobytes(), name
    weight = Int4Weight.from_tensors(tensors, case["group"])
    assert weight.dequantize("bf16").tobytes() == load(case, "bf16").tobytes()


def test_words_by_hand() -> None:
    values = np.array([[-8, -7, -1, 0, 1, 2, 6, 7]], np.int8)
    assert pack(values).view(np.uint32).tolist() == [[0xFEA98710]]
    assert unpack(np.array([0xFEA98710], np.uint32)).tolist() == values[0].tolist()


@settings(deadline=None, max_examples=60)
@given(lead=st.lists(st.integers(1, 3), max_size=2), rows=st.integers(1, 9), words=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse_and_as_defined(lead: list[int], rows: int, words: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(-8, 8, size=(*lead, rows, words * 8), dtype=np.int8)
    packed = pack(values)
    assert packed.dtype == np.int32
    assert np.array_equal(unpack(packed), values)
    wide = packed.view(np.uint32).astype(np.uint64)
    for i in range(8):
        assert np.array_equal((wide >> np.uint64(4 * i) & np.uint64(15)).astype(np.int64) - 8, values[..., i::8])


def test_kdtr_stores_the_same_words() -> None:
    values = RNG.integers(-8, 8, size=(5, 64), dtype=np.int8)
    assert np.array_equal(pack_int4(values), pack(values))


def test_chunks_do_not_show() -> None:
    values = RNG.integers(-8, 8, size=(700, 1024), dtype=np.int8)
    assert np.array_equal(unpack(pack(values)), values)
    assert np.array_equal(pack(values)[321:654], pack(values[321:654]))
    wide = RNG.integers(-8, 8, size=(2, 1 << 19), dtype=np.int8)
    assert np.array_equal(unpack(pack(wide)), wide)


def test_views_are_taken_as_they_are() -> None:
    values = RNG.integers(-8, 8, size=(3, 40, 64), dtype=np.int8)
    words = pack(values)
    assert np.array_equal(pack(values[:, ::2, 16:48]), words[:, ::2, 2:6])
    assert np.array_equal(unpack(words[1:, 5:, 3:5]), values[1:, 5:, 24:40])
    weight = random_weight(64, 256)
    part = Int4Weight(weight.packed[::2, 8:16], weight.scale[::2, 2:4])
    assert part.dequantize().tobytes() == np.ascontiguousarray(weight.dequantize()[::2, 64:128]).tobytes()
    plain = sample("bf16", 8, 256, 32, 0)
    assert np.array_equal(quantize(plain[::2], group_scales(plain)[::2]), quantize(plain, group_scales(plain))[::2])


@pytest.mark.parametrize("group", [16, 32, 48, 256])
def test_dequantize_is_the_definition(group: int) -> None:
    weight = random_weight(37, 3 * group, group, lead=(2,))
    scale = weight.scale.astype(np.float64).repeat(group, axis=-1)
    want = unpack(weight.packed) * scale
    with np.errstate(over="ignore"):
        assert np.array_equal(weight.dequantize(), want.astype(np.float32))
    # f64 holds the product exactly, and so does f32 unless it overflows: one rounding to bf16 from either.
    narrow = weight.dequantize("bf16")
    assert narrow.dtype == BF16
    with np.errstate(over="ignore"):
        assert narrow.tobytes() == want.astype(np.float32).astype(BF16).tobytes()
    exact = np.abs(want) <= np.finfo(np.float32).max
    assert np.array_equal(weight.dequantize()[exact].astype(np.float64), want[exact])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_quantized_weights_are_near(dtype: str) -> None:
    weight = RNG.normal(size=(16, 512)).astype(numpy_dtype(dtype))
    scale = group_scales(weight)
    error = np.abs(Int4Weight.quantize(weight, scale).dequantize() - weight.astype(np.float32)).reshape(16, -1, 32)
    assert (error <= 0.53 * scale.astype(np.float32)[..., None]).all()


def test_the_grid_from_minus_7_to_7() -> None:
    """A matrix on Kimi's grid comes back exactly from scales with divisor 7, for scales with few bits."""
    values = RNG.integers(-7, 8, size=(8, 64), dtype=np.int8)
    values[:, ::32] = 7
    scale = np.exp2(RNG.integers(-8, 0, size=(8, 2))).astype(BF16)
    weight = dequantize(pack(values), scale)
    got = group_scales(weight, divisor=7)
    assert np.array_equal(got, scale)
    assert np.array_equal(quantize(weight, got), values)


def test_groups_of_zeros() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1, 40] = 3
    assert group_scales(weight).astype(np.float32).tolist() == [[2**-23, 2**-23], [2**-23, 0.400390625]]
    assert group_scales(weight.astype(BF16)).astype(np.float32).tolist() == [[2**-7, 2**-7], [2**-7, 0.400390625]]
    scale = np.array([[0, 0], [0, 1]], np.float32).astype(BF16)
    legal = Int4Weight.quantize(weight, scale)
    assert np.array_equal(legal.dequantize(), weight)
    assert not legal.dequantize()[0].any()
    with pytest.raises(ValueError, match="zero for a group that has weights other than zero"):
        quantize(weight, np.zeros_like(scale))
    with pytest.raises(ValueError, match="zero for a group that has weights other than zero"):
        Int4Weight(legal.packed, np.zeros_like(scale))


def test_a_scale_that_bf16_rounds_to_zero() -> None:
    weight = np.full((1, 32), 2**-140, np.float32)
    assert group_scales(weight).astype(np.float32).tolist() == [[2**-23]]
    assert not Int4Weight.quantize(weight).dequantize().any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_weight_shape_in_either_type(dtype: Any) -> None:
    tensors = random_weight(4, 64).tensors()
    assert tensors["weight_shape"].dtype == np.int64
    assert Int4Weight.from_tensors({**tensors, "weight_shape": tensors["weight_shape"].astype(dtype)}).shape == (4, 64)


PACKED = np.full((4, 8), 0x88888888, np.uint32).view(np.int32)
SCALE = np.ones((4, 2), BF16)
WEIGHT = np.ones((4, 64), np.float32)


def with_value(array: Array, value: float) -> Array:
    array = array.copy()
    array[2, 1] = value
    return array


@pytest.mark.parametrize(
    ("packed", "scale", "group", "message"),
    [
        (PACKED.astype(np.int64), SCALE, 32, "weight_packed is int64; it must be int32 or uint32"),
        (PACKED.astype(">i4"), SCALE, 32, "weight_packed is int32 in swapped byte order"),
        (PACKED.tolist(), SCALE, 32, "weight_packed is a list"),
        (PACKED[0], SCALE, 32, r"weight_packed is \[8\]; it must be a matrix"),
        (PACKED[:0], SCALE[:0], 32, "not empty"),
        (PACKED, SCALE.astype(np.float32), 32, "weight_scale is float32; it must be bfloat16 or uint16"),
        (PACKED, SCALE.astype(np.float16), 32, "weight_scale is float16"),
        (PACKED, SCALE[:, :1], 32, r"weight_scale is \[4, 1\]; \[4, 64\] in groups of 32 needs \[4, 2\]"),
        (PACKED, SCALE.T, 32, r"weight_scale is \[2, 4\]"),
        (PACKED, SCALE, 64, r"groups of 64 needs \[4, 1\]"),
        (PACKED, SCALE, 24, "group is 24; allowed: multiples of 16"),
        (PACKED, SCALE, 0, "group is 0"),
        (PACKED[:, :6], SCALE, 32, "48 columns are no multiple of the group of 32"),
        (PACKED, with_value(SCALE, np.nan), 32, "weight_scale has nan"),
        (PACKED, with_value(SCALE, np.inf), 32, "weight_scale has inf"),
        (PACKED, with_value(SCALE, -1), 32, "weight_scale has -1"),
        (PACKED, with_value(SCALE, -0.0), 32, "weight_scale has -0"),
        (with_value(PACKED, 0), with_value(SCALE, 0)[:, ::-1], 32, "weight_scale is zero for a group"),
    ],
)
def test_faults_of_a_packed_matrix(packed: Any, scale: Array, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int4Weight(packed, scale, group)
    with pytest.raises(ValueError, match=message):
        dequantize(packed, scale, "f32", group)


@pytest.mark.parametrize(
    ("weight", "scale", "group", "message"),
    [
        (WEIGHT.astype(np.float64), SCALE, 32, "weight is float64; it must be float32 or bfloat16"),
        (WEIGHT[0], SCALE, 32, r"weight is \[64\]"),
        (WEIGHT[:, :48], SCALE, 32, "48 columns are no multiple"),
        (WEIGHT, SCALE[:2], 32, r"weight_scale is \[2, 2\]"),
        (WEIGHT, SCALE.astype(np.float32), 32, "weight_scale is float32"),
        (WEIGHT, with_value(SCALE, np.nan), 32, "weight_scale has nan"),
        (WEIGHT, with_value(SCALE, -2), 32, "weight_scale has -2"),
        (WEIGHT, SCALE, 8, "group is 8"),
        (with_value(WEIGHT, np.nan), SCALE, 32, "weight has values that are NaN or infinite"),
        (with_value(WEIGHT, -np.inf).astype(BF16), SCALE, 32, "weight has values that are NaN or infinite"),
    ],
)
def test_faults_of_a_plain_matrix(weight: Array, scale: Array, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(weight, scale, group)
    if "scale" not in message:
        with pytest.raises(ValueError, match=message):
            group_scales(weight, group)


def test_other_faults() -> None:
    tensors = random_weight(4, 64).tensors()
    with pytest.raises(ValueError, match="weight_shape missing"):
        Int4Weight.from_tensors({name: array for name, array in tensors.items() if name != "weight_shape"})
    with pytest.raises(ValueError, match="weight_zero_point not understood: only symmetric"):
        Int4Weight.from_tensors({**tensors, "weight_zero_point": tensors["weight_packed"]})
    with pytest.raises(ValueError, match=r"weight_shape is \[4, 60\], but weight_packed holds \[4, 64\]"):
        Int4Weight.from_tensors({**tensors, "weight_shape": np.array([4, 60])})
    with pytest.raises(ValueError, match="list of integers"):
        Int4Weight.from_tensors({**tensors, "weight_shape": np.array([4.0, 64.0])})
    with pytest.raises(ValueError, match="values are 8 … 8; 4 bits hold"):
        pack(np.full((1, 8), 8, np.int8))
    with pytest.raises(ValueError, match="4 bits hold"):
        pack(np.full((1, 8), -9, np.int8))
    with pytest.raises(ValueError, match="multiple of 8"):
        pack(np.zeros((2, 12), np.int8))
    with pytest.raises(ValueError, match="values is int32"):
        pack(np.zeros((2, 8), np.int32))
    with pytest.raises(ValueError, match="weight_packed is float32"):
        unpack(np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="divisor is 15"):
        group_scales(WEIGHT, divisor=15)
    with pytest.raises(ValueError, match="cannot dequantize to f16"):
        dequantize(PACKED, SCALE, "f16")  # type: ignore[arg-type]


def test_bits_of_bf16_in_u16_are_taken() -> None:
    weight = random_weight(4, 64)
    assert Int4Weight(weight.packed.view(np.uint32), weight.scale.view(np.uint16)).dequantize().tobytes() == weight.dequantize().tobytes()


def peak(work: Any) -> int:
    """Bytes that `work` holds at its peak, its result included."""
    work()  # what is imported or cached on the way stays out
    tracemalloc.start()
    try:
        result = work()
        assert result is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_the_result_and_a_few_megabytes() -> None:
    rows, columns, spare = 2048, 7168, 8 << 20
    weight = random_weight(rows, columns)
    plain = RNG.normal(size=(rows, columns // 64)).astype(BF16).repeat(64, axis=1)
    values = unpack(weight.packed)
    scale = group_scales(plain)
    size = rows * columns
    for name, work, result in (
        ("check", lambda: Int4Weight(weight.packed, weight.scale), 0),
        ("pack", lambda: pack(values), size // 2),
        ("unpack", lambda: unpack(weight.packed), size),
        ("dequantize f32", weight.dequantize, 4 * size),
        ("dequantize bf16", lambda: weight.dequantize("bf16"), 2 * size),
        ("group_scales", lambda: group_scales(plain), size // 16),
        ("quantize", lambda: quantize(plain, scale), size),
    ):
        assert peak(work) <= result + spare, name
