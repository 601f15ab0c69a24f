"""The host device: runs kernels of the `host` target on the CPU, under a schedule that the caller chooses.

Streams are in order and synchronous: a launch has finished when it returns. Faults that the host target finds in a kernel (a
deadlock, a divergent collective, a write past an array) are `KernelFault`s.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.contract import Launch
from kdgen.dtypes import dtype_name
from kdgen.errors import ArtifactError, DeviceError, KernelFault, LaunchError
from kdgen.runtime.array import Array, ParameterBlock, checked_shape
from kdgen.runtime.dlpack import CPU, CUDA_MANAGED, CUDA_PINNED
from kdgen.runtime.host_library import LaunchConfig, Library, map_library, refuse_isa, refuse_sanitizer, sanitizer_environment
from kdgen.runtime.host_memory import HostArray
from kdgen.runtime.manifest import KernelRecord, Manifest, TargetRecord
from kdgen.runtime.views import View, not_an_array, view_dlpack, view_numpy

__all__ = ["HostDevice", "HostEvent", "HostGraph", "HostStream", "sanitizer_environment"]

ORDERS = {"in_order": 0, "reverse": 1, "random": 2}
COPIES = {"earliest": 0, "latest": 1, "random": 2}
_MESSAGE_BYTES = 4096
_HANDLES = itertools.count(1)


class HostEvent:
    """A moment of the CPU's clock."""

    def __init__(self) -> None:
        self._time: float | None = None

    def record(self, stream: Any = None) -> None:
        """Mark now."""
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for: launches have finished when they return."""

    @property
    def done(self) -> bool:
        """True: launches have finished when they return."""
        return True

    def elapsed_ms(self, earlier: HostEvent) -> float:
        """Milliseconds from `earlier` to this event."""
        if self._time is None or earlier._time is None:
            raise DeviceError("elapsed_ms of an event that was never recorded; record both with stream.record(event)")
        return (self._time - earlier._time) * 1e3


class HostStream:
    """An in-order, synchronous queue."""

    def __init__(self) -> None:
        self.handle = next(_HANDLES)

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record(self, event: HostEvent | None = None) -> HostEvent:
        """Mark this moment with `event`, or with a new one."""
        event = event or HostEvent()
        event.record(self)
        return event

    def wait(self, event: HostEvent) -> None:
        """Nothing to wait for."""


class HostGraph:
    """Launches recorded to be repeated.

    Attributes:
        stream: the stream whose launches are recorded.
    """

    def __init__(self, device: HostDevice, stream: HostStream):
        self.device = device
        self.stream = stream
        self._launches: list[tuple[HostLaunch, dict[str, Any]]] = []
        self._done = False

    def launch(self, stream: Any = None) -> None:
        """Repeat all recorded launches, in order."""
        if not self._done:
            raise DeviceError("the graph is not complete: launch it after the `with device.capture()` block, which must not have failed")
        handle = self.device.stream_handle(stream)
        for prepared, options in self._launches:
            prepared.launch(handle, **options)

    def __len__(self) -> int:
        """Number of recorded launches."""
        return len(self._launches)


class HostDevice:
    """The CPU.

    Args:
        order: which ready thread of a block runs next: `in_order`, `reverse` or `random`.
        copies: when asynchronous copies land within what is legal: `earliest`, `latest` or `random`.
        seed: of the random choices.
        threads: OS threads that blocks spread over; 0 for one per core.
        sanitize: prefer builds of the target `host_asan`.
    """

    def __init__(self, *, order: str = "in_order", copies: str = "earliest", seed: int = 0, threads: int = 0, sanitize: bool = False):
        self.name = "host"
        self.target_names: tuple[str, ...] = ("host_asan",) if sanitize else ("host",)
        self._options = {"order": order, "copies": copies, "seed": seed, "threads": threads}
        self._graphs: dict[int, HostGraph] = {}
        self.config()

    def config(self, **changes: Any) -> LaunchConfig:
        """The device's options with `changes`, as the launch functions take them; LaunchError for a value that is not allowed."""
        if unknown := set(changes) - set(self._options):
            raise LaunchError(f"unknown launch option '{min(unknown)}'; the host device has {', '.join(self._options)}")
        chosen = {**self._options, **changes}
        for name, values in (("order", ORDERS), ("copies", COPIES)):
            if chosen[name] not in values:
                raise LaunchError(f"{name} = {chosen[name]!r}; allowed: {', '.join(values)}")
        if not 0 <= chosen["threads"] <= 4096:
            raise LaunchError(f"threads = {chosen['threads']}; allowed: 0 (one per core) to 4096")
        return LaunchConfig(
            order=ORDERS[chosen["order"]], copies=COPIES[chosen["copies"]], seed=chosen["seed"] & (1 << 64) - 1, threads=chosen["threads"]
        )

    def empty(self, shape: Sequence[int] | int, dtype: npt.DTypeLike) -> HostArray:
        """A new array; every byte is 0xFF, so what a kernel fails to write shows."""
        return HostArray(self, checked_shape(shape), dtype_name(dtype))

    def array(self, values: npt.ArrayLike) -> HostArray:
        """A new array with the values of a numpy array."""
        found = np.asarray(values)
        result = self.empty(found.shape, found.dtype)
        result.numpy()[...] = found
        return result

    def stream(self) -> HostStream:
        """A new stream."""
        return HostStream()

    def event(self) -> HostEvent:
        """A new event."""
        return HostEvent()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def capture(self, stream: HostStream | None = None) -> Iterator[HostGraph]:
        """Record the launches on `stream` (default: a new one, `graph.stream`) instead of running them."""
        graph = HostGraph(self, stream or self.stream())
        if graph.stream.handle in self._graphs:
            raise DeviceError("the stream is already being captured")
        self._graphs[graph.stream.handle] = graph
        try:
            yield graph
            graph._done = True
        finally:
            del self._graphs[graph.stream.handle]

    def recording(self, stream: int) -> HostGraph | None:
        """The graph that records this stream's launches, if one does."""
        return self._graphs.get(stream) if self._graphs else None

    def refuse(self, target: TargetRecord) -> str:
        """Why builds for `target` do not run here; "" when they do."""
        if not target.is_host:
            return f"it was built for {target.name}, a GPU"
        return refuse_isa(target.isa) or refuse_sanitizer(target)

    def load(self, record: KernelRecord, image: bytes, manifest: Manifest) -> HostProgram:
        """Map a kernel's shared library."""
        library = map_library(image, record.name)
        functions: dict[str, Any] = {}
        for entry in record.contract.entries:
            try:
                functions[entry] = library.entry(entry)
            except AttributeError as error:
                raise ArtifactError(f"{record.binary.path}: it has no entry '{entry}'; rebuild with: {manifest.rebuild}") from error
        return HostProgram(self, record.name, library, functions, sanitize=manifest.target.sanitize)

    def view(self, value: Any, stream: int) -> View:
        """What an array argument is: an own array, a numpy array, or any other array in the CPU's memory."""
        if isinstance(value, HostArray):
            return View(value.pointer, value.shape, value.dtype, False, True, value)
        if isinstance(value, np.ndarray):
            return view_numpy(value)
        if isinstance(value, Array):
            raise LaunchError(f"the array lies on {value.device.name}, the kernel runs on host; copy it with device.array(array.numpy())")
        if hasattr(value, "__dlpack_device__"):
            kind, number = value.__dlpack_device__()
            if kind not in (CPU, CUDA_PINNED, CUDA_MANAGED):
                raise LaunchError(
                    f"a {type(value).__name__} on {'cuda' if kind == 2 else f'DLPack device {kind}'}:{number}, the kernel runs on host"
                )
            return view_dlpack(value, None)[0]
        if hasattr(value, "__array_interface__") and not isinstance(value, np.generic):
            return view_numpy(np.asarray(value))
        raise not_an_array(value, "an array in the CPU's memory (numpy, DLPack, __array_interface__, or device.array)")

    def stream_handle(self, stream: Any) -> int:
        """The handle of one of this device's streams; None is the default stream."""
        if stream is None:
            return 0
        if isinstance(stream, HostStream):
            return stream.handle
        raise LaunchError(f"stream: got a {type(stream).__name__}; kernels on the host take a stream of device.stream(), or None")

    def __repr__(self) -> str:
        return f"HostDevice({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"


class HostProgram:
    """A kernel's library, ready to launch."""

    def __init__(self, device: HostDevice, kernel: str, library: Library, functions: dict[str, Any], *, sanitize: bool):
        self.device = device
        self.kernel = kernel
        self.library = library
        self.functions = functions
        self.sanitize = sanitize

    def prepare(self, launch: Launch, grid: tuple[int, int, int], values: Sequence[int], arrays: Sequence[tuple[str, Any]]) -> HostLaunch:
        """Make one launch ready."""
        return HostLaunch(self, launch, grid, values, arrays)


class HostLaunch:
    """One grid launch with all values in place."""

    def __init__(
        self, program: HostProgram, launch: Launch, grid: tuple[int, int, int], values: Sequence[int], arrays: Sequence[tuple[str, Any]]
    ):
        self._program = program
        self._launch = launch
        self._grid = grid
        self._function = program.functions[launch.entry]
        self._parameters = ParameterBlock(values)
        self._arrays = arrays
        self._guarded = [(name, array) for name, array in arrays if isinstance(array, HostArray)]

    def launch(self, stream: int, **options: Any) -> None:
        """Run it (or record it, while the stream is captured).

        Raises:
            KernelFault: the host target found a fault in the kernel.
        """
        program = self._program
        config = program.device.config(**options)
        graph = program.device.recording(stream)
        if graph is not None:
            graph._launches.append((self, options))
            return
        config.grid = self._grid
        config.block, config.shared_bytes = self._launch.block, self._launch.shared_bytes
        config.cooperative = self._launch.cooperative
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._guard(on=True)
        try:
            failed = self._function(self._parameters.address, ctypes.addressof(config), ctypes.addressof(message), _MESSAGE_BYTES)
        finally:
            self._guard(on=False)
        overrun = self._overrun()
        if failed:
            raise KernelFault(
                f"kernel '{program.kernel}': {message.value.decode('utf-8', 'replace')}{f'; also, it {overrun}' if overrun else ''}"
            )
        if overrun:
            raise KernelFault(f"kernel '{program.kernel}': it {overrun}")

    def _guard(self, *, on: bool) -> None:
        if self._program.sanitize:
            for _, array in self._guarded:
                array.guard(self._program.library.poison, on=on)

    def _overrun(self) -> str:
        """What was written outside an argument, or ""; the zones are whole again afterwards."""
        found = ""
        for name, array in self._guarded:
            offset = array.overrun()
            if offset is not None:
                array.restore_zones()
                side = "past the end of" if offset >= 0 else "before the start of"
                found = (
                    found
                    or f"wrote {side} argument '{name}': byte offset {offset} of {array.dtype} {list(array.shape)}, {array.nbytes} bytes"
                )
        return found
