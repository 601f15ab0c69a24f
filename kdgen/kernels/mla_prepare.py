"""`mla_prepare`: from the projections of a layer to what `tree_attention` reads: the rows' cache entries, and the queries' rotary part.

Definition, for row r at position p whose cache slot is s (a tree's node i stands at slot start + i):

    cache[s][: latent]    = rmsnorm(kv[r, : latent]) · kv_norm
    cache[s][latent :]    = rope(kv[r, latent :], p)
    q[r, h][latent :]     = rope(queries[r, h, nope :], p)          q[r, h][: latent], the absorbed part, is left alone

Order of operations, so that every bit is determined: the sum of squares has `threads` shares (thread t adds the squares of units t,
t + threads, …, value by value), joined by a butterfly within each warp (distances 16 … 1) and then warp by warp in order. The factor is
1 / sqrt(sum / latent + eps), each operation rounded to float32. A value times the factor is rounded to the cache's type before it is
multiplied by its weight. rope, half-split: first half a · cos − b · sin, second half b · cos + a · sin, each product and sum rounded to
float32.

A row with slot −1 is padding: nothing of it is cached, and its queries' rotary part is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.kernels.cache_layout import check_swizzle, swizzled
from kdgen.targets import Target

THREADS = 128


class Params(FamilyParams):
    """Shapes of the rows and of the cache."""

    heads: Annotated[int, Field(ge=1, le=1024, description="query heads of this rank")]
    latent: Annotated[int, Field(ge=16, le=4096, multiple_of=16, description="values of the latent")]
    rope: Annotated[int, Field(ge=8, le=1024, multiple_of=8, description="rotary values of a key and of a query")]
    nope: Annotated[int, Field(ge=0, le=4096, multiple_of=8, description="values of a query's head that stand before the rotary ones")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of a launch")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")]
    page_size: Annotated[int, Field(ge=1, le=65536, description="rows of a page")]
    max_pages: Annotated[int, Field(ge=1, le=1 << 20, description="columns of the page table")]
    dtype: Annotated[Literal["bf16", "f32"], Field(description="of cache, queries and weights")] = "bf16"
    projected: Annotated[Literal["bf16", "f32"], Field(description="of the projections `kv` and `queries`")] = "bf16"
    kv_width: Annotated[int, Field(ge=0, le=1 << 20, description="values of a row of kv; 0: kv_offset + latent + rope")] = 0
    kv_offset: Annotated[int, Field(ge=0, le=1 << 20, description="first of them that is the latent's")] = 0
    eps: Annotated[float, Field(gt=0.0, lt=0.1, description="added to the mean square")] = 1e-6
    swizzle: Annotated[bool, Field(description="the cache is laid out as rows-xor8")] = True

    @model_validator(mode="after")
    def _rows_fit_units(self) -> Self:
        for name, dtype in (("cache", self.dtype), ("projections", self.projected)):
            if self.rope // 2 * DTYPE_BYTES[dtype] % 16:
                raise ValueError(f"half of rope = {self.rope} must be a multiple of 16 bytes, also in the {name} ({dtype})")
        for name, size in (("kv_width", self.kv_columns), ("kv_offset", self.kv_offset)):
            if size * DTYPE_BYTES[self.projected] % 16:
                raise ValueError(f"{name} = {size} must be a multiple of 16 bytes ({self.projected})")
        if self.kv_offset + self.width > self.kv_columns:
            raise ValueError(f"values {self.kv_offset} … {self.kv_offset + self.width - 1} of kv do not fit kv_width = {self.kv_columns}")
        if self.swizzle:
            check_swizzle(self.width * DTYPE_BYTES[self.dtype], self.page_size)
        return self

    @property
    def width(self) -> int:
        """Values of a cache row."""
        return self.latent + self.rope

    @property
    def kv_columns(self) -> int:
        """Values of a row of kv."""
        return self.kv_width or self.kv_offset + self.width

    @property
    def unit(self) -> int:
        """Values that a thread handles at a time: 16 bytes of the narrower type."""
        return 16 // min(DTYPE_BYTES[self.dtype], DTYPE_BYTES[self.projected])


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: a sum per warp."""
    return SharedLayout.place(target, ("sums", THREADS // 32 * 4, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one block per row."""
    half = p.rope // 2
    return Contract(
        family="mla_prepare",
        arguments=(
            Argument("kv", p.projected, ("T", p.kv_columns), doc="the kv projection: latent, then the key's rotary part"),
            Argument("kv_norm", p.dtype, (p.latent,), doc="weights of the latent's norm"),
            Argument("queries", p.projected, ("T", p.heads, p.nope + p.rope), doc="the query projection; nope first"),
            Argument("cosines", "f32", ("N", half), doc="`kdgen.rope.rope_table`"),
            Argument("sines", "f32", ("N", half), doc="`kdgen.rope.rope_table`"),
            Argument("positions", "i32", ("T",), doc="of each row, below N"),
            Argument("slots", "i32", ("T",), doc="place of each row's key in its sequence; −1: padding"),
            Argument("row_sequences", "i32", ("T",), doc="sequence of each row; −1 for padding"),
            Argument("page_tables", "i32", ("S", p.max_pages), doc="page of each page_size slots"),
            Argument("cache", p.dtype, ("P", p.page_size, p.width), "inout", "paged keys of one layer"),
            Argument("q", p.dtype, ("T", p.heads, p.width), "inout", "queries: absorbed part, then the rotary part written here"),
        ),
        capacities={
            "T": Capacity(1, p.rows),
            "S": Capacity(1, p.sequences),
            "P": Capacity(1, (1 << 31) - 1),
            "N": Capacity(1, 1 << 24),
        },
        launches=(Launch("mla_prepare", ("T", 1, 1), THREADS, shared(p, target).total, programmatic=target.bulk_copy),),
        pinned={"threads": THREADS, "unit": p.unit, "eps": p.eps},
        layouts={"cache": "rows-xor8" if p.swizzle else "rows"},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        "threads": THREADS,
        "width": p.width,
        "kv_columns": p.kv_columns,
        "unit": p.unit,
        "latent_units": p.latent // p.unit,
        "thread_units": ceil_div(p.latent // p.unit, THREADS),
        "rope_units": p.rope // p.unit,
    }


def normed(p: Params, values: npt.NDArray[np.float32], weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """rmsnorm of rows `[T, latent]` by the kernel's own order of operations; exact."""
    squares = (values * values).reshape(len(values), -1, p.unit)
    shares = np.zeros((len(values), THREADS), np.float32)
    for first in range(0, squares.shape[1], THREADS):
        here = squares[:, first : first + THREADS]
        for i in range(p.unit):
            shares[:, : here.shape[1]] += here[:, :, i]
    warps = shares.reshape(len(values), THREADS // 32, 32)
    while warps.shape[2] > 1:
        half = warps.shape[2] // 2
        warps = warps[:, :, :half] + warps[:, :, half:]
    total = np.zeros(len(values), np.float32)
    for warp in range(THREADS // 32):
        total = total + warps[:, warp, 0]
    factor = np.float32(1) / np.sqrt(total / np.float32(p.latent) + np.float32(p.eps))
    rounded = (values * factor[:, None]).astype(numpy_dtype(p.dtype)).astype(np.float32)
    return np.asarray(rounded * weights.astype(np.float32), numpy_dtype(p.dtype))


def turned(p: Params, values: npt.NDArray[np.float32], cosines: npt.NDArray[Any], sines: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """rope of `values` `[…, rope]`; cosines and sines `[…, rope / 2]`; exact."""
    a, b = values[..., : p.rope // 2], values[..., p.rope // 2 :]
    return np.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1).astype(numpy_dtype(p.dtype))


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Both outputs from the definition, in the stated order; exact."""
    kv = inputs["kv"][:, p.kv_offset : p.kv_offset + p.width].astype(np.float32)
    queries = inputs["queries"].astype(np.float32)
    cosines, sines = inputs["cosines"][inputs["positions"]], inputs["sines"][inputs["positions"]]
    real = inputs["slots"] >= 0
    entries = np.concatenate([normed(p, kv[:, : p.latent], inputs["kv_norm"]), turned(p, kv[:, p.latent :], cosines, sines)], axis=1)
    plain = swizzled(inputs["cache"]) if p.swizzle else inputs["cache"].copy()
    slots = inputs["slots"][real]
    pages = inputs["page_tables"][inputs["row_sequences"][real], slots // p.page_size]
    plain[pages, slots % p.page_size] = entries[real]
    q = inputs["q"].copy()
    q[:, :, p.latent :] = np.where(
        real[:, None, None], turned(p, queries[:, :, p.nope :], cosines[:, None], sines[:, None]), numpy_dtype(p.dtype).type(0)
    )
    return {"cache": swizzled(plain) if p.swizzle else plain, "q": q}


def random_kv(p: Params, rng: np.random.Generator, rows: int, size: npt.NDArray[np.floating[Any]] | float = 1.0) -> npt.NDArray[Any]:
    """Rows of kv; values that are not the latent's or the key's are NaN."""
    kv = np.full((rows, p.kv_columns), np.nan)
    kv[:, p.kv_offset : p.kv_offset + p.width] = rng.normal(size=(rows, p.width)) * size
    return kv.astype(numpy_dtype(p.projected))


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Few and many rows, several sequences, padding, far positions, rows of wildly different size."""
    table = 64
    angles = rng.uniform(-3, 3, size=(table, p.rope // 2))
    for rows in sorted({t for t in (1, 7, 8, 9, 33, 64) if t <= p.rows}):
        sequences = min(p.sequences, 3, rows)
        needed = min(p.max_pages, ceil_div(rows + 5, p.page_size) + 1)
        room = needed * p.page_size
        tables = np.full((sequences, p.max_pages), (1 << 31) - 1, np.int32)
        tables[:, :needed] = rng.permutation(needed * sequences + 2)[: needed * sequences].reshape(sequences, needed)
        row_sequences = rng.integers(0, sequences, size=rows).astype(np.int32)
        slots = np.empty(rows, np.int32)
        for sequence in range(sequences):
            mine = row_sequences == sequence
            slots[mine] = rng.permutation(room)[: mine.sum()]
        if rows > 1:
            slots[rows // 2] = row_sequences[rows // 2] = -1
        size = 2.0 ** rng.integers(-12, 12, size=(rows, 1))
        cache = np.empty((needed * sequences + 2, p.page_size, p.width), numpy_dtype(p.dtype))
        cache.view(np.uint8)[...] = 0xFF
        q = np.empty((rows, p.heads, p.width), numpy_dtype(p.dtype))
        q.view(np.uint8)[...] = 0xFF
        yield Case(
            f"T = {rows}",
            {
                "kv": random_kv(p, rng, rows, size),
                "kv_norm": rng.normal(1, 0.2, size=p.latent).astype(numpy_dtype(p.dtype)),
                "queries": (rng.normal(size=(rows, p.heads, p.nope + p.rope)) * size[:, :, None]).astype(numpy_dtype(p.projected)),
                "cosines": np.cos(angles).astype(np.float32),
                "sines": np.sin(angles).astype(np.float32),
                "positions": rng.integers(0, table, size=rows).astype(np.int32),
                "slots": slots,
                "row_sequences": row_sequences,
                "page_tables": tables,
                "cache": cache,
                "q": q,
            },
        )


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Rows of one sequence behind 1,000 cached keys, or as many as there is room for."""
    pages = min(p.max_pages, ceil_div(1064, p.page_size))
    start = min(1000, pages * p.page_size - 64)
    for rows in (t for t in (1, 8, 16, 32, 64) if t <= p.rows and start >= 0):
        table = np.zeros((1, p.max_pages), np.int32)
        table[0, :pages] = np.arange(pages)
        places = np.arange(start, start + rows, dtype=np.int32)
        kv = random_kv(p, rng, rows)
        queries = rng.normal(size=(rows, p.heads, p.nope + p.rope)).astype(numpy_dtype(p.projected))
        inputs = {
            "kv": kv, "kv_norm": np.ones(p.latent, numpy_dtype(p.dtype)), "queries": queries,
            "cosines": np.ones((2048, p.rope // 2), np.float32), "sines": np.zeros((2048, p.rope // 2), np.float32),
            "positions": places, "slots": places, "row_sequences": np.zeros(rows, np.int32), "page_tables": table,
            "cache": np.zeros((pages, p.page_size, p.width), numpy_dtype(p.dtype)),
            "q": np.zeros((rows, p.heads, p.width), numpy_dtype(p.dtype)),
        }  # fmt: skip
        moved = 2 * rows * p.width * DTYPE_BYTES[p.projected] + 2 * rows * p.heads * p.rope * DTYPE_BYTES[p.dtype]
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved)


FAMILY = Family(
    name="mla_prepare",
    summary="latent norm and rope of new rows into the paged cache, and rope of their queries",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
