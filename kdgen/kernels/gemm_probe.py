"""`gemm_probe`: out = x · wᵀ for few rows, bf16 in, fp32 out; proves the asynchronous pipeline end to end on every target.

Row-exact: the K loop is fixed by the spec, every row of x is one column of `mma`, and `tile.t` only groups rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target


class Tile(FamilyParams):
    """What a block owns of each dimension."""

    n: Annotated[int, Field(ge=16, le=256, multiple_of=16, description="columns of out; a warp owns 16")] = 64
    t: Annotated[Literal[8, 16, 32, 64], Field(description="rows of x")] = 16
    k: Annotated[Literal[32, 64, 128, 256], Field(description="elements of K per stage")] = 64


class Params(FamilyParams):
    """Sizes of the product and of its pipeline."""

    n: Annotated[int, Field(ge=16, le=1 << 20, description="columns of out: rows of w")]
    k: Annotated[int, Field(ge=32, le=1 << 20, description="the reduced dimension")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of x")] = 512
    tile: Tile = Tile()
    stages: Annotated[int, Field(ge=2, le=8, description="stages of the ring in shared memory")] = 3

    @model_validator(mode="after")
    def _tiles_divide(self) -> Self:
        for axis in ("n", "k"):
            size, tile = getattr(self, axis), getattr(self.tile, axis)
            if size % tile:
                raise ValueError(f"tile.{axis} = {tile} does not divide {axis} = {size}")
        return self


def pitch(p: Params) -> int:
    """Bytes from one row of a tile to the next: 16 more than the row, so that columns spread over the banks."""
    return p.tile.k * 2 + 16


def threads(p: Params) -> int:
    """One warp per 16 columns."""
    return p.tile.n * 2


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: the two rings and their barriers."""
    return SharedLayout.place(
        target,
        ("w", p.stages * p.tile.n * pitch(p), 128),
        ("x", p.stages * p.tile.t * pitch(p), 128),
        ("full", p.stages * 8, 8),
    )


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; ValueError for a target without bulk copies."""
    if not target.bulk_copy:
        raise ValueError(f"gemm_probe needs bulk copies, which {target.name} lacks; allowed: sm_90 and later, host")
    return Contract(
        family="gemm_probe",
        arguments=(
            Argument("x", "bf16", ("T", p.k), doc="rows"),
            Argument("w", "bf16", (p.n, p.k), doc="weights, one row per output column"),
            Argument("row_count", "i32", ("T",), "dimension", "rows of x"),
            Argument("out", "f32", ("T", p.n), "out", "x · wᵀ"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(Launch("gemm_probe", (p.n // p.tile.n, f"ceil_div(T, {p.tile.t})", 1), threads(p), shared(p, target).total),),
        pinned={"tile.k": p.tile.k},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"tile_n": p.tile.n, "pitch": pitch(p), "threads": threads(p), "warps": threads(p) // 32}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The product in float64."""
    return {"out": inputs["x"].astype(np.float64) @ inputs["w"].astype(np.float64).T}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """Products are exact; K fp32 additions of terms of random sign."""
    return {"out": Tolerance(2.0**-24 * p.k, "K fp32 additions, each within half an ulp of the running sum")}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Every remainder of the row tile that matters, and rows of wildly different size."""
    w = (rng.normal(size=(p.n, p.k)) / np.sqrt(p.k)).astype(numpy_dtype("bf16"))
    for rows in sorted({t for t in (1, 7, 8, 9, 16, 17, 31, 33, 64) if t <= p.rows}):
        x = rng.normal(size=(rows, p.k)) * 2.0 ** rng.integers(-8, 8, size=(rows, 1))
        yield Case(f"T = {rows}", {"x": x.astype(numpy_dtype("bf16")), "w": w})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Few rows, weights from memory."""
    w = rng.normal(size=(p.n, p.k)).astype(numpy_dtype("bf16"))
    for rows in (t for t in (1, 8, 16, 32, 64) if t <= p.rows):
        x = rng.normal(size=(rows, p.k)).astype(numpy_dtype("bf16"))
        moved = w.nbytes + x.nbytes + rows * p.n * 4
        yield Workload(f"T = {rows}", {"x": x, "w": w}, moved_bytes=moved, flops=2 * rows * p.n * p.k, cold=True)


FAMILY = Family(
    name="gemm_probe",
    summary="x · wᵀ for few rows through cp.async, bulk copies, ldmatrix and mma",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    workloads=workloads,
    rows="T",
)
