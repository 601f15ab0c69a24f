"""What the GPU at hand can do at most: read bandwidth and `mma` rate, measured by two kernels of ours in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kdgen.bench.measure import time_calls
from kdgen.kernels import ceiling_mma, ceiling_read
from kdgen.runtime import Kernel
from kdgen.runtime.device import Device
from kdgen.spec import KernelSpec

READ_BYTES = 1 << 30  # well beyond any L2 cache


@dataclass(frozen=True)
class Ceilings:
    """Measured limits.

    Attributes:
        read: bytes/s.
        mma: bf16 operations/s of `mma.sync`.
    """

    read: float
    mma: float


def ceiling_kernels() -> tuple[KernelSpec, ...]:
    """The two kernels, to be built beside those that are timed."""
    families = (ceiling_read.FAMILY, ceiling_mma.FAMILY)
    return tuple(KernelSpec(name=family.name, family=family, params=family.params(), allow_spill=False, line=0) for family in families)


def measure_ceilings(kernels: Mapping[str, Kernel], device: Device, sms: int) -> Ceilings:
    """Run both.

    Args:
        kernels: the loaded `ceiling_kernels()`.
        device: of the kernels.
        sms: multiprocessors of the GPU.
    """
    blocks = 2 * sms
    units = READ_BYTES // 16 // blocks * blocks
    data = device.empty((units, ceiling_read.UNIT_WORDS), "u32")
    read = kernels["ceiling_read"]
    outputs = read.allocate(G=blocks)
    read_time = time_calls(device, [read.bind(data=data, **outputs, dims={"G": blocks})], 4, 11)
    mma = kernels["ceiling_mma"]
    operands = device.array(np.full((32, 6), 0x3F803F80, np.uint32))
    mma_time = time_calls(device, [mma.bind(operands=operands, **mma.allocate(G=blocks), dims={"G": blocks})], 2, 11)
    return Ceilings(units * 16 / (read_time.median * 1e-6), ceiling_mma.flops(ceiling_mma.Params(), blocks) / (mma_time.median * 1e-6))
