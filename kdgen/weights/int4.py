"""Symmetric 4-bit weights in the format of a checkpoint: `compressed-tensors`, format "pack-quantized", strategy "group".

A weight matrix w of shape [out, in] is three tensors:

    weight_packed  i32   [out, in/8]      integers q = −8 … 7, stored as q + 8. Column 8 j + i is in word j, bits 4 i … 4 i + 3.
    weight_scale   bf16  [out, in/group]  w[n, k] = q[n, k] · scale[n, k div group]
    weight_shape   int   [2]              out, in; older checkpoints have i32, newer ones i64

Nothing in it depends on the group; a group here is any multiple of 16. Leading extents (experts) may stand before `out` everywhere.

Rounding, where the order decides bits:

    scale       max |w| of the group / 7.5, computed in w's own type, then rounded to bf16
    quantize    bf16 w: w / scale rounded to bf16;  f32 w: w / scale rounded to f32;  then clamped to −8 … 7, then rounded to the
                nearest integer, ties to even. A bf16 quotient is rounded twice on its way to an integer; that is part of the format.
    dequantize  f32: q · scale, exact: the product has 12 significant bits. bf16: that product rounded once, to nearest, ties to even,
                which is what the library's decompression does. Where q · scale leaves the range of the type, it is an infinity.

Memory is little-endian, as on every machine that kdgen runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype

GROUP = 32
PER_WORD = 8

#: Values worked on at a time: the temporaries of a chunk stay in a core's cache.
CHUNK = 1 << 18

_BF16_INFINITY = 0x7F80
_F32_INFINITY = 0x7F800000

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A packed matrix, or a stack of equal ones, checked when it is made.

    Attributes:
        packed: i32 (or u32) [..., out, in/8].
        scale: bf16 [..., out, in/group]; u16 is taken as the bits of bf16.
        group: columns per scale, a multiple of 16.

    Raises:
        ValueError: a wrong type or shape; columns that are no multiple of the group; a scale that is NaN, infinite or negative, or
            zero while its group has weights other than zero.
    """

    packed: Array
    scale: Array
    group: int = GROUP

    def __post_init__(self) -> None:
        _check_group(self.group)
        _check_dtype("weight_packed", self.packed, "int32", "uint32")
        _check_dtype("weight_scale", self.scale, "bfloat16", "uint16")
        _check_matrix("weight_packed", self.packed)
        _check_columns(self.shape, self.group)
        _check_scale_shape(self.shape, self.scale, self.group)
        _check_scale(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unpacked matrix: [..., out, in]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * PER_WORD)

    @property
    def rows(self) -> int:
        """Outputs."""
        return int(self.packed.shape[-2])

    @property
    def columns(self) -> int:
        """Inputs."""
        return int(self.packed.shape[-1]) * PER_WORD

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Array], group: int = GROUP) -> Self:
        """From a checkpoint's `weight_packed`, `weight_scale` and `weight_shape`; ValueError as well when they disagree."""
        names = ("weight_packed", "weight_scale", "weight_shape")
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"{', '.join(missing)} missing; a pack-quantized matrix has {', '.join(names)}")
        if others := [name for name in tensors if name not in names]:
            raise ValueError(f"{', '.join(others)} not understood: only symmetric weights without reordering are supported")
        shape = np.asarray(tensors["weight_shape"])
        if shape.dtype.kind not in "iu" or shape.ndim != 1:
            raise ValueError(f"weight_shape is {shape.dtype} {list(shape.shape)}; it must be a list of integers")
        weight = cls(tensors["weight_packed"], tensors["weight_scale"], group)
        if tuple(shape.tolist()) != weight.shape:
            raise ValueError(f"weight_shape is {shape.tolist()}, but weight_packed holds {list(weight.shape)}")
        return weight

    def tensors(self) -> dict[str, Array]:
        """The three tensors of a checkpoint; `weight_shape` in i64."""
        return {
            "weight_packed": self.packed.view(np.int32),
            "weight_scale": self.scale.view(numpy_dtype("bf16")),
            "weight_shape": np.array(self.shape, np.int64),
        }

    @classmethod
    def quantize(cls, weight: Array, scale: Array | None = None, group: int = GROUP) -> Self:
        """Quantize f32 or bf16 [..., out, in], with `group_scales` unless scales are given; ValueError as in `quantize`."""
        scale = group_scales(weight, group) if scale is None else scale
        return cls(pack(quantize(weight, scale, group)), scale, group)

    def dequantize(self, dtype: Literal["f32", "bf16"] = "f32") -> Array:
        """The matrix [..., out, in] in f32 (exact) or bf16 (rounded once)."""
        return dequantize(self.packed, self.scale, dtype, self.group)


def group_scales(weight: Array, group: int = GROUP, divisor: float = 7.5) -> Array:
    """The scales that `compressed-tensors` computes for a matrix.

    Args:
        weight: f32 or bf16 [..., out, in], finite.
        group: columns per scale, a multiple of 16 that divides `in`.
        divisor: the integer that the largest magnitude of a group is mapped to. 7.5 is the library's; 7 uses the symmetric grid
            −7 … 7 on which Kimi's weights were trained.

    Returns:
        bf16 [..., out, in/group], all positive: a group whose scale would be zero gets the epsilon of `weight`'s type, as in the
        library. The library does so before f32 scales become bf16; here a scale that becomes zero only then gets it as well.

    Raises:
        ValueError: a wrong type or shape, a weight that is not finite, or a divisor outside 7 … 8.
    """
    _check_weight(weight, group)
    if not 7 <= divisor <= 8:
        raise ValueError(f"divisor is {divisor}; allowed: 7 … 8")
    narrow = weight.dtype == numpy_dtype("bf16")
    scale = np.empty((*weight.shape[:-1], weight.shape[-1] // group), np.uint16)
    for part, target in _chunks(weight, scale):
        # Without the sign, floats compare as their bits do.
        magnitudes = part.view(np.uint16) & np.uint16(0x7FFF) if narrow else part.view(np.uint32) & np.uint32(0x7FFFFFFF)
        largest = magnitudes.reshape(len(part), -1, group).max(axis=-1)
        if (largest >= (_BF16_INFINITY if narrow else _F32_INFINITY)).any():
            raise ValueError("weight has values that are NaN or infinite")
        wide = largest.astype(np.uint32) << np.uint32(16) if narrow else largest
        bits = _bf16_bits(wide.view(np.float32) / np.float32(divisor))
        epsilon = _bf16_bits(np.array([2**-7 if narrow else 2**-23], np.float32))
        target[...] = np.where(bits == 0, epsilon, bits)
    return scale.view(numpy_dtype("bf16"))


def quantize(weight: Array, scale: Array, group: int = GROUP) -> npt.NDArray[np.int8]:
    """Integers −8 … 7 for a matrix and given scales; the module's docstring has the order of the roundings.

    Args:
        weight: f32 or bf16 [..., out, in], finite.
        scale: bf16 (or its bits as u16) [..., out, in/group].
        group: columns per scale, a multiple of 16 that divides `in`.

    Returns:
        i8 [..., out, in]; zeros where a scale is zero.

    Raises:
        ValueError: a wrong type or shape, a weight that is not finite, or a scale that is NaN, infinite or negative, or zero while
            its group has weights other than zero.
    """
    _check_weight(weight, group)
    _check_dtype("weight_scale", scale, "bfloat16", "uint16")
    _check_scale_shape(weight.shape, scale, group)
    narrow = weight.dtype == numpy_dtype("bf16")
    result = np.empty(weight.shape, np.int8)
    for part, bits, target in _chunks(weight, scale.view(np.uint16), result):
        _check_scale_bits(bits)
        wide = (_widen(part.view(np.uint16)) if narrow else part).reshape(len(part), -1, group)
        if not np.isfinite(wide).all():
            raise ValueError("weight has values that are NaN or infinite")
        zero = bits == 0
        if zero.any() and wide[zero].any():
            raise ValueError("weight_scale is zero for a group that has weights other than zero")
        # Huge quotients are clamped. A zero scale has zero weights: divided by one, they stay zero.
        with np.errstate(over="ignore", under="ignore"):
            quotient: npt.NDArray[np.float32] = np.divide(wide, np.where(zero, np.float32(1), _widen(bits))[..., None], dtype=np.float32)
        if narrow:
            quotient = _widen(_bf16_bits(quotient))
        np.rint(np.clip(quotient, -8, 7, out=quotient), out=quotient)
        target[...] = quotient.reshape(target.shape)
    return result


def dequantize(packed: Array, scale: Array, dtype: Literal["f32", "bf16"] = "f32", group: int = GROUP) -> Array:
    """The matrix of packed words and scales: f32 exactly, or bf16 rounded once.

    Args:
        packed: i32 or u32 [..., out, in/8].
        scale: bf16 (or its bits as u16) [..., out, in/group].
        dtype: of the result.
        group: columns per scale.

    Returns:
        f32 or bf16 [..., out, in].

    Raises:
        ValueError: as for `Int4Weight`, or another dtype.
    """
    if dtype not in ("f32", "bf16"):
        raise ValueError(f"cannot dequantize to {dtype}; allowed: f32, bf16")
    weight = Int4Weight(packed, scale, group)
    result = np.empty(weight.shape, np.uint16 if dtype == "bf16" else np.float32)
    for words, bits, target in _chunks(packed, scale.view(np.uint16), result):
        values = np.empty((len(words), words.shape[-1] * PER_WORD), np.int8)
        _unpack_into(words, values)
        product = values.astype(np.float32).reshape(len(words), -1, group)
        with np.errstate(over="ignore"):
            product *= _widen(bits)[..., None]
        target[...] = (_bf16_bits(product) if dtype == "bf16" else product).reshape(target.shape)
    return result.view(numpy_dtype(dtype))


def pack(values: Array) -> npt.NDArray[np.int32]:
    """Integers −8 … 7, i8 [..., K], to words i32 [..., K/8]; `unpack` is the inverse.

    Raises:
        ValueError: another type, a value out of range, or K that is no multiple of 8.
    """
    _check_dtype("values", values, "int8")
    if not values.ndim or values.shape[-1] % PER_WORD:
        raise ValueError(f"values of shape {list(values.shape)}: the last extent must be a multiple of {PER_WORD}")
    words = np.empty((*values.shape[:-1], values.shape[-1] // PER_WORD), np.uint32)
    for part, target in _chunks(values, words):
        nibbles = np.ascontiguousarray(part).view(np.uint8) + np.uint8(8)
        if nibbles.max() > 15:
            raise ValueError(f"values are {part.min()} … {part.max()}; 4 bits hold −8 … 7")
        # Eight bytes to eight nibbles: neighbours move together, in pairs, then fours, then all.
        x = nibbles.view(np.uint64)
        for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
            x |= x >> np.uint64(shift)
            x &= np.uint64(mask)
        target[...] = x
    return words.view(np.int32)


def unpack(packed: Array) -> npt.NDArray[np.int8]:
    """Words, i32 or u32 [..., K/8], to the integers i8 [..., K]; ValueError for another type."""
    _check_dtype("weight_packed", packed, "int32", "uint32")
    if not packed.ndim:
        raise ValueError("weight_packed has no extents; it must be [..., K/8]")
    values = np.empty((*packed.shape[:-1], packed.shape[-1] * PER_WORD), np.int8)
    for part, target in _chunks(packed, values):
        _unpack_into(part, target)
    return values


def _unpack_into(words: Array, values: Array) -> None:
    """Words [R, K/8] to contiguous i8 [R, K]."""
    x = values.view(np.uint64)
    x[...] = words.view(np.uint32)
    for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
        x |= x << np.uint64(shift)
        x &= np.uint64(mask)
    values -= np.int8(8)


def _chunks(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Equal runs of rows of several arrays [..., rows, columns], about `CHUNK` elements of the widest at a time; writable views."""
    lead = arrays[0].shape[:-2]
    widest = max(array.shape[-1] for array in arrays)
    rows = max(1, CHUNK // max(1, widest))
    if not arrays[0].size:
        return
    for index in np.ndindex(lead):
        matrices = [array[index] if array.ndim > 1 else array[None] for array in arrays]
        for start in range(0, len(matrices[0]), rows):
            yield tuple(matrix[start : start + rows] for matrix in matrices)


def _widen(bits: Array) -> npt.NDArray[np.float32]:
    """Bits of bf16 to f32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """f32 to the bits of bf16, to nearest, ties to even. Not for NaN."""
    bits = values.view(np.uint32)
    rounded: npt.NDArray[np.uint32] = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _check_dtype(name: str, array: Any, *allowed: str) -> None:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}; it must be a numpy array of {' or '.join(allowed)}")
    # numpy calls a swapped byte order by the same name.
    if array.dtype.name not in allowed or not array.dtype.isnative:
        swapped = "" if array.dtype.isnative else " in swapped byte order"
        raise ValueError(f"{name} is {array.dtype.name}{swapped}; it must be {' or '.join(allowed)}")


def _check_matrix(name: str, array: Array) -> None:
    if array.ndim < 2 or not array.size:
        raise ValueError(f"{name} is {list(array.shape)}; it must be a matrix, or a stack of matrices, that is not empty")


def _check_group(group: int) -> None:
    if not isinstance(group, int) or group < 16 or group % 16:
        raise ValueError(f"group is {group}; allowed: multiples of 16")


def _check_columns(shape: tuple[int, ...], group: int) -> None:
    if shape[-1] % group:
        raise ValueError(f"{shape[-1]} columns are no multiple of the group of {group}")


def _check_weight(weight: Array, group: int) -> None:
    _check_group(group)
    _check_dtype("weight", weight, "float32", "bfloat16")
    _check_matrix("weight", weight)
    _check_columns(weight.shape, group)


def _check_scale_shape(shape: tuple[int, ...], scale: Array, group: int) -> None:
    want = (*shape[:-1], shape[-1] // group)
    if scale.shape != want:
        raise ValueError(f"weight_scale is {list(scale.shape)}; {list(shape)} in groups of {group} needs {list(want)}")


def _check_scale_bits(bits: Array) -> None:
    """Every bf16 that is negative, infinite or NaN has bits of at least infinity's."""
    bad = bits >= _BF16_INFINITY
    if bad.any():
        value = bits[bad].view(numpy_dtype("bf16"))[0]
        raise ValueError(f"weight_scale has {value}; scales are positive and finite, or zero for a group of zeros")


def _check_scale(weight: Int4Weight) -> None:
    words_per_group = weight.group // PER_WORD
    for words, bits in _chunks(weight.packed, weight.scale.view(np.uint16)):
        _check_scale_bits(bits)
        zero = bits == 0
        if zero.any():
            groups = words.view(np.uint32).reshape(len(words), -1, words_per_group)
            if (groups[zero] != np.uint32(0x88888888)).any():
                raise ValueError("weight_scale is zero for a group that has weights other than zero")
