"""Public kernels that are timed beside ours when their wheels are installed, after their results have been checked.

A peer is told the workload of a family and does what it can of it: no public attention kernel takes a tree, so they attend from a causal
chain of as many rows over the same cache.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kdgen.bench.measure import Timing, summary
from kdgen.errors import KdgenError
from kdgen.kernels.base import Workload

#: Largest error of a peer's result, relative to the largest value, with which it is still timed: bf16 results.
CHECK = 2e-2


class PeerCall(Protocol):
    """A peer's launch on one workload."""

    def launch(self) -> None:
        """Launch on torch's current stream."""

    def error(self) -> float:
        """Error of the last launch's result against float64, relative to the largest value."""


@dataclass(frozen=True)
class Peer:
    """A public kernel.

    Attributes:
        name: as its project calls it.
        family: of the kernel it is compared with.
        module: what must be importable; torch too.
        prepare: parameters and workload to a launch.
    """

    name: str
    family: str
    module: str
    prepare: Callable[[Any, Workload], PeerCall]

    @property
    def installed(self) -> bool:
        """True when the wheels are there."""
        return all(importlib.util.find_spec(name) is not None for name in ("torch", self.module))


def peers() -> tuple[Peer, ...]:
    """Every known peer."""
    from kdgen.bench import attention_peers, gemm_peers

    return (*attention_peers.PEERS, *gemm_peers.PEERS)


def peers_of(family: str) -> Iterator[Peer]:
    """Those that a kernel of `family` is compared with."""
    return (peer for peer in peers() if peer.family == family)


def time_peer(calls: Sequence[PeerCall], launches: int, replays: int) -> Timing:
    """As `kdgen.bench.measure.time_calls`, with torch's graphs.

    Raises:
        KdgenError: the result is wrong, so that a time would mean nothing.
    """
    import torch

    calls[0].launch()
    torch.cuda.synchronize()
    error = calls[0].error()
    if not error <= CHECK:
        raise KdgenError(f"its result is wrong: error {error:.1e} of the largest value, allowed {CHECK:.0e}")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call.launch()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                calls[i % len(calls)].launch()
        times = []
        for _ in range(replays + 2):
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record(stream)
            graph.replay()
            after.record(stream)
            after.synchronize()
            times.append(before.elapsed_time(after) * 1e3 / launches)
    return summary(np.array(times[2:]), launches)
