"""Speeds of the cards that targets stand for, as the static model needs them."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import UsageError
from kdgen.targets import Target


@dataclass(frozen=True)
class Speeds:
    """What a card does at most, in SI units.

    Attributes:
        clock: of the multiprocessors under load, in Hz.
        read: bytes/s of memory that a plain reading kernel reaches.
        l2: bytes/s from the L2 cache, all multiprocessors together.
        mma: bf16 operations/s of `mma.sync`.
        latency: seconds from a load that misses L2 to its data.
        shared: bytes per clock of a multiprocessor's shared memory.
        integer: warp instructions per clock of a multiprocessor's integer pipes.
        launch: seconds that a launch in a graph takes beside its work.
        dependent: the same for one that overlaps its start with the launch before it.
        measured: the figures of reading and mma were measured on such a card; the others, and those of other cards, are data sheets'
            and estimates.
    """

    clock: float
    read: float
    l2: float
    mma: float
    latency: float
    shared: float
    integer: float
    launch: float
    dependent: float
    measured: bool = False


#: L2 rates and latencies are estimates of the right size; of sm_120 nothing was measured.
SPEEDS: dict[str, Speeds] = {
    "sm_80": Speeds(1.41e9, 1.75e12, 4.0e12, 2.8e14, 0.65e-6, 128, 2.0, 1.3e-6, 1.3e-6),
    "sm_89": Speeds(2.4e9, 0.78e12, 3.5e12, 3.3e14, 0.65e-6, 128, 2.0, 1.2e-6, 1.2e-6),
    "sm_90": Speeds(1.75e9, 4.597e12, 7.5e12, 6.4e14, 0.75e-6, 128, 2.0, 1.0e-6, 0.6e-6, True),
    "sm_100": Speeds(1.85e9, 7.2e12, 11e12, 8.0e14, 0.8e-6, 128, 2.0, 1.0e-6, 0.6e-6),
    "sm_120": Speeds(2.4e9, 1.55e12, 6.0e12, 3.9e14, 0.75e-6, 128, 4.0, 1.0e-6, 0.6e-6),
}


def speeds_of(target: Target) -> Speeds:
    """The speeds of a target's card; UsageError for the host."""
    if target.name not in SPEEDS:
        raise UsageError(f"target {target.name} has no speeds to predict with; allowed: {', '.join(SPEEDS)}")
    return SPEEDS[target.name]
