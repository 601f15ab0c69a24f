"""`ceiling_mma`: `mma.sync` 16×8×16 bf16 and nothing else; its rate is what a kernel's operations are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams
from kdgen.targets import Target

THREADS = 256
CHAINS = 8
FLOPS_PER_MMA = 2 * 16 * 8 * 16


class Params(FamilyParams):
    """Length of the run."""

    rounds: Annotated[int, Field(ge=1, le=1 << 20, description="rounds of eight mma per warp")] = 4096
    blocks: Annotated[int, Field(ge=1, le=4096, description="most blocks")] = 1024


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface."""
    return Contract(
        family="ceiling_mma",
        arguments=(
            Argument("operands", "u32", (32, 6), doc="each lane's fragments: four words of A, two of B"),
            Argument("totals", "f32", ("G", THREADS), "out", "sum of each thread's accumulators"),
        ),
        capacities={"G": Capacity(1, p.blocks)},
        launches=(Launch("ceiling_mma", ("G", 1, 1), THREADS),),
    )


def flops(p: Params, blocks: int) -> int:
    """Operations of a launch."""
    return blocks * (THREADS // 32) * p.rounds * CHAINS * FLOPS_PER_MMA


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"chains": CHAINS, "threads": THREADS, "rounds": p.rounds}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The totals; the cases keep every partial sum an integer below 2^24, so they are exact."""
    halves = inputs["operands"].view(numpy_dtype("bf16")).astype(np.float64).reshape(32, 6, 2)
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    for i in range(4):
        for j in range(2):
            a[g + i % 2 * 8, 2 * t + i // 2 * 8 + j] = halves[:, i, j]
    for i in range(2):
        for j in range(2):
            b[2 * t + 8 * i + j, g] = halves[:, 4 + i, j]
    product = a @ b * p.rounds * CHAINS
    per_lane = product[g, 2 * t] + product[g, 2 * t + 1] + product[g + 8, 2 * t] + product[g + 8, 2 * t + 1] + sum(range(CHAINS))
    return {"totals": np.tile(per_lane.astype(np.float32), (2, THREADS // 32))}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Operands of −1, 0 and 1."""
    operands = rng.integers(-1, 2, size=(32, 12)).astype(numpy_dtype("bf16")).view(np.uint32)
    yield Case("small integers", {"operands": operands})


def dimensions(p: Params, inputs: Arrays) -> Mapping[str, int]:
    """G is the caller's choice."""
    return {"G": 2}


FAMILY = Family(
    name="ceiling_mma",
    summary="mma from registers: the rate that others are measured against",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    dimensions=dimensions,
)
