"""Element types under their kdgen names, and what numpy, DLPack and the array interfaces call them.

bf16 is `ml_dtypes.bfloat16` in numpy. Arrays of numpy's `uint16` are accepted where a kernel takes bf16, since libraries without
a bf16 type carry it so.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.errors import LaunchError

#: DLPack's (type code, bits); code 4 is bfloat, 6 is bool, which kernels see as bytes.
DLPACK: dict[str, tuple[int, int]] = {
    "f64": (2, 64), "f32": (2, 32), "f16": (2, 16), "bf16": (4, 16),
    "i64": (0, 64), "i32": (0, 32), "i16": (0, 16), "i8": (0, 8),
    "u64": (1, 64), "u32": (1, 32), "u16": (1, 16), "u8": (1, 8),
}  # fmt: skip
FROM_DLPACK: dict[tuple[int, int], str] = {**{code: name for name, code in DLPACK.items()}, (6, 8): "u8"}


@functools.cache
def _numpy() -> dict[str, np.dtype[Any]]:
    import ml_dtypes  # takes longer to import than most commands take to run

    return {
        "f64": np.dtype(np.float64), "f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
        "i64": np.dtype(np.int64), "i32": np.dtype(np.int32), "i16": np.dtype(np.int16), "i8": np.dtype(np.int8),
        "u64": np.dtype(np.uint64), "u32": np.dtype(np.uint32), "u16": np.dtype(np.uint16), "u8": np.dtype(np.uint8),
    }  # fmt: skip


@functools.cache
def _names() -> dict[np.dtype[Any], str]:
    return {dtype: name for name, dtype in _numpy().items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a kdgen dtype name; LaunchError for an unknown name."""
    if name not in _numpy():
        raise LaunchError(f"unknown dtype '{name}'; allowed: {', '.join(_numpy())}")
    return _numpy()[name]


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The kdgen name of a dtype given by kdgen name or in any way numpy understands; LaunchError when kernels have no such type."""
    if isinstance(dtype, np.dtype) and dtype in _names():
        return _names()[dtype]
    if isinstance(dtype, str) and dtype in _numpy():
        return dtype
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise _no_type(dtype) from error
    if found == np.bool_:
        return "u8"
    # numpy counts a swapped byte order as another type.
    if found not in _names():
        raise _no_type(found)
    return _names()[found]


def _no_type(dtype: npt.DTypeLike) -> LaunchError:
    return LaunchError(f"arrays of {dtype} cannot be given to a kernel; allowed: {', '.join(_numpy())}")


def accepts(wanted: str, given: str) -> bool:
    """True when an array of dtype `given` may stand for an argument of dtype `wanted`."""
    return wanted == given or (wanted == "bf16" and given == "u16")
