"""How long a configuration would take, from its cubin and its contract alone: a bound per resource, of which the largest limits.

For each launch, with G blocks of a grid, R of them resident on a multiprocessor (`kdgen.compile.occupancy`) and S multiprocessors:

    memory     memory_bytes / the rate of a plain reading kernel
    l2         fetched_bytes / the rate of the L2 cache
    latency    what the busiest multiprocessor fetches / (its bytes in flight / latency): Little's law. In flight is the ring in shared
               memory but for the stage in use, of every resident block; without a ring, the loads of one pass of the loop by every warp.
    mma        matrix instructions of the busiest multiprocessor, at the rate of `mma.sync`
    issue      instructions of the busiest multiprocessor at 4 a clock; integer ones at the rate of their pipes
    shared     bytes through shared memory of the busiest multiprocessor, at 128 a clock
    chain      dependent steps, one after another, for work that is sequential

The busiest multiprocessor does ⌈G / S⌉ blocks' work of the mean G / S (waves and their tail), times the imbalance of what blocks find to
do. Instructions and shared-memory bytes per matrix instruction are those of the innermost loops. A launch takes the largest bound, a
twentieth of the sum of the others (overlap is never full; without it, all that reaches one bound would rank equal), and a fixed time.
Launches follow each other.

Assumptions: memory, L2 and multiprocessors overlap nearly fully; blocks are spread evenly; clocks are as in `kdgen.sweep.hardware`;
caches hold nothing at the start. So it predicts lower bounds, whose order is worth more than their size. Where a GPU is at hand the
report compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdgen.compile.occupancy import Occupancy, occupancy
from kdgen.compile.ptxas import Resources
from kdgen.contract import Contract, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Workload
from kdgen.runtime.geometry import Geometries
from kdgen.spec import KernelSpec
from kdgen.sweep.hardware import Speeds, speeds_of
from kdgen.sweep.work import Grid, Work, works_of
from kdgen.sweep.workloads import dimensions_of
from kdgen.targets import Target

#: Raised when the same cubin is predicted otherwise: stored predictions of older versions are made anew.
VERSION = 1
_LEAK = 0.05  # of the bounds that do not limit
_STEP_CYCLES = 5.0  # of an instruction that waits for the one before it
_PLAIN_LOADS = 4  # loads in flight that a warp is given when its loop shows none


@dataclass(frozen=True)
class LaunchEstimate:
    """One launch.

    Attributes:
        entry: its entry point.
        seconds: what it takes.
        limiter: the largest of `terms`; `launch` when its fixed time is larger.
        terms: bound to seconds.
        grid: blocks.
        blocks_per_sm: resident at once.
        waves: grid / what is resident at once.
        in_flight: bytes in flight on one multiprocessor.
    """

    entry: str
    seconds: float
    limiter: str
    terms: Mapping[str, float]
    grid: int
    blocks_per_sm: int
    waves: float
    in_flight: float


@dataclass(frozen=True)
class Estimate:
    """A configuration on one workload.

    Attributes:
        microseconds: predicted.
        limiter: of the launch that takes longest.
        launches: in order.
        floor: microseconds that reading the workload's bytes alone takes; 0 where it has none.
    """

    microseconds: float
    limiter: str
    launches: tuple[LaunchEstimate, ...]
    floor: float

    def to_json(self) -> dict[str, Any]:
        """For the store: per launch its entry, grid, waves, blocks and the bounds in microseconds."""
        return {
            "floor": round(self.floor, 4),
            "launches": [
                {
                    "entry": item.entry, "grid": item.grid, "blocks_per_sm": item.blocks_per_sm, "waves": round(item.waves, 3),
                    "in_flight": round(item.in_flight), "microseconds": round(item.seconds * 1e6, 4), "limiter": item.limiter,
                    "terms": {name: round(value * 1e6, 4) for name, value in item.terms.items()},
                }
                for item in self.launches
            ],
        }  # fmt: skip


def estimate(
    kernel: KernelSpec, target: Target, contract: Contract, resources: Mapping[str, Resources], code: Mapping[str, Any], workload: Workload
) -> Estimate:
    """Predict.

    Args:
        kernel, target, contract: the configuration.
        resources: entry to what ptxas reported.
        code: entry to `kdgen.sweep.instructions.analyse`.
        workload: what is done.

    Raises:
        LaunchError: the kernel is not for this workload.
    """
    speeds = speeds_of(target)
    launches = Geometries(kernel.name, contract).at(dimensions_of(contract, workload)).launches
    works = works_of(kernel, launches, workload)
    found = tuple(
        _launch(target, speeds, launch, grid, resources[launch.entry], code.get(launch.entry, {}), work)
        for (launch, grid), work in zip(launches, works, strict=True)
    )
    longest = max(found, key=lambda item: item.seconds)
    return Estimate(sum(item.seconds for item in found) * 1e6, longest.limiter, found, workload.moved_bytes / speeds.read * 1e6)


def occupancy_of(target: Target, launch: Launch, need: Resources) -> Occupancy:
    """Occupancy of a launch."""
    return occupancy(target, launch.block, need.registers, need.static_shared_bytes + launch.shared_bytes)


def _launch(
    target: Target, speeds: Speeds, launch: Launch, grid: Grid, need: Resources, code: Mapping[str, Any], work: Work
) -> LaunchEstimate:
    blocks = grid[0] * grid[1] * grid[2]
    resident = max(1, occupancy_of(target, launch, need).blocks_per_sm)
    at_once = min(resident, ceil_div(blocks, target.sms))
    # Of the whole work, what the busiest multiprocessor does.
    busiest = ceil_div(blocks, target.sms) / blocks * work.balance
    busiest = min(1.0, busiest)
    hot = code.get("hot", {})
    flight = at_once * _in_flight(launch, hot)
    per_mma = max(1, hot.get("mma", 0))
    instructions = work.mma * hot.get("instructions", 0) / per_mma if hot.get("mma") else work.steps * hot.get("instructions", 0)
    integers = instructions * hot.get("integer", 0) / max(1, hot.get("instructions", 0))
    terms = {
        "memory": work.memory_bytes / speeds.read,
        "l2": work.fetched_bytes / speeds.l2,
        "latency": work.fetched_bytes * busiest / flight * speeds.latency if flight else 0.0,
        "mma": work.mma * 4096 * busiest / (speeds.mma / target.sms),
        "issue": max(instructions / 4, integers / speeds.integer) * busiest / speeds.clock,
        "shared": work.mma * hot.get("shared_bytes", 0) / per_mma * busiest / (speeds.shared * speeds.clock) if hot.get("mma") else 0.0,
        "chain": work.steps * hot.get("instructions", 0) / code.get("inner", 1) * _STEP_CYCLES / speeds.clock,
    }
    fixed = speeds.dependent if launch.programmatic else speeds.launch
    # A block that starts has to wait for its first data once.
    fill = speeds.latency if work.fetched_bytes else 0.0
    limiter = max(terms, key=lambda name: terms[name])
    others = sum(terms.values()) - terms[limiter]
    seconds = terms[limiter] + _LEAK * others + fixed + fill
    if terms[limiter] < fixed:
        limiter = "launch"
    return LaunchEstimate(launch.entry, seconds, limiter, terms, blocks, resident, blocks / (target.sms * resident), flight)


def _in_flight(launch: Launch, hot: Mapping[str, int]) -> float:
    """Bytes in flight of one block."""
    warps = ceil_div(launch.block, 32)
    if launch.shared_bytes > 4096 * warps // 4 and (hot.get("bulk") or hot.get("load_bytes") or hot.get("shared_bytes")):
        # The ring is most of a block's shared memory; of its stages one or so is being worked on.
        return launch.shared_bytes * 0.7
    loads = hot.get("load_bytes", 0) or 32 * 16 * _PLAIN_LOADS
    return float(min(loads, 32 * 16 * 16) * warps)
