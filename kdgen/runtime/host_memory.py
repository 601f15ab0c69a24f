"""Arrays of the host device: memory between two red zones that no kernel may touch."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.runtime.array import Array, Shape
from kdgen.runtime.dlpack import CPU, lend

if TYPE_CHECKING:
    from kdgen.runtime.host import HostDevice

ZONE_BYTES = 256
#: What red zones hold: a NaN in bf16 and f32, an absurd index in i32, and unlikely to be what a kernel writes (−1 is not).
_PATTERN_BYTES = b"\xc1\x7f" * (ZONE_BYTES // 2)
_PATTERN = np.frombuffer(_PATTERN_BYTES, np.uint8)
_ALIGNMENT = 256


class HostArray(Array):
    """An array in the CPU's memory.

    Fresh arrays hold 0xFF in every byte: NaN in every float type, −1 in every signed one. After a launch the bytes around the
    array are checked, so a write past either end is found even without a sanitizer.
    """

    __slots__ = ("_after", "_before", "_memory", "_values")

    def __init__(self, device: HostDevice, shape: Shape, dtype: str):
        numpy_type = numpy_dtype(dtype)
        nbytes = math.prod(shape) * numpy_type.itemsize
        self._memory = np.empty(nbytes + 2 * ZONE_BYTES + _ALIGNMENT, np.uint8)
        start = -(self._memory.ctypes.data + ZONE_BYTES) % _ALIGNMENT + ZONE_BYTES
        self._before = self._memory[start - ZONE_BYTES : start]
        self._after = self._memory[start + nbytes : start + nbytes + ZONE_BYTES]
        contents = self._memory[start : start + nbytes]
        contents[:] = 0xFF
        self.restore_zones()
        self._values = contents.view(numpy_type).reshape(shape)
        super().__init__(device, shape, dtype, self._memory.ctypes.data + start)

    def numpy(self, stream: Any = None) -> npt.NDArray[Any]:
        """The contents: the memory itself, not a copy."""
        return self._values

    def copy_from(self, values: npt.ArrayLike | Array, stream: Any = None) -> None:
        """Overwrite the contents with a numpy array of the same shape and dtype."""
        self._values[...] = self.source(values.numpy() if isinstance(values, Array) else values)

    def _part(self, first: int, shape: Shape) -> HostArray:
        return HostPart(self, first, shape)

    def restore_zones(self) -> None:
        """Put the pattern into both red zones."""
        self._before[:] = _PATTERN
        self._after[:] = _PATTERN

    def overrun(self) -> int | None:
        """The offset in bytes from element 0 of the red-zone byte nearest to the array that was written; None if none was."""
        # Comparing bytes is ten times faster than numpy's comparison of arrays this small.
        if self._after.tobytes() != _PATTERN_BYTES:
            return self.nbytes + int(np.flatnonzero(self._after != _PATTERN)[0])
        if self._before.tobytes() != _PATTERN_BYTES:
            return int(np.flatnonzero(self._before != _PATTERN)[-1]) - ZONE_BYTES
        return None

    def guard(self, poison: Any, *, on: bool) -> None:
        """Let the sanitizer forbid (or allow again) any access to the red zones; `poison` is a library's `kdgen_poison`."""
        for zone in (self._before, self._after):
            poison(ctypes.c_void_p(zone.ctypes.data), ctypes.c_ulong(ZONE_BYTES), int(on))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.dtype == "bf16":
            # The interface cannot say bf16; without it numpy asks __array__, which can.
            raise AttributeError("numpy's array interface has no name for bf16; use numpy()")
        return self._values.__array_interface__

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy:
            return np.array(self._values, dtype)
        return np.asarray(self._values, dtype)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """This array for another library, without a copy."""
        if dl_device not in (None, (CPU, 0)) or copy:
            raise BufferError("a host array is lent where it lies, without a copy")
        return lend(self, (CPU, 0), versioned=max_version is not None and max_version[0] >= 1)


class HostPart(HostArray):
    """Part of an array in the CPU's memory; its red zones are those of the whole."""

    __slots__ = ()

    def __init__(self, whole: HostArray, first: int, shape: Shape):
        self._memory, self._before, self._after = whole._memory, whole._before, whole._after
        self._values = whole._values.reshape(-1)[first : first + math.prod(shape)].reshape(shape)
        Array.__init__(self, whole.device, shape, whole.dtype, whole.pointer + first * self._values.itemsize)
