"""Weights that make rounding matter, and what the `compressed-tensors` library does with them (which needs torch)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdgen.dtypes import numpy_dtype

Array = np.ndarray[Any, Any]
BF16 = numpy_dtype("bf16")


def sample(dtype: str, rows: int, columns: int, group: int, seed: int) -> Array:
    """Groups of zeros, ties, outliers, subnormals, values near the largest and the smallest, and plain normal ones."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(rows, columns // group, group)).astype(np.float32) * np.exp2(
        rng.integers(-12, 3, size=(rows, columns // group, 1))
    )
    ties = rng.integers(-15, 16, size=w.shape).astype(np.float32) / 2
    kind = rng.integers(0, 8, size=w.shape[:2])
    w = w.astype(np.float32)
    w[kind == 1] = 0
    w[kind == 2] = ties[kind == 2]  # half-integers: with the largest at 7.5 the scale is 1, and every odd half is a tie
    w[kind == 2, 0] = 7.5
    w[kind == 3, 0] *= 1000
    w[kind == 4] *= np.float32(2**-112)
    w[kind == 5] *= np.float32(2**120)
    w[kind == 6] = np.float32(2**-128) * ties[kind == 6]  # subnormal, and so is the scale
    return np.ascontiguousarray(w.reshape(rows, columns).astype(numpy_dtype(dtype)))


def library_results(weight: Array, group: int, scale: Array | None = None) -> dict[str, Array]:
    """Scales (unless given), checkpoint tensors, and the decompressed matrix in bf16, all made by the library."""
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = torch.from_numpy(weight.view(np.int16)).view(torch.bfloat16) if weight.dtype == BF16 else torch.from_numpy(weight)
    if scale is None:
        grouped = w.unflatten(-1, (-1, group))
        s = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)[0].to(torch.bfloat16)
    else:
        s = torch.from_numpy(scale.view(np.int16)).view(torch.bfloat16)
    packed = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": s}, scheme)
    plain = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
    return {
        "weight_packed": packed["weight_packed"].numpy(),
        "weight_scale": packed["weight_scale"].view(torch.int16).numpy().view(BF16),
        "weight_shape": packed["weight_shape"].numpy(),
        "bf16": plain.view(torch.int16).numpy().view(BF16),
    }
