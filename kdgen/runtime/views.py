"""Any array, whatever library made it, as what a launch needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kdgen.dtypes import dtype_name
from kdgen.errors import LaunchError
from kdgen.runtime.dlpack import is_contiguous, read_capsule

#: DLPack version that capsules are asked for; libraries that know no versions are asked without it.
_DLPACK_VERSION = (1, 0)


class View(NamedTuple):
    """An array seen from a device.

    Attributes:
        pointer: address of element 0.
        shape: extents.
        dtype: kdgen name.
        readonly: must not be written.
        contiguous: C-contiguous.
        keep: what keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    readonly: bool
    contiguous: bool
    keep: Any


def view_numpy(array: np.ndarray[Any, Any]) -> View:
    """A numpy array."""
    return View(
        array.__array_interface__["data"][0],
        array.shape,
        dtype_name(array.dtype),
        not array.flags.writeable,
        array.flags.c_contiguous,
        array,
    )


def view_dlpack(value: Any, stream: int | None) -> tuple[View, tuple[int, int]]:
    """An object with `__dlpack__`, and its (DLPack device kind, number).

    Args:
        value: the object.
        stream: what `__dlpack__` is told about the reader: a stream as DLPack numbers them (1: legacy default, −1: do not wait), or
            None for memory of the CPU.
    """
    try:
        try:
            capsule = value.__dlpack__(stream=stream, max_version=_DLPACK_VERSION)
        except TypeError:
            capsule = value.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        # Each library has its own reasons: a tensor that records gradients, a conjugated view, a read-only array.
        raise LaunchError(f"a {type(value).__name__} that cannot be lent through DLPack: {error}") from error
    found = read_capsule(capsule)
    return View(found.pointer, found.shape, found.dtype, found.readonly, found.contiguous, (value, capsule)), found.device


def view_cuda_interface(value: Any) -> tuple[View, int | None]:
    """An object with `__cuda_array_interface__` (versions 2 and 3), and the handle of the stream that its contents wait for."""
    interface: Mapping[str, Any] = value.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise LaunchError(f"a masked {type(value).__name__} cannot be given to a kernel")
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    # numpy has no letter for bf16: arrays of it call themselves two opaque bytes.
    name = "bf16" if dtype.str[1:] == "V2" else dtype_name(dtype)
    pointer, readonly = interface["data"]
    contiguous = is_contiguous(shape, interface.get("strides"), dtype.itemsize)
    view = View(pointer or 0, shape, name, bool(readonly), contiguous, value)
    return view, interface.get("stream")


def not_an_array(value: Any, wanted: str) -> LaunchError:
    """The error for an argument that is no array at all."""
    hint = ""
    if isinstance(value, list | tuple | int | float | np.generic):
        hint = "; make one with device.array(...)"
    return LaunchError(f"got {'None' if value is None else f'a {type(value).__name__}'}, expected {wanted}{hint}")
