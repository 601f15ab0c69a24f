"""How a launch is timed: many in one captured graph, replayed, with a median over replays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kdgen.runtime.device import Device

#: Seconds of rest before a timing.
PAUSE = 0.1


@dataclass(frozen=True)
class Timing:
    """Time of one launch, in microseconds.

    Attributes:
        median, low, high: over replays; low and high are the 10th and 90th percentile.
        launches: in the graph.
        replays: timed.
        sustained: median after some seconds of load, when the GPU is warm and its clocks have settled; None when not asked for.
    """

    median: float
    low: float
    high: float
    launches: int
    replays: int
    sustained: float | None = None


class Launchable(Protocol):
    """A bound call, or several that belong together."""

    def launch(self, stream: Any) -> None:
        """Launch on `stream`."""


def time_calls(device: Device, calls: Sequence[Launchable], launches: int, replays: int, sustained: float = 0.0) -> Timing:
    """Time `launches` launches that take turns through `calls`, as one graph that is replayed.

    A pause and two replays for warming up come first, so that the figure is a cool GPU's, whatever ran before.

    Args:
        device: where the calls run.
        calls: they take turns.
        launches: in the graph.
        replays: timed.
        sustained: seconds of load after that, of whose second half the median is kept too; 0: none.
    """
    stream: Any = device.stream()
    with device.capture(stream) as graph:
        for i in range(launches):
            calls[i % len(calls)].launch(stream)

    def replay() -> float:
        before = stream.record()
        graph.launch(stream)
        after = stream.record()
        after.synchronize()
        return float(after.elapsed_ms(before)) * 1e3 / launches

    time.sleep(PAUSE)
    times = [replay() for _ in range(replays + 2)][2:]
    load: list[float] = []
    until = time.perf_counter() + sustained
    while time.perf_counter() < until:
        load.append(replay())
    return summary(np.array(times), launches, float(np.median(load[len(load) // 2 :])) if load else None)


def summary(times: npt.NDArray[np.float64], launches: int, sustained: float | None = None) -> Timing:
    """Of the times of one launch, in microseconds, one per replay."""
    low, high = np.percentile(times, [10, 90])
    return Timing(float(np.median(times)), float(low), float(high), launches, len(times), sustained)
