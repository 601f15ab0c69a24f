"""The ways a kernel is run during verification.

On the host target a schedule says which thread runs next and when asynchronous copies land: a kernel whose result depends on
either lacks a barrier or a wait. On a GPU the hardware schedules; there the same launch is merely repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdgen.verify.compare import FILLS


@dataclass(frozen=True)
class Schedule:
    """One way to run a launch.

    Attributes:
        name: for messages.
        order: which ready thread runs next (host).
        copies: when asynchronous copies land within what is legal (host).
        seed: of the random choices.
        fill: byte pattern of outputs and workspaces before the launch.
    """

    name: str
    order: Literal["in_order", "reverse", "random"] = "in_order"
    copies: Literal["earliest", "latest", "random"] = "earliest"
    seed: int = 0
    fill: int = FILLS[0]


def host_schedules(count: int, seed: int) -> tuple[Schedule, ...]:
    """`count` (at least 1) schedules: in order, reversed, then random ones that `seed` determines."""
    fixed = (
        Schedule("in order, copies early", "in_order", "earliest", seed, FILLS[0]),
        Schedule("reversed, copies late", "reverse", "latest", seed, FILLS[1]),
    )
    # Neighbouring seeds of a run must not share schedules: spread them.
    seeds = [(seed * 1_000_003 + i) % (1 << 63) for i in range(2, count)]
    random = tuple(Schedule(f"random, seed {s}", "random", "random", s, FILLS[i % len(FILLS)]) for i, s in enumerate(seeds))
    return (fixed + random)[:count]


def device_schedules(count: int) -> tuple[Schedule, ...]:
    """`count` runs that differ in what the arrays held before."""
    return tuple(Schedule(f"run {i + 1}", fill=FILLS[i % len(FILLS)]) for i in range(count))
