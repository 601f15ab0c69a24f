"""`ceiling_read`: reads memory and does next to nothing else; its rate is what a kernel's bytes are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams
from kdgen.targets import Target

THREADS = 512
UNIT_WORDS = 4


class Params(FamilyParams):
    """Shape of the launch."""

    blocks: Annotated[int, Field(ge=1, le=4096, description="most blocks; two per multiprocessor fill a GPU")] = 1024
    unroll: Annotated[Literal[1, 2, 4, 8, 16], Field(description="16-byte loads in flight per thread")] = 8


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; `data` is cut evenly among the blocks, so its units must be a multiple of G."""
    return Contract(
        family="ceiling_read",
        arguments=(
            Argument("data", "u32", ("U", UNIT_WORDS), doc="what is read"),
            Argument("units", "i64", ("U",), "dimension", "16-byte units"),
            Argument("folds", "u32", ("G", THREADS), "out", "exclusive or of what each thread read"),
        ),
        capacities={"U": Capacity(1, 1 << 40), "G": Capacity(1, p.blocks)},
        launches=(Launch("ceiling_read", ("G", 1, 1), THREADS),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"unroll": p.unroll, "threads": THREADS}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The folds, for the number of blocks the cases use."""
    per_block = len(inputs["data"]) // _case_blocks(p)
    words = np.bitwise_xor.reduce(inputs["data"], axis=1).reshape(-1, per_block)
    folds = np.zeros((len(words), THREADS), np.uint32)
    for first in range(0, per_block, THREADS):
        part = words[:, first : first + THREADS]
        folds[:, : part.shape[1]] ^= part
    return {"folds": folds}


def _case_blocks(p: Params) -> int:
    return min(3, p.blocks)


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Sizes around a whole round of loads."""
    for per_block in (1, THREADS * p.unroll, THREADS * p.unroll * 2 + 700):
        data = rng.integers(0, 1 << 32, size=(per_block * _case_blocks(p), UNIT_WORDS), dtype=np.uint32)
        yield Case(f"{per_block} units a block", {"data": data})


def dimensions(p: Params, inputs: Arrays) -> Mapping[str, int]:
    """G is the caller's choice."""
    return {"G": _case_blocks(p)}


FAMILY = Family(
    name="ceiling_read",
    summary="reads memory: the bandwidth that others are measured against",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    dimensions=dimensions,
)
