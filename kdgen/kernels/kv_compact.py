"""`kv_compact`: accepted rows move to their final slots, in place, all layers at once.

The cache is paged: position q of a sequence lives in page `page_tables[s, q // page_size]`, slot `q % page_size`, of every layer. A
forward over a tree writes node i's row at position start + i (node order); once the path is chosen, accepted node j belongs at
position start + j. Accepted nodes ascend and accepted[j] ≥ j, so a destination is never a row that is still needed elsewhere.

With `swizzle: true` rows are laid out as rows-xor8 (`kdgen.kernels.cache_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.kernels.cache_layout import check_swizzle, swizzled
from kdgen.targets import Target


class Params(FamilyParams):
    """Shape of the cache and of the moves."""

    layers: Annotated[int, Field(ge=1, le=65535, description="layers, all moved by one launch")]
    width: Annotated[int, Field(ge=4, le=65536, description="elements of a row (latent + rope)")]
    dtype: Annotated[Literal["bf16", "f32"], Field(description="element type of the cache")] = "bf16"
    depth: Annotated[int, Field(ge=1, le=16, description="most moves per sequence: the deepest accepted node")]
    page_size: Annotated[int, Field(ge=1, le=65536, description="rows of a page")]
    max_pages: Annotated[int, Field(ge=1, le=1 << 20, description="columns of the page table")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64
    swizzle: Annotated[bool, Field(description="rows are stored as rows-xor8")] = False

    @model_validator(mode="after")
    def _rows_fit_units(self) -> Self:
        row = self.width * DTYPE_BYTES[self.dtype]
        if row % 16:
            raise ValueError(f"a row of {self.width} {self.dtype} is {row} bytes; it must be a multiple of 16")
        if self.swizzle:
            check_swizzle(row, self.page_size)
        return self

    @property
    def units(self) -> int:
        """16-byte units of a row."""
        return self.width * DTYPE_BYTES[self.dtype] // 16


def threads(p: Params) -> int:
    """Threads of a block: one per unit of a row, in whole warps."""
    return min(256, round_up(p.units, 32))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one block per layer and sequence."""
    return Contract(
        family="kv_compact",
        arguments=(
            Argument("cache", p.dtype, (p.layers, "P", p.page_size, p.width), "inout", "paged rows of every layer"),
            Argument("pages", "i64", ("P",), "dimension", "pages of a layer's pool"),
            Argument("page_tables", "i32", ("S", p.max_pages), doc="page of each page_size positions"),
            Argument("starts", "i32", ("S",), doc="position of the root: where the tree's rows begin"),
            Argument("accepted", "i32", ("S", p.depth + 1), doc="accepted nodes by depth, the root first"),
            Argument("accepted_counts", "i32", ("S",), doc="accepted nodes, 1 … depth + 1"),
        ),
        capacities={"S": Capacity(1, p.sequences), "P": Capacity(1, (1 << 31) - 1)},
        launches=(Launch("kv_compact", (p.layers, "S", 1), threads(p)),),
        layouts={"cache": "rows-xor8" if p.swizzle else "rows"},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"units": p.units, "threads": threads(p)}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The cache after the moves, from the definition; exact."""
    cache = inputs["cache"].copy()
    plain = swizzled(cache) if p.swizzle else cache
    before = plain.copy()
    for s, table in enumerate(inputs["page_tables"]):
        for j in range(1, int(inputs["accepted_counts"][s])):
            source, target = int(inputs["starts"][s]) + int(inputs["accepted"][s, j]), int(inputs["starts"][s]) + j
            plain[:, table[target // p.page_size], target % p.page_size] = before[:, table[source // p.page_size], source % p.page_size]
    return {"cache": swizzled(plain) if p.swizzle else plain}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Random accepted paths over shuffled pages, starts that straddle pages, and nothing to move."""
    dtype = numpy_dtype(p.dtype)
    budget = 40
    for name, count in (("one sequence", 1), ("several", min(4, p.sequences)), ("nothing to move", min(2, p.sequences))):
        needed = min(p.max_pages, 2 + (3 * p.page_size + budget) // p.page_size)
        pool = needed * count + 3
        positions = needed * p.page_size - budget - 1
        starts = rng.integers(0, max(1, positions), size=count, dtype=np.int32)
        tables = np.zeros((count, p.max_pages), np.int32)
        tables[:, :needed] = rng.permutation(pool)[: needed * count].reshape(count, needed)
        accepted = np.full((count, p.depth + 1), -1, np.int32)
        counts = np.empty(count, np.int32)
        for s in range(count):
            counts[s] = rng.integers(1, p.depth + 2)
            room = min(budget, needed * p.page_size - 1 - int(starts[s]))
            counts[s] = min(counts[s], room + 1)
            path = np.sort(rng.permutation(np.arange(1, room + 1))[: counts[s] - 1])
            accepted[s, : counts[s]] = np.arange(counts[s]) if name == "nothing to move" else [0, *path]
        # Any bits will do, NaNs too: rows are moved, not computed with.
        shape = (p.layers, pool, p.page_size, p.width)
        cache = np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
        yield Case(
            name,
            {"cache": cache, "page_tables": tables, "starts": starts, "accepted": accepted, "accepted_counts": counts},
        )


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence, the longest path off the chain, and a round in which nothing has to move."""
    pages = -(-(40 + 2 * p.page_size) // p.page_size)
    dtype = numpy_dtype(p.dtype)
    cache = np.zeros((p.layers, pages, p.page_size, p.width), dtype)
    table = np.zeros((1, p.max_pages), np.int32)
    table[0, :pages] = rng.permutation(pages)[: p.max_pages]
    for name, step in ((f"{p.depth} moves", 2), ("no move", 1)):
        accepted = np.arange(p.depth + 1, dtype=np.int32)[None] * step
        inputs = {
            "cache": cache, "page_tables": table, "starts": np.full(1, p.page_size - 3, np.int32), "accepted": accepted,
            "accepted_counts": np.full(1, p.depth + 1, np.int32),
        }  # fmt: skip
        moved = 2 * p.layers * p.depth * p.units * 16 if step > 1 else 0
        yield Workload(name, inputs, moved_bytes=moved)


FAMILY = Family(
    name="kv_compact",
    summary="accepted cache rows to their final slots, in place, all layers at once",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
