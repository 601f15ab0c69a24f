"""Bit for bit what the `compressed-tensors` library does; skipped where the library and torch are not installed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kdgen.dtypes import numpy_dtype
from kdgen.weights.int4 import Int4Weight, dequantize, group_scales, pack, quantize, unpack
from tests.weights.regenerate import CASES, GOLDEN, to_json
from tests.weights.samples import library_results, sample

pytest.importorskip("compressed_tensors")
pytest.importorskip("torch")


@pytest.mark.parametrize("group", [16, 32, 48, 64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_scales_words_and_decompression(dtype: str, group: int) -> None:
    for seed in range(10):
        weight = sample(dtype, 32, 6 * group, group, seed)
        want = library_results(weight, group)
        got = Int4Weight.quantize(weight, group=group)
        for name, array in got.tensors().items():
            assert array.dtype == want[name].dtype, name
            assert array.tobytes() == want[name].tobytes(), name
        assert got.dequantize("bf16").tobytes() == want["bf16"].tobytes()
        assert group_scales(weight, group).tobytes() == want["weight_scale"].tobytes()


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_given_scales_that_clamp(dtype: str) -> None:
    """Scales of an observer other than min-max: values outside −8 … 7 are clamped, quotients round as in the library."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(64, 512)).astype(numpy_dtype(dtype))
    scale = rng.uniform(0.05, 0.5, size=(64, 16)).astype(numpy_dtype("bf16"))
    want = library_results(weight, 32, scale)
    assert pack(quantize(weight, scale)).tobytes() == want["weight_packed"].tobytes()


def test_every_quotient_of_two_bf16() -> None:
    """All mantissas over all mantissas: where the quotient's rounding to bf16 moves a value onto a tie, it does so in both."""
    mantissas = (np.arange(128, dtype=np.uint16) + np.uint16(0x3F80)).view(numpy_dtype("bf16"))
    for factor in (1, 2, 4, 8):
        weight = np.repeat((mantissas.astype(np.float32) * factor)[None], 128, axis=0).astype(numpy_dtype("bf16"))
        scale = np.repeat(mantissas[:, None], 4, axis=1)
        for signed in (weight, -weight):
            assert pack(quantize(signed, scale)).tobytes() == library_results(signed, 32, scale)["weight_packed"].tobytes()


def test_any_words_decompress_alike() -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    rng = np.random.default_rng(2)
    words = rng.integers(-(2**31), 2**31, size=(16, 64), dtype=np.int64).astype(np.int32)
    values = unpack_from_int32(torch.from_numpy(words), 4, torch.Size([16, 512])).numpy()
    assert np.array_equal(unpack(words), values)
    assert np.array_equal(pack(values), pack_to_int32(torch.from_numpy(values), 4).numpy())
    scale = rng.integers(1, 0x7F80, size=(16, 16)).astype(np.uint16)
    plain = dequantize(words, scale, "bf16")
    with np.errstate(over="ignore"):
        want = torch.from_numpy(values.copy()).to(torch.bfloat16).unflatten(-1, (16, 32))
        want = want * torch.from_numpy(scale.view(np.int16)).view(torch.bfloat16)[..., None]
    assert plain.tobytes() == want.flatten(-2).contiguous().view(torch.int16).numpy().tobytes()


def test_golden_is_what_the_library_makes() -> None:
    golden = json.loads(GOLDEN.read_text())
    for number, ((dtype, rows, columns, group), case) in enumerate(zip(CASES, golden["cases"], strict=True)):
        weight = sample(dtype, rows, columns, group, number)
        assert to_json(weight) == case["weight"]
        for name, array in library_results(weight, group).items():
            assert to_json(np.ascontiguousarray(array)) == case[name], name
