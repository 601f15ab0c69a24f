"""What kdgen can compile for. A target is data: limits, flags, capabilities. Templates never compare architecture numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A compilation target.

    Attributes:
        name: what the user writes: `sm_120`, `host`.
        nvrtc_arch: what NVRTC is asked for. `sm_120f` is the family target: it runs on every 12.x chip and, unlike plain
            `sm_120`, admits the block-scaled `mma` forms. None for the host.
        capability: compute capability a cubin needs, as (major, minor).
        shared_limit: bytes of shared memory one block may have.
        shared_per_sm: bytes of shared memory of one multiprocessor.
        shared_reserved: bytes the system keeps of each block's shared memory.
        registers_per_sm, max_registers: 32-bit registers of a multiprocessor, and the most one thread may have.
        max_warps, max_blocks: resident at most on one multiprocessor.
        sms: multiprocessors of the card this target stands for.
        bandwidth: bytes/s of its memory, by its data sheet.
        bulk_copy: has `cp.async.bulk` and its barriers (sm_90 and later).
        sanitize: host only: built with AddressSanitizer and UndefinedBehaviorSanitizer.
    """

    name: str
    nvrtc_arch: str | None
    capability: tuple[int, int]
    shared_limit: int
    shared_per_sm: int
    shared_reserved: int
    registers_per_sm: int
    max_registers: int
    max_warps: int
    max_blocks: int
    sms: int
    bandwidth: float
    bulk_copy: bool
    sanitize: bool = False

    @property
    def is_host(self) -> bool:
        """True for the CPU target."""
        return self.nvrtc_arch is None


def _gpu(
    name: str, arch: str, capability: tuple[int, int], limit: int, per_sm: int, warps: int, blocks: int, sms: int, bandwidth: float
) -> Target:
    return Target(
        name=name, nvrtc_arch=arch, capability=capability, shared_limit=limit, shared_per_sm=per_sm, shared_reserved=1024,
        registers_per_sm=65536, max_registers=255, max_warps=warps, max_blocks=blocks, sms=sms, bandwidth=bandwidth,
        bulk_copy=capability >= (9, 0),
    )  # fmt: skip


#: Limits: CUDA C++ Programming Guide, "Compute Capabilities"; cards: their data sheets.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _gpu("sm_80", "sm_80", (8, 0), 166_912, 167_936, 64, 32, 108, 2.04e12),  # A100 80 GB
        _gpu("sm_89", "sm_89", (8, 9), 101_376, 102_400, 48, 24, 142, 0.86e12),  # L40S
        _gpu("sm_90", "sm_90", (9, 0), 232_448, 233_472, 64, 32, 132, 4.8e12),  # H200
        _gpu("sm_100", "sm_100f", (10, 0), 232_448, 233_472, 64, 32, 148, 8.0e12),  # B200
        _gpu("sm_120", "sm_120f", (12, 0), 101_376, 102_400, 48, 24, 188, 1.79e12),  # RTX PRO 6000 Blackwell
        # The host emulates whichever chip a spec is meant for, so it has the largest limits of all.
        Target("host", None, (0, 0), 232_448, 233_472, 1024, 65536, 255, 64, 32, 1, 0.0, True),
        Target("host_asan", None, (0, 0), 232_448, 233_472, 1024, 65536, 255, 64, 32, 1, 0.0, True, sanitize=True),
    )
}


def get_target(name: str) -> Target:
    """The target called `name`; UsageError naming the known ones otherwise."""
    if name not in TARGETS:
        raise UsageError(f"unknown target '{name}'; allowed: {', '.join(TARGETS)}")
    return TARGETS[name]
