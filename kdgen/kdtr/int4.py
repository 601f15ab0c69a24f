"""Symmetric 4-bit integers, 8 to a 32-bit word: the lowest column in the lowest 4 bits, each stored as value + 8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.errors import ArtifactError
from kdgen.kdtr.format import INT4_PER_WORD

_SHIFTS = np.arange(INT4_PER_WORD, dtype=np.uint32) * np.uint32(4)


def pack_int4(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Integers −8 … 7 of shape [..., K] to words [..., K/8]; `unpack_int4` is its inverse.

    Raises:
        ArtifactError: a value is out of range, or K is no multiple of 8.
    """
    if not values.ndim or values.shape[-1] % INT4_PER_WORD:
        raise ArtifactError(f"int4 of shape {list(values.shape)}: the last extent must be a multiple of {INT4_PER_WORD}")
    if values.size and not (values.min() >= -8 and values.max() <= 7):
        raise ArtifactError(f"int4 values are −8 … 7; got {values.min()} … {values.max()}")
    grouped = (values.astype(np.int64) + 8).astype(np.uint32).reshape(*values.shape[:-1], values.shape[-1] // INT4_PER_WORD, INT4_PER_WORD)
    words: npt.NDArray[np.uint32] = np.bitwise_or.reduce(grouped << _SHIFTS, axis=-1)
    return words.view(np.int32)


def unpack_int4(words: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Words [..., K/8] (i32 or u32) to the integers [..., K]."""
    nibbles = (words.view(np.uint32)[..., None] >> _SHIFTS) & np.uint32(15)
    return (nibbles.astype(np.int8) - np.int8(8)).reshape(*words.shape[:-1], words.shape[-1] * INT4_PER_WORD)
