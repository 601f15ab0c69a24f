"""Streams, events and graphs of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kdgen.errors import DeviceError
from kdgen.runtime.cuda_driver import check, core, driver, plain_errors

if TYPE_CHECKING:
    from kdgen.runtime.cuda import CudaDevice


class CudaEvent:
    """A point in a stream's work, with its time.

    Attributes:
        core: the `cuda.core.Event`.
    """

    def __init__(self, device: CudaDevice):
        self.device = device
        with device.current(), plain_errors("creating an event"):
            self.core = device.core.create_event(core.EventOptions(timing_enabled=True))

    def synchronize(self) -> None:
        """Wait until the stream's work before this event is done."""
        with plain_errors(f"waiting for an event on {self.device.name}"):
            self.core.sync()

    @property
    def done(self) -> bool:
        """True when the stream's work before this event is done; does not wait."""
        with plain_errors(f"asking for an event on {self.device.name}"):
            return bool(self.core.is_done)

    def elapsed_ms(self, earlier: CudaEvent) -> float:
        """Milliseconds of GPU time from `earlier` to this event; waits for this one."""
        self.synchronize()
        with plain_errors("measuring the time between two events (have both been recorded?)"):
            return float(self.core - earlier.core)


class CudaStream:
    """A queue of work. It does not wait for the legacy default stream, nor that for it.

    Attributes:
        core: the `cuda.core.Stream`.
        handle: the address of the `CUstream`.
    """

    def __init__(self, device: CudaDevice):
        self.device = device
        with device.current(), plain_errors("creating a stream"):
            self.core = device.core.create_stream()
        self.handle = int(self.core.handle)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def synchronize(self) -> None:
        """Wait until all work given to the stream is done."""
        with plain_errors(f"waiting for a stream on {self.device.name}"):
            self.core.sync()

    def record(self, event: CudaEvent | None = None) -> CudaEvent:
        """Mark this point of the stream with `event`, or with a new one."""
        event = event or CudaEvent(self.device)
        with self.device.current(), plain_errors("recording an event"):
            self.core.record(event.core)
        return event

    def wait(self, event: CudaEvent) -> None:
        """Let later work of this stream wait for an event of another."""
        with self.device.current(), plain_errors("waiting for another stream"):
            self.core.wait(event.core)

    def __repr__(self) -> str:
        return f"<stream {self.handle:#x} on {self.device.name}>"


class CudaGraph:
    """Launches captured once and launched as one. It keeps the arrays and kernels that it uses alive; CUDA's own capture does not.

    Attributes:
        stream: the stream that is captured.
        builder: the `cuda.core` graph builder, for what kdgen does not wrap (conditional nodes, child graphs).
        executable: the `cuda.core` graph; None until the capture is complete.
    """

    def __init__(self, device: CudaDevice, stream: Any):
        self.device = device
        self.stream = stream
        self.builder: Any = stream.core.create_graph_builder()
        self.executable: Any = None
        self._handle: Any = None
        self._kept: list[Any] = []
        self._bodies: list[Any] = []

    def keep(self, thing: Any) -> None:
        """Let `thing` live as long as the graph."""
        self._kept.append(thing)

    def launch(self, stream: Any = None) -> None:
        """Launch everything that was captured; returns at once."""
        if self.executable is None:
            raise DeviceError("the graph is not complete: launch it after the `with device.capture()` block, which must not have failed")
        handle = self.device.stream_handle(stream)
        with self.device.current():
            check(driver.cuGraphLaunch(self._handle, handle), f"launching a graph on {self.device.name}")

    @contextlib.contextmanager
    def loop(self) -> Iterator[tuple[int, int]]:
        """A loop within the capture: what is launched on its stream runs again and again while its condition holds, which is so at first.

        Yields:
            The handle of the loop's stream, and that of its condition, for the kernel `loop_condition`.
        """
        with self.device.current(), plain_errors("starting a loop in a graph capture"):
            condition = self.builder.create_condition(default_value=1)
            body = self.builder.while_loop(condition)
            body.begin_building("relaxed")
        handle = int(body.stream.handle)
        self.device.captures[handle] = self
        try:
            yield handle, int(condition.handle)
        finally:
            del self.device.captures[handle]
            with self.device.current(), plain_errors("ending a loop in a graph capture"):
                body.end_building()
        self._bodies.append((condition, body))

    def begin(self) -> None:
        """Start to capture."""
        with self.device.current(), plain_errors("starting a graph capture"):
            # Relaxed: arrays may be made meanwhile.
            self.builder.begin_building("relaxed")

    def complete(self) -> None:
        """End the capture and make the graph launchable."""
        with self.device.current(), plain_errors("ending a graph capture"):
            self.builder.end_building()
            self.executable = self.builder.complete()
            self._handle = self.executable.handle

    def abandon(self) -> None:
        """End a capture that failed. Raises nothing: the error that counts is the one on its way."""
        with self.device.current():
            try:
                self.builder.end_building()
            except Exception:  # the builder refuses to end what is invalid already, and the stream would go on capturing
                driver.cuStreamEndCapture(self.stream.handle)
            with contextlib.suppress(Exception):
                self.builder.close()

    def __len__(self) -> int:
        """Number of launches made while the graph was captured."""
        return len(self._kept)


class BorrowedStream:
    """A stream of another library, to capture on: it must outlive its use here."""

    def __init__(self, handle: int):
        self.handle = handle
        self.core = core.Stream.from_handle(handle)
