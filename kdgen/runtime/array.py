"""Arrays that kdgen owns: a shape, a dtype and a pointer on some device, always C-contiguous."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import dtype_name, numpy_dtype
from kdgen.errors import LaunchError

if TYPE_CHECKING:
    from kdgen.runtime.device import Device

Shape = tuple[int, ...]


class Array:
    """An array on a device; `device.empty` and `device.array` make them.

    Attributes:
        device: where it lies.
        shape: extents, row-major.
        dtype: kdgen name, such as `bf16`.
        pointer: address on the device; a multiple of 256.
        nbytes: size in bytes.
    """

    __slots__ = ("__weakref__", "device", "dtype", "nbytes", "pointer", "shape")

    def __init__(self, device: Device, shape: Shape, dtype: str, pointer: int):
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.pointer = pointer
        self.nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize

    def numpy(self, stream: Any = None) -> npt.NDArray[Any]:
        """The contents as a numpy array. On the GPU a copy; on the host the memory itself.

        Args:
            stream: wait for the work given to this stream only; by default, for all work of the device.
        """
        raise LaunchError(f"{type(self).__name__} cannot be read")

    def copy_from(self, values: npt.ArrayLike | Array, stream: Any = None) -> None:
        """Overwrite the contents with a numpy array of the same shape and dtype; done when it returns.

        Args:
            values: the new contents; also an array of the same device.
            stream: wait for the work given to this stream only; by default, for all work of the device.

        Raises:
            LaunchError: shape or dtype differ.
        """
        raise LaunchError(f"{type(self).__name__} cannot be written")

    def part(self, first: int, shape: Sequence[int] | int) -> Array:
        """Consecutive elements from number `first` on, as an array of `shape` that shares this one's memory and keeps it alive.

        Raises:
            LaunchError: they reach past the end.
        """
        extents = checked_shape(shape)
        if first < 0 or first + math.prod(extents) > self.size:
            raise LaunchError(f"elements {first} … {first + math.prod(extents) - 1} of {self!r}, which has {self.size}")
        return self._part(first, extents)

    def _part(self, first: int, shape: Shape) -> Array:
        raise LaunchError(f"{type(self).__name__} has no parts")

    def __getitem__(self, index: int) -> Array:
        """The `index`-th entry along the first axis, sharing memory."""
        count = len(self)
        if not 0 <= index < count:
            raise IndexError(f"index {index} of an array with {count} entries")
        return self.part(index * (self.size // count), self.shape[1:])

    def reshape(self, *shape: int) -> Array:
        """All elements in another shape, sharing memory."""
        if math.prod(shape) != self.size:
            raise LaunchError(f"{self!r} cannot be given the shape {list(shape)}")
        return self.part(0, shape)

    def source(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """`values` as what `copy_from` takes: contiguous and of this shape and dtype; LaunchError otherwise."""
        found = np.require(np.asarray(values), requirements="C")
        name = dtype_name(found.dtype)
        if found.shape != self.shape or name != self.dtype:
            raise LaunchError(f"cannot copy {name} {list(found.shape)} into an array of {self.dtype} {list(self.shape)}")
        return found

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-dimensional array has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)} on {self.device.name}>"


def checked_shape(shape: Sequence[int] | int) -> Shape:
    """A shape as a tuple of integers; LaunchError for a negative or fractional extent, or an absurd size."""
    extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    try:
        result = tuple(operator.index(extent) for extent in extents)
    except TypeError as error:
        raise LaunchError(f"shape {extents}: extents are integers") from error
    if any(extent < 0 for extent in result) or math.prod(result) >= 1 << 48:
        raise LaunchError(f"shape {list(result)}: extents are at least 0 and their product below 2^48")
    return result


class ParameterBlock:
    """What a launch function is given: 64 bits for each argument, and behind them a pointer to each (CUDA's `kernelParams`).

    Attributes:
        address: of the pointers.
    """

    __slots__ = ("_block", "address")

    def __init__(self, values: Sequence[int]):
        count = len(values)
        self._block = (ctypes.c_uint64 * (2 * count))(*values)
        base = ctypes.addressof(self._block)
        self.address = base + 8 * count
        self._block[count:] = list(range(base, self.address, 8))
