"""A GPU: `cuda.core` for contexts, modules, streams, events and graphs; the driver's own calls for launches and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import dtype_name
from kdgen.errors import DeviceError, LaunchError
from kdgen.runtime.array import Array, checked_shape
from kdgen.runtime.cuda_driver import check, core, driver, plain_errors
from kdgen.runtime.cuda_memory import CudaArray
from kdgen.runtime.cuda_program import CudaProgram
from kdgen.runtime.cuda_stream import BorrowedStream, CudaEvent, CudaGraph, CudaStream
from kdgen.runtime.dlpack import CPU, CUDA, CUDA_MANAGED, CUDA_PINNED
from kdgen.runtime.manifest import KernelRecord, Manifest, TargetRecord
from kdgen.runtime.open import gpu_count
from kdgen.runtime.views import View, not_an_array, view_cuda_interface, view_dlpack

_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # names of the default streams that CUDA, DLPack and the array interface share


class CudaDevice:
    """A GPU.

    Without a stream, work goes to the legacy default stream, which waits for other libraries' default work.

    Attributes:
        ordinal: number among the GPUs that this process sees.
        core: the `cuda.core.Device`.
        card: the product's name.
        capability: compute capability.
        shared_limit: bytes of shared memory that a block may have.
        captures: graphs being captured, by the handle of their stream.
    """

    def __init__(self, ordinal: int = 0):
        count = gpu_count()
        if ordinal >= count:
            found = f"there are {count}, numbered from 0" if count else "none found (no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it)"
            raise DeviceError(f"no GPU {ordinal}: {found}; device='host' needs none")
        with plain_errors(f"opening GPU {ordinal}"):
            self.core = core.Device(ordinal)
            before = driver.cuCtxGetCurrent()[1]
            self.core.set_current()
            self._context = driver.cuCtxGetCurrent()[1]
            self._context_address = int(self._context)
            if int(before) not in (0, self._context_address):
                driver.cuCtxSetCurrent(before)
            self.card = str(self.core.name)
            major, minor = self.core.compute_capability
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self.capability = (int(major), int(minor))
        self.captures: dict[int, CudaGraph] = {}
        limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.shared_limit = int(check(driver.cuDeviceGetAttribute(limit, driver.CUdevice(ordinal)), "asking for the shared memory"))
        self.copies = CudaStream(self)

    @property
    def target_names(self) -> tuple[str, ...]:
        """Its own architecture, then the older ones of its family, whose builds run here too."""
        major, minor = self.capability
        return tuple(f"sm_{major}{older}" for older in range(minor, -1, -1))

    def is_current(self) -> bool:
        """True when driver calls of this thread go to this device."""
        return int(driver.cuCtxGetCurrent()[1]) == self._context_address

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let driver calls go to this device; afterwards they go where they went before."""
        if self.is_current():
            yield
            return
        check(driver.cuCtxPushCurrent(self._context), f"switching to {self.name}")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent()

    def empty(self, shape: Sequence[int] | int, dtype: npt.DTypeLike) -> CudaArray:
        """A new array, contents unspecified."""
        return CudaArray(self, checked_shape(shape), dtype_name(dtype))

    def array(self, values: npt.ArrayLike) -> CudaArray:
        """A new array with the values of a numpy array."""
        found = np.require(np.asarray(values), requirements="C")
        result = self.empty(found.shape, found.dtype)
        result.fill_from(found)
        return result

    def free(self, pointer: int) -> None:
        """Free memory; called when an array's last reference goes, perhaps while Python shuts down, so it raises nothing."""
        try:
            with self.current():
                driver.cuMemFree(pointer)
        except Exception:
            return

    def stream(self) -> CudaStream:
        """A new stream."""
        return CudaStream(self)

    def event(self) -> CudaEvent:
        """A new event."""
        return CudaEvent(self)

    def synchronize(self) -> None:
        """Wait until all work on the device is done.

        Raises:
            DeviceError: a kernel failed since the last time; or a graph is being captured.
        """
        if self.captures:
            raise DeviceError(f"{self.name}: waiting for the GPU, or reading arrays, is not possible while a graph is being captured")
        with self.current():
            check(driver.cuCtxSynchronize(), f"waiting for {self.name}")

    @contextmanager
    def capture(self, stream: Any = None) -> Iterator[CudaGraph]:
        """Capture the launches on `stream` (default: a new one, `graph.stream`) instead of running them."""
        captured = self._capturable(stream)
        if captured.handle in self.captures:
            raise DeviceError("the stream is already being captured")
        with self.current(), plain_errors("preparing a graph capture"):
            graph = CudaGraph(self, captured)
        graph.begin()
        self.captures[captured.handle] = graph
        try:
            yield graph
        except BaseException:
            graph.abandon()
            raise
        else:
            try:
                graph.complete()
            except DeviceError:
                graph.abandon()
                raise
        finally:
            del self.captures[captured.handle]

    def _capturable(self, stream: Any) -> Any:
        if stream is None or isinstance(stream, CudaStream):
            self.stream_handle(stream)
            return stream or self.stream()
        handle = self.stream_handle(stream)
        if handle in (0, _LEGACY_STREAM, _PER_THREAD_STREAM):
            raise DeviceError("a default stream cannot be captured; pass a stream of device.stream(), or none")
        with plain_errors("using another library's stream"):
            return BorrowedStream(handle)

    def refuse(self, target: TargetRecord) -> str:
        """Why builds for `target` do not run here; "" when they do."""
        arch = target.nvrtc_arch
        if arch is None:
            return "it was built for the host"
        same_family = target.capability[0] == self.capability[0] and target.capability[1] <= self.capability[1]
        # Code with an `a` runs on exactly its architecture, all other code on later ones of its family too.
        if target.capability == self.capability or (same_family and not arch.endswith("a")):
            return ""
        return f"it was built for {arch}, and {self.card} is {self.target_names[0]}"

    def load(self, record: KernelRecord, image: bytes, manifest: Manifest) -> CudaProgram:
        """Load a cubin."""
        return CudaProgram(self, record, image, manifest)

    def view(self, value: Any, stream: int) -> View:
        """What an array argument is: an own array, or one of another library that lies on this device.

        What other libraries still have to do to their arrays, `stream` waits for.
        """
        if isinstance(value, CudaArray) and value.device is self:
            return View(value.pointer, value.shape, value.dtype, False, True, value)
        if isinstance(value, Array):
            if isinstance(value, CudaArray) and value.__dlpack_device__() == (CUDA, self.ordinal):
                return View(value.pointer, value.shape, value.dtype, False, True, value)
            raise LaunchError(
                f"the array lies on {value.device.name}, the kernel runs on {self.name}; copy it with device.array(array.numpy())"
            )
        if hasattr(value, "__dlpack_device__"):
            kind, number = value.__dlpack_device__()
            if (kind, number) != (CUDA, self.ordinal) and kind not in (CUDA_PINNED, CUDA_MANAGED):
                place = {CPU: "the CPU's memory", CUDA: f"cuda:{number}"}.get(kind, f"DLPack device {int(kind)}")
                raise LaunchError(f"a {type(value).__name__} in {place}, the kernel runs on {self.name}; copy it with device.array(…)")
            with self.current():
                return view_dlpack(value, self._reader(stream))[0]
        if hasattr(value, "__cuda_array_interface__"):
            view, producer = view_cuda_interface(value)
            with self.current():
                self._check_place(view)
                self._order(producer, stream)
            return view
        raise not_an_array(value, f"an array on {self.name} (DLPack, __cuda_array_interface__, or device.array)")

    def _reader(self, stream: int) -> int:
        """The stream that will read, as DLPack numbers it; −1 (do not wait) in a capture, which cannot wait for work outside of it."""
        status = driver.cuStreamIsCapturing(stream)
        if status[0] == 0 and int(status[1]) != 0:
            return -1
        return stream or _LEGACY_STREAM

    def _check_place(self, view: View) -> None:
        if not view.pointer:
            return
        ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        status, number = driver.cuPointerGetAttribute(ordinal, view.pointer)
        if status != 0:
            raise LaunchError(f"its __cuda_array_interface__ points to {view.pointer:#x}, which is no memory of a GPU")
        if int(number) != self.ordinal:
            raise LaunchError(f"the array lies on cuda:{int(number)}, the kernel runs on {self.name}")

    def _order(self, producer: int | None, stream: int) -> None:
        """Let `stream` wait for what `producer` has been given so far."""
        if producer is None or (producer or _LEGACY_STREAM) == (stream or _LEGACY_STREAM) or self._reader(stream) == -1:
            return
        doing = "waiting for the stream of an array"
        event = check(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)), doing)
        try:
            check(driver.cuEventRecord(event, producer), doing)
            check(driver.cuStreamWaitEvent(stream, event, 0), doing)
        finally:
            driver.cuEventDestroy(event)

    def stream_handle(self, stream: Any) -> int:
        """The handle of an own stream, an object with `__cuda_stream__`, an integer, or None (the legacy default stream)."""
        if stream is None:
            return 0
        if isinstance(stream, CudaStream):
            if stream.device.ordinal != self.ordinal:
                raise LaunchError(f"stream: it belongs to {stream.device.name}, the kernel runs on {self.name}")
            return stream.handle
        if isinstance(stream, int) and not isinstance(stream, bool):
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            return int(protocol()[1])
        # torch's streams before they spoke the protocol, and CuPy's.
        for attribute in ("cuda_stream", "ptr"):
            if isinstance(handle := getattr(stream, attribute, None), int):
                return handle
        raise LaunchError(f"stream: got a {type(stream).__name__}; a stream is one of device.stream(), has __cuda_stream__, or is a handle")

    def __repr__(self) -> str:
        return f"CudaDevice({self.ordinal}): {self.card}, sm_{self.capability[0]}{self.capability[1]}"
