"""Theoretical occupancy against figures of NVIDIA's calculator."""

import pytest

from kdgen.compile import Occupancy, occupancy
from kdgen.errors import UsageError
from kdgen.targets import get_target


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "want"),
    [
        ("sm_90", 256, 32, 0, Occupancy(8, 64, 1.0, "warps")),
        ("sm_90", 256, 64, 0, Occupancy(4, 32, 0.5, "registers")),
        ("sm_90", 256, 65, 0, Occupancy(3, 24, 0.375, "registers")),  # 72 registers are allocated
        ("sm_90", 32, 16, 0, Occupancy(32, 32, 0.5, "blocks")),
        ("sm_90", 128, 32, 100_000, Occupancy(2, 8, 0.125, "shared memory")),
        ("sm_120", 128, 32, 101_376, Occupancy(1, 4, 4 / 48, "shared memory")),
        ("sm_120", 128, 32, 101_377, Occupancy(0, 0, 0.0, "shared memory")),
        ("sm_120", 1024, 64, 0, Occupancy(1, 32, 32 / 48, "warps")),
        ("sm_120", 1024, 96, 0, Occupancy(0, 0, 0.0, "registers")),
        ("sm_80", 64, 255, 0, Occupancy(4, 8, 0.125, "registers")),
        ("sm_120", 96, 0, 0, Occupancy(16, 48, 1.0, "warps")),
    ],
)
def test_known_figures(target: str, threads: int, registers: int, shared: int, want: Occupancy) -> None:
    assert occupancy(get_target(target), threads, registers, shared) == want


@pytest.mark.parametrize(("target", "threads"), [("host", 32), ("sm_90", 0), ("sm_90", 1025)])
def test_impossible_questions(target: str, threads: int) -> None:
    with pytest.raises(UsageError):
        occupancy(get_target(target), threads, 32, 0)
