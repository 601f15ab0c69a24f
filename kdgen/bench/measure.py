"""How a launch is timed: many in one captured graph, replayed, with a median over replays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.runtime.call import BoundCall
from kdgen.runtime.device import Device


@dataclass(frozen=True)
class Timing:
    """Time of one launch, in microseconds.

    Attributes:
        median, low, high: over replays; low and high are the 10th and 90th percentile.
        launches: in the graph.
        replays: timed.
    """

    median: float
    low: float
    high: float
    launches: int
    replays: int


def time_calls(device: Device, calls: Sequence[BoundCall], launches: int, replays: int) -> Timing:
    """Time `launches` launches that take turns through `calls`, as one graph replayed `replays` times after two for warming up."""
    stream: Any = device.stream()
    with device.capture(stream) as graph:
        for i in range(launches):
            calls[i % len(calls)].launch(stream)
    times = []
    for _ in range(replays + 2):
        before = stream.record()
        graph.launch(stream)
        after = stream.record()
        after.synchronize()
        times.append(after.elapsed_ms(before) * 1e3 / launches)
    return summary(np.array(times[2:]), launches)


def summary(times: npt.NDArray[np.float64], launches: int) -> Timing:
    """Of the times of one launch, in microseconds, one per replay."""
    low, high = np.percentile(times, [10, 90])
    return Timing(float(np.median(times)), float(low), float(high), launches, len(times))
