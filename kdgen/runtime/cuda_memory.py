"""Arrays in a GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.errors import LaunchError
from kdgen.runtime.array import Array, Shape
from kdgen.runtime.cuda_driver import check, driver
from kdgen.runtime.dlpack import CUDA, lend

if TYPE_CHECKING:
    from kdgen.runtime.cuda import CudaDevice

_LEGACY_STREAM = 1  # the legacy default stream, as the array interface and DLPack number it


class CudaArray(Array):
    """An array in a GPU's memory, freed with its last reference.

    It comes from `cuMemAlloc`, not from a stream-ordered pool: freeing then waits for whatever stream still uses the memory, so that
    dropping an array is safe right after any launch. Engines allocate once and keep; where that is not so, pass arrays of a library
    with a pool.
    """

    __slots__ = ("_free",)

    def __init__(self, device: CudaDevice, shape: Shape, dtype: str):
        super().__init__(device, shape, dtype, 0)
        self._free: Any = None
        size = max(1, self.nbytes)
        with device.current():
            address = check(driver.cuMemAlloc(size), f"allocating {size:,} bytes for {dtype} {list(shape)} on {device.name}")
        self.pointer = int(address)
        self._free = device.free

    def __del__(self) -> None:
        if getattr(self, "_free", None) is not None:
            self._free(self.pointer)

    def numpy(self, stream: Any = None) -> npt.NDArray[Any]:
        """A copy of the contents, after waiting for `stream`, or for all work of the device."""
        result = np.empty(self.shape, numpy_dtype(self.dtype))
        self._copy("reading", driver.cuMemcpyDtoHAsync, result.ctypes.data, self.pointer, stream)
        return result

    def copy_from(self, values: npt.ArrayLike | Array, stream: Any = None) -> None:
        """Overwrite the contents, after waiting for `stream`, or for all work of the device. Another array of the GPU is copied there."""
        if isinstance(values, CudaArray):
            if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
                raise LaunchError(f"cannot copy {values!r} into {self!r}")
            self._copy("writing", driver.cuMemcpyDtoDAsync, self.pointer, values.pointer, stream)
            return
        source = self.source(values.numpy() if isinstance(values, Array) else values)
        self._copy("writing", driver.cuMemcpyHtoDAsync, self.pointer, source.ctypes.data, stream)

    def fill_from(self, source: npt.NDArray[Any]) -> None:
        """First contents of a fresh array: nothing can be using it, so nothing is waited for."""
        self._copy("writing", driver.cuMemcpyHtoDAsync, self.pointer, source.ctypes.data, self._device.copies)

    def _part(self, first: int, shape: Shape) -> CudaArray:
        return CudaPart(self, first, shape)

    @property
    def _device(self) -> CudaDevice:
        return cast("CudaDevice", self.device)

    def _copy(self, doing: str, copy: Any, to: int, source: int, stream: Any) -> None:
        device = self._device
        if not self.nbytes:
            return
        if stream is None:
            device.synchronize()
        handle = device.stream_handle(device.copies if stream is None else stream)
        with device.current():
            doing = f"{doing} {self!r}"
            check(copy(to, source, self.nbytes, handle), doing)
            # The copy of pageable memory may return before its last part has arrived.
            check(driver.cuStreamSynchronize(handle), doing)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape, "typestr": numpy_dtype(self.dtype).str, "data": (self.pointer if self.nbytes else 0, False),
            "strides": None, "version": 3, "stream": _LEGACY_STREAM,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """This array for another library, without a copy.

        Whatever stream wrote it is not known here, so unless the reader says −1 (it waits itself), all work of the device is waited for.
        """
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("a GPU array is lent where it lies, without a copy")
        if stream != -1:
            self._device.synchronize()
        return lend(self, self.__dlpack_device__(), versioned=max_version is not None and max_version[0] >= 1)


class CudaPart(CudaArray):
    """Part of an array in a GPU's memory."""

    __slots__ = ("_whole",)

    def __init__(self, whole: CudaArray, first: int, shape: Shape):
        address = whole.pointer + first * numpy_dtype(whole.dtype).itemsize
        Array.__init__(self, whole.device, shape, whole.dtype, address)
        self._free = None
        self._whole = whole
