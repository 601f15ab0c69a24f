"""A second reference of `tree_attention`: its order of operations, step by step in float32. It explains a differing bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.kernels import tree_attention
from kdgen.kernels.base import Arrays

Floats = npt.NDArray[np.float32]


def _exp2(x: Floats) -> Floats:
    return np.exp2(x).astype(np.float32)


def ordered(p: tree_attention.Params, inputs: Arrays, exp2: Callable[[Floats], Floats] = _exp2) -> npt.NDArray[np.float32]:
    """The result before rounding, `[T, heads, latent]` in float32, by the kernel's own order of operations.

    It explains a differing bit: with the `exp2` of the C library it equals the host target bit for bit, whose `mma` adds its 16
    products in ascending order. A GPU's `mma` adds them in another one, and its `exp2` is approximate.
    """
    out = np.zeros((len(inputs["q"]), p.heads, p.latent), np.float32)
    for row, keys in tree_attention.logical_keys(p, inputs).items():
        position = len(keys) - 1
        body = p.body_tiles(position) * p.key_tile
        size = p.splits[p.step_of(position)].keys
        bounds = [*range(0, body, size), body, position + 1]
        query = inputs["q"][row].astype(np.float32)
        splits = [_split(p, query, keys[a:b].astype(np.float32), exp2) for a, b in itertools.pairwise(bounds)]
        out[row] = _combined(p, splits, exp2)
    return out


def _split(
    p: tree_attention.Params, query: Floats, keys: Floats, exp2: Callable[[Floats], Floats]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Reference, sum of weights `[heads]`, and unscaled sums `[heads, latent]` of one split."""
    low, c = np.float32(-np.inf), p.log2_scale
    reference = np.full(p.heads, low, np.float32)
    lanes = 8 if p.dtype == "bf16" else 1
    total = np.zeros((p.heads, lanes), np.float32)
    sums = np.zeros((p.heads, p.latent), np.float32)
    for first in range(0, len(keys), p.key_tile):
        tile = np.zeros((p.key_tile, p.width), np.float32)
        real = min(p.key_tile, len(keys) - first)
        tile[:real] = keys[first : first + real]
        scores = _scores(p, query, tile)
        scores[:, real:] = low
        top = scores.max(axis=1) * c
        moved = np.where(top > reference + np.float32(tree_attention.LAZY), top, reference)
        weights = exp2(_fma(scores, c, -moved[:, None]))
        alpha = exp2(reference - moved)
        if p.dtype == "bf16":
            weights = weights.astype(numpy_dtype("bf16")).astype(np.float32)
            # Lane g adds keys g and g + 8 of each group of 16.
            added = np.zeros((p.heads, lanes), np.float32)
            for group in weights.reshape(p.heads, -1, 2, 8).transpose(1, 0, 2, 3):
                added = added + (group[:, 0] + group[:, 1])
        else:
            added = np.zeros((p.heads, 1), np.float32)
            for key in range(p.key_tile):
                added = added + weights[:, key : key + 1]
        total = _fma(total, alpha[:, None], added)
        reference = moved
        sums = sums * alpha[:, None]
        for key in range(p.key_tile):
            sums = _fma(weights[:, key : key + 1], tile[key, : p.latent], sums)
    while lanes > 1:
        # The butterfly over lanes: every lane has the same sum in the end.
        lanes //= 2
        total = total.reshape(p.heads, lanes, 2).sum(axis=2, dtype=np.float32)
    return reference, total[:, 0], sums


def _scores(p: tree_attention.Params, query: Floats, tile: Floats) -> Floats:
    """Scores `[heads, keys]` as four sums. Products of two bf16 are exact, so that a fused and a plain addition agree."""
    wide = p.dtype == "bf16"
    sums = np.zeros((4, len(query), len(tile)), np.float32)
    for d in range(p.width):
        g = d // 16 % 4 if wide else d % 4
        sums[g] = _fma(query[:, d, None], tile[None, :, d], sums[g])
    return np.asarray((sums[0] + sums[1]) + (sums[2] + sums[3]), np.float32)


def _fma(a: Any, b: Any, c: Any) -> Floats:
    """a · b + c, rounded once to float32: the product of two floats is exact in float64.

    The sum is rounded to float64 and then to float32. That is one rounding but for a tie that the first rounding makes; the exact
    remainder of the first one decides those.
    """
    product = np.multiply(a, b, dtype=np.float64)
    wide = np.asarray(c, np.float64)
    with np.errstate(invalid="ignore"):
        total = product + wide
        # Knuth's two-sum: what the float64 sum lost.
        back = total - product
        lost = (product - (total - back)) + (wide - back)
        # Round to odd: a lost remainder makes the last bit 1, so that no tie appears that was none.
        bits = total.view(np.int64)
        inexact = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
        away = (lost > 0) == (total > 0)
        bits = np.where(inexact, np.where(away, bits + 1, bits - 1), bits)
    return np.asarray(bits.view(np.float64), np.float32)


def _packed(p: tree_attention.Params, sums: Floats) -> tuple[Floats, Floats]:
    """Sums `[heads, latent]` as integers, and what a one of them is worth, both `[heads, latent]`."""
    integers, units = np.zeros_like(sums), np.ones_like(sums)
    group = p.warp_tiles * 16
    for first in range(0, p.latent, group):
        part = slice(first, first + group)
        largest = np.abs(sums[:, part]).max(axis=1).view(np.int32) >> 23
        exponent = np.maximum(largest, tree_attention.LEAST_EXPONENT)[:, None] - 127 - tree_attention.FRACTION_BITS
        integers[:, part] = np.rint(np.ldexp(sums[:, part].astype(np.float64), -exponent))
        units[:, part] = np.ldexp(np.float32(1), exponent)
    return integers, units


def _combined(
    p: tree_attention.Params, splits: list[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]], exp2: Callable[[Floats], Floats]
) -> Floats:
    """Splits `(reference, sum of weights, sums)` to the result, as the combining blocks do."""
    top = np.max([reference for reference, _, _ in splits], axis=0)
    factors = [exp2(reference - top) for reference, _, _ in splits]
    lanes = np.zeros((32, len(top)), np.float32)
    warps = np.zeros((8, *splits[0][2].shape), np.float32)
    for i, (factor, (_, total, sums)) in enumerate(zip(factors, splits, strict=True)):
        lanes[i % 32] = _fma(factor, total, lanes[i % 32])
        if p.packed:
            integers, units = _packed(p, sums)
            warps[i % 8] = _fma(factor[:, None] * units, integers, warps[i % 8])
        else:
            warps[i % 8] = _fma(factor[:, None], sums, warps[i % 8])
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    joined = warps[0]
    for warp in warps[1:]:
        joined = joined + warp
    result: Floats = joined / lanes[0][:, None]
    return result
