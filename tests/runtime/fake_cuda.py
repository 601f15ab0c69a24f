"""A CUDA driver that runs nowhere: its memory is the CPU's, its kernels are Python functions.

It stands in for `cuda.core` and `cuda.bindings.driver` below `CudaDevice`, so that everything above the driver is tested without a
GPU. Structures, enumerations and error texts are the real ones where they need no driver.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
CAPABILITY = (9, 0)
SHARED_LIMIT = 232_448


class Kernel:
    """A kernel: its parameter sizes, and what it does to the values of its parameters."""

    def __init__(self, handle: int, sizes: list[int], run: Callable[..., None]):
        self.handle, self.run, self.shared_allowed = handle, run, 48 * 1024
        self.sizes = sizes

    def call(self, grid: tuple[int, ...], parameters: int) -> None:
        """Read the parameters as CUDA does, through an array of pointers to them."""
        pointers = (ctypes.c_uint64 * len(self.sizes)).from_address(parameters)
        self.run(grid, *(ctypes.string_at(pointer, size) for pointer, size in zip(pointers, self.sizes, strict=True)))


def value(data: bytes, kind: str) -> Any:
    """A parameter's value."""
    return struct.unpack(f"<{kind}", data)[0]


class Stream:
    def __init__(self, world: World, handle: int):
        self.world, self.handle = world, handle

    def sync(self) -> None:
        self.world.log.append(("sync", self.handle))

    def record(self, event: Any) -> Any:
        self.world.clock += 1
        event.time = self.world.clock
        return event

    def wait(self, event: Any) -> None:
        self.world.log.append(("wait", self.handle))

    def create_graph_builder(self) -> Builder:
        return Builder(self)


class Event:
    time: int | None = None

    def sync(self) -> None:
        pass

    def __sub__(self, other: Event) -> float:
        if self.time is None or other.time is None:
            raise RuntimeError("event was never recorded")
        return float(self.time - other.time)


class Builder:
    def __init__(self, stream: Stream):
        self.stream, self.launches = stream, list[Any]()
        self.handle = id(self)

    def begin_building(self, mode: str) -> None:
        self.stream.world.capturing[self.stream.handle] = self

    def end_building(self) -> None:
        del self.stream.world.capturing[self.stream.handle]

    def complete(self) -> Builder:
        self.stream.world.graphs[self.handle] = self
        return self

    def close(self) -> None:
        pass


class World:
    """The fake's state, and its `core` and `driver` modules.

    Attributes:
        kernels: entry to kernel.
        counts_parameters: the driver is recent enough to say how many parameters a kernel has.
        log: driver calls that tests look at.
        memory: address to buffer.
        current: the current context.
    """

    def __init__(self, devices: int = 2):
        self.devices = devices
        self.kernels: dict[str, Kernel] = {}
        self.counts_parameters = True
        self.log: list[tuple[Any, ...]] = []
        self.memory: dict[int, Any] = {}
        self.capturing: dict[int, Builder] = {}
        self.graphs: dict[int, Builder] = {}
        self.current, self.stack, self.clock, self.streams = 0, list[int](), 0, 0x100
        self.fail: dict[str, Any] = {}
        self.core = SimpleNamespace(
            Device=self._device, ObjectCode=SimpleNamespace(from_cubin=self._code), EventOptions=lambda timing_enabled: None,
            Stream=SimpleNamespace(from_handle=lambda handle: Stream(self, handle)),
        )  # fmt: skip
        self.driver = Driver(self)

    def _device(self, ordinal: int) -> Any:
        def set_current() -> None:
            self.current = 0x1000 + ordinal

        def create_stream() -> Stream:
            self.streams += 16
            return Stream(self, self.streams)

        return SimpleNamespace(
            set_current=set_current, name="Fake GPU", compute_capability=CAPABILITY, create_stream=create_stream,
            create_event=lambda options: Event(),
        )  # fmt: skip

    def _code(self, image: bytes, name: str) -> Any:
        def get_kernel(entry: str) -> Kernel:
            if image == b"refused":
                raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
            return self.kernels[entry]

        return SimpleNamespace(get_kernel=get_kernel)

    def launch(self, kernel: Kernel, grid: tuple[int, ...], shared: int, stream: int, parameters: int) -> tuple[Any]:
        """Run a kernel, or record it."""
        if "launch" in self.fail:
            return (self.fail["launch"],)
        if shared > kernel.shared_allowed:
            return (INVALID,)
        self.log.append(("launch", stream))
        builder = self.capturing.get(stream)
        if builder is not None:
            builder.launches.append((kernel, grid, parameters))
        else:
            kernel.call(grid, parameters)
        return (OK,)


class Driver:
    """The driver's functions; everything else is that of the real bindings."""

    def __init__(self, world: World):
        self.world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)

    @staticmethod
    def CUdevice(ordinal: int) -> int:
        return ordinal

    @staticmethod
    def CUfunction(handle: int) -> int:
        return handle

    @staticmethod
    def cuGetErrorName(status: Any) -> tuple[Any, bytes]:
        return OK, status.name.encode()

    @staticmethod
    def cuGetErrorString(status: Any) -> tuple[Any, bytes]:
        return OK, b"in words"

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return OK, 13000

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[Any, int]:
        return OK, SHARED_LIMIT

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return OK, self.world.current

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.world.current = context
        return (OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:
        self.world.stack.append(self.world.current)
        self.world.current = context
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        self.world.current = self.world.stack.pop()
        return OK, 0

    def cuCtxSynchronize(self) -> tuple[Any]:
        self.world.log.append(("synchronize",))
        return (self.world.fail.get("synchronize", OK),)

    def cuMemAlloc(self, size: int) -> tuple[Any, int]:
        if size > 1 << 30:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        memory = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(memory) // 256) * 256
        self.world.memory[address] = memory
        return OK, address

    def cuMemFree(self, address: int) -> tuple[Any]:
        del self.world.memory[address]
        return (OK,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any]:
        ctypes.memmove(to, source, size)
        return (OK,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        self.world.log.append(("sync", stream))
        return (OK,)

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, int]:
        return OK, int(stream in self.world.capturing)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, int]:
        self.world.capturing.pop(stream, None)
        return OK, 0

    def cuEventCreate(self, flags: int) -> tuple[Any, int]:
        return OK, 0x77

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any]:
        self.world.log.append(("record", stream))
        return (OK,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any]:
        self.world.log.append(("wait", stream))
        return (OK,)

    def cuEventDestroy(self, event: int) -> tuple[Any]:
        return (OK,)

    def cuPointerGetAttribute(self, attribute: Any, pointer: int) -> tuple[Any, int]:
        inside = any(address <= pointer < address + len(memory) for address, memory in self.world.memory.items())
        return (OK, 0) if inside else (INVALID, 0)

    @staticmethod
    def CUkernel(handle: int) -> int:
        return handle

    def cuKernelGetParamCount(self, handle: int) -> tuple[Any, int]:
        if not self.world.counts_parameters:
            raise RuntimeError('Function "cuKernelGetParamCount" not found')
        return OK, len(self._kernel(handle).sizes)

    def cuKernelGetParamInfo(self, handle: int, index: int) -> tuple[Any, int, int]:
        sizes = self._kernel(handle).sizes
        return (OK, 0, sizes[index]) if index < len(sizes) else (INVALID, 0, 0)

    def cuKernelSetAttribute(self, attribute: Any, size: int, handle: int, device: int) -> tuple[Any]:
        next(kernel for kernel in self.world.kernels.values() if kernel.handle == handle).shared_allowed = size
        return (OK,)

    def cuLaunchKernel(self, function: int, gx: int, gy: int, gz: int, *rest: int) -> tuple[Any]:
        _, _, _, shared, stream, parameters, _ = rest
        return self.world.launch(self._kernel(function), (gx, gy, gz), shared, stream, parameters)

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> tuple[Any]:
        names = sorted(str(attribute.id.name).rpartition("ATTRIBUTE_")[2] for attribute in config.attrs)
        self.world.log.append(("attributes", *names))
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        return self.world.launch(self._kernel(function), grid, config.sharedMemBytes, int(config.hStream), parameters)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any]:
        for kernel, grid, parameters in self.world.graphs[graph].launches:
            kernel.call(grid, parameters)
        return (OK,)

    def _kernel(self, function: int) -> Kernel:
        return next(kernel for kernel in self.world.kernels.values() if kernel.handle == function)


MODULES = ("cuda_driver", "cuda_memory", "cuda_stream", "cuda_program", "cuda")


@contextmanager
def installed(world: World, patch: Any) -> Any:
    """Let `CudaDevice` talk to `world` (through pytest's `monkeypatch`)."""
    import importlib

    for name in MODULES:
        module = importlib.import_module(f"kdgen.runtime.{name}")
        for attribute in ("core", "driver"):
            if hasattr(module, attribute):
                patch.setattr(module, attribute, getattr(world, attribute))
        if hasattr(module, "gpu_count"):
            patch.setattr(module, "gpu_count", lambda: world.devices)
    for name in ("kit", "open"):
        patch.setattr(importlib.import_module(f"kdgen.runtime.{name}"), "gpu_count", lambda: world.devices)
    yield world
