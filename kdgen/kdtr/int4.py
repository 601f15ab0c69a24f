"""Symmetric 4-bit integers, 8 to a 32-bit word: the lowest column in the lowest 4 bits, each stored as value + 8."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.errors import ArtifactError
from kdgen.weights import int4


def pack_int4(values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Integers −8 … 7 of shape [..., K] to words [..., K/8]; `unpack_int4` is its inverse.

    Raises:
        ArtifactError: a value is out of range, or K is no multiple of 8.
    """
    # Before the conversion to i8, which would wrap them.
    if values.size and not (values.min() >= -8 and values.max() <= 7):
        raise ArtifactError(f"int4 values are −8 … 7; got {values.min()} … {values.max()}")
    try:
        return int4.pack(values.astype(np.int8, copy=False))
    except ValueError as error:
        raise ArtifactError(f"int4: {error}") from error


def unpack_int4(words: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """Words [..., K/8] (i32 or u32) to the integers [..., K]; ArtifactError for another type."""
    try:
        return int4.unpack(words)
    except ValueError as error:
        raise ArtifactError(f"int4: {error}") from error
