"""Theoretical occupancy, computed from the target table: how many blocks of a kernel one multiprocessor holds, and why not more."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import UsageError
from kdgen.expressions import ceil_div, round_up
from kdgen.targets import Target

# Granularities of compute capability 8.0 and later: CUDA Occupancy Calculator, `cuda_occupancy.h`.
_REGISTERS_PER_WARP = 256
_PARTITIONS = 4  # of a multiprocessor; each has a quarter of the registers, and a warp lives in one
_SHARED_UNIT = 128
_LARGEST_BLOCK = 1024


@dataclass(frozen=True)
class Occupancy:
    """How full a multiprocessor gets.

    Attributes:
        blocks_per_sm: blocks resident at once; 0 when not even one fits.
        warps_per_sm: their warps.
        fraction: of the most warps a multiprocessor can hold, 0…1.
        limiter: what allows no further block: `warps`, `blocks`, `registers` or `shared memory`.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limiter: str


def occupancy(target: Target, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel.

    Args:
        target: a GPU target.
        threads: of a block, 1…1024.
        registers: of a thread.
        shared_bytes: of a block, static and dynamic together.

    Raises:
        UsageError: the target is no GPU, or a figure is impossible.
    """
    if target.is_host:
        raise UsageError(f"occupancy is a figure of GPUs; target {target.name} is none")
    if not 1 <= threads <= _LARGEST_BLOCK or registers < 0 or shared_bytes < 0:
        raise UsageError(
            f"{threads} threads, {registers} registers, {shared_bytes} bytes; allowed: 1…{_LARGEST_BLOCK} threads, the others from 0"
        )
    warps = ceil_div(threads, 32)
    limits = {
        "warps": target.max_warps // warps,
        "blocks": target.max_blocks,
        "registers": _by_registers(target, warps, registers),
        "shared memory": _by_shared(target, shared_bytes),
    }
    limiter = min(limits, key=lambda name: limits[name])
    blocks = limits[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / target.max_warps, limiter)


def _by_registers(target: Target, warps: int, registers: int) -> int:
    if registers == 0:
        return target.max_blocks
    if registers > target.max_registers:
        return 0
    per_warp = round_up(registers * 32, _REGISTERS_PER_WARP)
    resident = target.registers_per_sm // _PARTITIONS // per_warp * _PARTITIONS
    return resident // warps


def _by_shared(target: Target, shared_bytes: int) -> int:
    if shared_bytes > target.shared_limit:
        return 0
    return target.shared_per_sm // round_up(shared_bytes + target.shared_reserved, _SHARED_UNIT)
