"""Timing of every kernel of a spec on its family's workloads."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kdgen import scratch
from kdgen.bench.ceilings import Ceilings, ceiling_kernels, measure_ceilings
from kdgen.bench.measure import Timing, time_calls
from kdgen.bench.moe_layer import MoeLayer
from kdgen.bench.peers import Peer, peers_of, time_peer
from kdgen.errors import UsageError
from kdgen.kernels.base import Arrays, Workload
from kdgen.runtime import Kernel, load, open_device
from kdgen.runtime.call import BoundCall
from kdgen.runtime.device import Device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import Target, get_target
from kdgen.verify.artifacts import target_of

#: Copies of a cold workload's inputs together exceed this many bytes: four times the largest L2 cache of a target.
COLD_BYTES = 512 << 20


@dataclass(frozen=True)
class Result:
    """One timed workload.

    Attributes:
        kernel, workload: names; a peer's name stands for the kernel's.
        timing: of one call of the kernel (all its launches).
        bandwidth, rate: bytes/s and operations/s that the workload's counts make of it; 0 where it has none.
        read_share, mma_share: of the measured ceilings.
    """

    kernel: str
    workload: str
    timing: Timing
    bandwidth: float
    rate: float
    read_share: float
    mma_share: float

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


class Bench:
    """Builds a spec for the GPU at hand and times it; use as a context manager.

    Args:
        spec: its kernels are timed.
        device: `cuda` or `cuda:N`.
        seed: of the workloads.

    Attributes:
        kit: the spec's kernels, and those that measure ceilings.
        ceilings: measured on entry.
        absent: peers whose wheels are not installed.
        refused: peers that could not be timed, to the reason.

    Raises:
        UsageError: the host target, which emulates arithmetic and not time.
    """

    def __init__(self, spec: Spec, device: str, seed: int = 0):
        if not device.startswith("cuda"):
            raise UsageError(f"kdgen bench times GPUs, not '{device}': the host target emulates arithmetic, not time; use --device cuda")
        self.spec, self.seed = spec, seed
        self.target: Target = get_target(target_of(device, sanitize=False).name)
        self.device: Device = open_device(device)
        self.ceilings: Ceilings
        self.absent: dict[str, None] = {}
        self.refused: dict[str, str] = {}
        self._directory = tempfile.TemporaryDirectory(prefix=scratch.prefix("bench"))
        self.kit: Mapping[str, Kernel] = {}

    def __enter__(self) -> Bench:
        from kdgen.build import build_spec

        spec = Spec.of(self.spec.name, *self.spec.kernels, *ceiling_kernels())
        out = Path(self._directory.name)
        build_spec(spec, [self.target], out)
        self.kit = load(out / spec.name / self.target.name, self.device)
        self.ceilings = measure_ceilings(self.kit, self.device, self.target.sms)
        return self

    def __exit__(self, *error: object) -> None:
        self._directory.cleanup()

    def results(self, launches: int = 200, replays: int = 21, only: str = "", sustained: float = 0.0) -> Iterator[Result]:
        """Time every workload whose name matches the regular expression `only`; yields results as they come.

        Args:
            launches, replays, sustained: as in `kdgen.bench.measure.time_calls`.
            only: matched against `KERNEL WORKLOAD`.
        """
        for spec in self.spec.kernels:
            for workload in spec.family.workloads(spec.params, np.random.default_rng(self.seed)):
                if not re.search(only, f"{spec.name} {workload.name}"):
                    continue
                calls = self._calls(self.kit[spec.name], workload)
                yield self._result(spec.name, workload, time_calls(self.device, calls, max(launches, len(calls)), replays, sustained))
                for peer in peers_of(spec.family.name):
                    timing = self._time_peer(peer, spec, workload, launches, replays)
                    if timing:
                        yield self._result(peer.name, workload, timing)

        yield from self._layers(launches, replays, only, sustained)

    def _layers(self, launches: int, replays: int, only: str, sustained: float) -> Iterator[Result]:
        """Chains of the spec's kernels: what a layer's kernels take when one follows the other."""
        layer = MoeLayer.of(self.spec)
        if layer is None or not any(re.search(only, f"{name} {size}") for name, size in layer.names()):
            return
        for chain in layer.chains(self.kit, self.device, np.random.default_rng(self.seed)):
            if re.search(only, f"{chain.name} {chain.workload}"):
                workload = Workload(chain.workload, {}, moved_bytes=chain.moved_bytes, flops=chain.flops)
                timing = time_calls(self.device, chain.turns, max(launches, len(chain.turns)), replays, sustained)
                yield self._result(chain.name, workload, timing)

    def _result(self, name: str, workload: Workload, timing: Timing) -> Result:
        seconds = timing.median * 1e-6
        bandwidth, rate = workload.moved_bytes / seconds, workload.flops / seconds
        return Result(name, workload.name, timing, bandwidth, rate, bandwidth / self.ceilings.read, rate / self.ceilings.mma)

    def _time_peer(self, peer: Peer, spec: KernelSpec, workload: Workload, launches: int, replays: int) -> Timing | None:
        if not peer.installed:
            self.absent[peer.name] = None
            return None
        try:
            calls = [peer.prepare(spec.params, workload) for _ in range(_copies(workload))]
            return time_peer(calls, max(launches, len(calls)), replays)
        except Exception as error:  # whatever a foreign package raises: the run goes on without it
            self.refused.setdefault(peer.name, f"{workload.name}: {type(error).__name__}: {error}")
            return None

    def _calls(self, kernel: Kernel, workload: Workload) -> list[BoundCall]:
        """The workload's call, its turns, or for a cold one as many calls on copies of its inputs as push each other out of the L2 cache.

        The calls share outputs and workspaces, as the layers of a model do.
        """
        scalars = {argument.name for argument in kernel.contract.arguments if argument.role == "scalar"}

        def placed(inputs: Arrays) -> dict[str, Any]:
            return {name: value.item() if name in scalars else self.device.array(value) for name, value in inputs.items()}

        outputs = kernel.allocate(**{**workload.dimensions, **bound(kernel, workload)})
        if workload.turns:
            own = set().union(*workload.turns)
            shared = placed({name: value for name, value in workload.inputs.items() if name not in own})
            every = [{**shared, **placed(turn)} for turn in workload.turns]
        else:
            # What is updated in place was written a moment ago in the engine, too: it is not rotated.
            updated = {argument.name for argument in kernel.contract.arguments if argument.role == "inout"}
            shared = placed({name: value for name, value in workload.inputs.items() if name in updated})
            rest = {name: value for name, value in workload.inputs.items() if name not in updated}
            every = [{**shared, **placed(rest)} for _ in range(_copies(workload))]
        return [kernel.bind(**arrays, **outputs, dims=dict(workload.dimensions)) for arrays in every]


def _copies(workload: Workload) -> int:
    """How many copies of a cold workload's inputs push each other out of the L2 cache."""
    size = sum(array.nbytes for array in workload.inputs.values())
    return min(200, -(-COLD_BYTES // max(1, size))) if workload.cold else 1


def bound(kernel: Kernel, workload: Workload) -> dict[str, int]:
    """Dimensions that the outputs' shapes need, as the workload's arrays bind them."""
    from kdgen.expressions import names_in
    from kdgen.verify.kernel import bound_dimensions

    known = bound_dimensions(kernel.contract, workload.inputs, workload.dimensions)
    needed: set[str] = set()
    for argument in kernel.contract.arguments:
        if argument.role in ("out", "workspace"):
            for size in argument.shape:
                needed |= names_in(size) if isinstance(size, str) else set()
    return {name: known[name] for name in needed if name in known}
