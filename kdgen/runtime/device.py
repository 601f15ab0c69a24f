"""What kernels run on, as the rest of the runtime sees it: small protocols that `CudaDevice` and `HostDevice` fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from kdgen.contract import Launch
from kdgen.runtime.array import Array
from kdgen.runtime.manifest import KernelRecord, Manifest, TargetRecord
from kdgen.runtime.views import View


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the stream's work before this event is done."""

    @property
    def done(self) -> bool:
        """True when the stream's work before this event is done; does not wait."""

    def elapsed_ms(self, earlier: Any) -> float:
        """Milliseconds from `earlier` to this event; both must have been recorded and be done."""


class Stream(Protocol):
    """A queue of work that a device does in order."""

    @property
    def handle(self) -> int:
        """The address of the `CUstream`, or a small number on the host; 0 is the default stream."""

    def synchronize(self) -> None:
        """Wait until all work given to the stream is done."""

    def record(self, event: Any = None) -> Event:
        """Mark this point of the stream with `event`, or with a new one."""

    def wait(self, event: Any) -> None:
        """Let later work of this stream wait for an event of another."""


class Graph(Protocol):
    """Launches recorded once and repeated as one; it keeps every array and kernel that it uses alive."""

    def launch(self, stream: Any = None) -> None:
        """Repeat all recorded launches on `stream`."""


class Prepared(Protocol):
    """One grid launch with all values in place."""

    def launch(self, stream: int, **options: Any) -> None:
        """Give it to the stream with this handle. `options` are the device's own (host: order, copies, seed, threads)."""


class Program(Protocol):
    """A loaded binary."""

    def prepare(self, launch: Launch, grid: tuple[int, int, int], values: Sequence[int], arrays: Sequence[tuple[str, Any]]) -> Prepared:
        """Make one launch ready.

        Args:
            launch: of the contract.
            grid: its extents as numbers, none of them 0.
            values: each argument's 64 bits: a pointer, or a scalar in the low bytes.
            arrays: (argument name, array) of the array arguments, kept alive with the launch.
        """


@runtime_checkable
class Device(Protocol):
    """Where kernels run."""

    @property
    def name(self) -> str:
        """For people: `host`, `cuda:0`."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """Targets whose builds run here, the best first."""

    def empty(self, shape: Sequence[int] | int, dtype: npt.DTypeLike) -> Array:
        """A new array, contents unspecified (on the host: every byte 0xFF).

        Args:
            shape: extents, row-major.
            dtype: a kdgen name (`bf16`) or anything numpy takes as a dtype.
        """

    def array(self, values: npt.ArrayLike) -> Array:
        """A new array with the values of a numpy array."""

    def stream(self) -> Stream:
        """A new stream."""

    def event(self) -> Event:
        """A new event, to be passed to `Stream.record`."""

    def synchronize(self) -> None:
        """Wait until all work on the device is done."""

    def capture(self, stream: Any = None) -> AbstractContextManager[Graph]:
        """Record launches instead of running them: `with device.capture(stream) as graph: kernel(…, stream=stream)`."""

    def refuse(self, target: TargetRecord) -> str:
        """Why builds for a manifest's target do not run here; "" when they do."""

    def load(self, record: KernelRecord, image: bytes, manifest: Manifest) -> Program:
        """Load a binary.

        Args:
            record: the kernel's part of the manifest.
            image: bytes of the cubin or shared library.
            manifest: where it comes from, for messages and the target.

        Raises:
            ArtifactError: the device or its driver does not accept the image.
        """

    def view(self, value: Any, stream: int) -> View:
        """What an array argument is, seen from this device; `stream` is the handle of the stream that will read it.

        Raises:
            LaunchError: it is no array, or lies on another device.
        """

    def stream_handle(self, stream: Any) -> int:
        """The handle of an own stream, an object with `__cuda_stream__`, an integer, or None (the default stream)."""
