"""`gemm`: out = x · wᵀ for few rows of x and dense weights in bf16 or f32, plain or one product per head, with an optional residual add.

Definition, for row r (and head h, when there are heads), with O = `x_offset`, Q = `out_offset`:

    sum[r, h, n]            = Σ_k x[r, h, O + k] · w[h, n, k]                            k = 0 … K − 1
    out[r, h, Q + n]        = sum, or out + sum when out is a residual stream            one rounding to out's type

Columns of x and out beside those are neither used nor changed, so a product may read part of a wider row and write part of another.

Row-exactness: a row's bits follow from w and that row of x (and of a residual) alone. The order is fixed by the spec, never by T:

    parts       K is cut into steps of `tile.k`, the steps into `slices` · `warps.k` parts in order; part i of P has the steps
                ⌊i · steps / P⌋ … ⌊(i + 1) · steps / P⌋ − 1. What stands past K in the last step counts as zeros.
    a part      starts from zero. bf16 · bf16: one `mma` per 16 consecutive k, ascending. Otherwise: one fused multiply-add per k,
                ascending, in f32.
    slice       the sums of its `warps.k` parts, added in order
    out         the sums of the slices, added in order; then out + sum for a residual; then the rounding

Rows are the 8-wide operand of `mma`, whose columns never mix, so it decides no bits how many rows share a tile, nor what they hold.
Nor do `tile.n`, `warps.n`, `few_rows` or `stages`.

Bytes: w is read once for each tile of up to 64 rows; x once for each `tile.n` columns of out, mostly from L2; with more than one slice, the
slices' sums are written and read as f32, also through L2. The 2112 × 7168 bf16 weights of a K2.6 layer's down-projections are 30.3 MB.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target

Floats = npt.NDArray[np.float32]
FloatType = Literal["bf16", "f32"]

JOIN_THREADS = 128
ROW_TILES = (8, 16, 32, 64)


class Tile(FamilyParams):
    """What a block takes of each dimension at a time."""

    n: Annotated[int, Field(ge=16, le=256, multiple_of=16, description="columns of out")] = 64
    k: Annotated[Literal[64, 128, 256], Field(description="elements of K per step of a pipeline; decides bits")] = 64


class Warps(FamilyParams):
    """How the warps of a block share its work: `k` groups of `n` warps; a group has a pipeline of its own."""

    n: Annotated[int, Field(ge=1, le=16, description="warps that share the columns of a tile")] = 4
    k: Annotated[int, Field(ge=1, le=8, description="groups of warps that share a slice of K; decides bits")] = 2


class Params(FamilyParams):
    """Shapes and types, and how the work is cut."""

    n: Annotated[int, Field(ge=1, le=1 << 20, description="columns of the product: rows of w")]
    k: Annotated[int, Field(ge=4, le=1 << 20, description="the reduced dimension")]
    heads: Annotated[
        int, Field(ge=0, le=1024, description="independent products, one per head; 0: one product, arrays without a head axis")
    ] = 0
    rows: Annotated[int, Field(ge=1, le=65535, description="most rows of x")] = 512
    x: Annotated[FloatType, Field(description="type of x")] = "bf16"
    w: Annotated[FloatType, Field(description="type of the weights")] = "bf16"
    out: Annotated[FloatType, Field(description="type of out")] = "bf16"
    residual: Annotated[bool, Field(description="out is a residual stream that the product is added to")] = False
    x_width: Annotated[int, Field(ge=0, le=1 << 24, description="columns of x; 0: x_offset + k")] = 0
    x_offset: Annotated[int, Field(ge=0, le=1 << 24, description="first column of x that is used")] = 0
    out_width: Annotated[int, Field(ge=0, le=1 << 24, description="columns of out; 0: out_offset + n")] = 0
    out_offset: Annotated[int, Field(ge=0, le=1 << 24, description="first column of out that is written")] = 0
    tile: Tile = Tile()
    warps: Warps = Warps()
    slices: Annotated[int, Field(ge=1, le=64, description="parts of K that blocks of their own take; decides bits")] = 1
    few_rows: Annotated[
        Literal[0, 1, 2, 4, 8, 16],
        Field(description="up to so many rows, blocks of 16 columns take all slices, which saves the launch that joins them; 0: never"),
    ] = 0
    stages: Annotated[int, Field(ge=2, le=8, description="most steps in flight and in use per pipeline; fewer where memory is short")] = 4
    early_weights: Annotated[
        bool, Field(description="fetch the first weights before the launch just before has ended; it must not be what writes them")
    ] = False

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        pieces = (("k", self.x, self.k), ("k", self.w, self.k), ("x_width", self.x, self.x_columns), ("x_offset", self.x, self.x_offset))
        for name, dtype, size in pieces:
            unit = 16 // DTYPE_BYTES[dtype]
            if size % unit:
                raise ValueError(f"{name} = {size} is not a multiple of {unit}: {dtype} is fetched 16 bytes at a time")
        if self.x_offset + self.k > self.x_columns:
            raise ValueError(f"columns {self.x_offset} … {self.x_offset + self.k - 1} of x do not fit x_width = {self.x_columns}")
        if self.out_offset + self.n > self.out_columns:
            raise ValueError(f"columns {self.out_offset} … {self.out_offset + self.n - 1} of out do not fit out_width = {self.out_columns}")
        return self

    @model_validator(mode="after")
    def _work_fits(self) -> Self:
        if self.tile.n % (16 * self.warps.n) or self.fragments not in (1, 2, 4):
            raise ValueError(f"tile.n = {self.tile.n} must be 16, 32 or 64 columns for each of warps.n = {self.warps.n} warps")
        if self.threads > 512:
            raise ValueError(f"warps.n · warps.k = {self.threads // 32} warps; at most 16 are allowed")
        widest = max(DTYPE_BYTES[self.x], DTYPE_BYTES[self.w])
        if self.tile.k * widest > 512:
            raise ValueError(f"tile.k = {self.tile.k} of f32 is more than 128, the most that 16-byte pieces per lane allow")
        if self.parts > self.steps:
            raise ValueError(
                f"slices · warps.k = {self.parts} parts, but K = {self.k} has only {self.steps} steps of tile.k = {self.tile.k}"
            )
        if self.few_rows and not (self.slices > 1 and self.parts <= 16):
            raise ValueError(f"few_rows needs 2 or more slices, and at most 16 parts; got {self.slices} slices of {self.warps.k} parts")
        narrow = 16 if self.few_rows else self.tile.n
        for name, size in (("columns / tile", ceil_div(self.n, narrow)), ("heads · slices", max(1, self.heads) * self.slices)):
            if size > 65535:
                raise ValueError(f"{name} = {size}; at most 65535 are allowed")
        return self

    @property
    def x_columns(self) -> int:
        """Columns of x, of each head."""
        return self.x_width or self.x_offset + self.k

    @property
    def out_columns(self) -> int:
        """Columns of out, of each head."""
        return self.out_width or self.out_offset + self.n

    @property
    def products(self) -> int:
        """Independent products: heads, or 1."""
        return max(1, self.heads)

    @property
    def steps(self) -> int:
        """Steps of the whole K."""
        return ceil_div(self.k, self.tile.k)

    @property
    def parts(self) -> int:
        """Parts of K that are summed from zero."""
        return self.slices * self.warps.k

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps.n * self.warps.k * 32

    @property
    def fragments(self) -> int:
        """Groups of 16 columns that a warp owns."""
        return self.tile.n // (16 * self.warps.n)

    @property
    def tensor(self) -> bool:
        """The product is made by `mma`."""
        return self.x == self.w == "bf16"

    @property
    def updates(self) -> bool:
        """Out holds something before: a residual stream, or columns that are not the product's."""
        return self.residual or self.out_columns != self.n

    @property
    def chain(self) -> int:
        """Most additions on the way from a product to its sum."""
        return ceil_div(self.steps, self.parts) * self.tile.k + self.parts

    @property
    def join_unit(self) -> int:
        """Columns that a thread of the join takes."""
        return 4 if self.n % 4 == 0 and self.out_columns % 4 == 0 and self.out_offset % 4 == 0 else 1


@dataclass(frozen=True)
class Entry:
    """One entry point: the kernel for one row tile.

    Attributes:
        name: the symbol.
        rows: of its tile.
        most: rows of x that it is for; 0: any number.
        columns: of its tile.
        warps_n: warps that share the columns.
        slices: that a block has.
        threads: of a block.
        stages: of its pipelines.
        shared_bytes: of a block's rings.
        blocks: meant to share a multiprocessor.
    """

    name: str
    rows: int
    most: int
    columns: int
    warps_n: int
    slices: int
    threads: int
    stages: int
    shared_bytes: int
    blocks: int


def _entry(p: Params, target: Target, name: str, rows: int, most: int, columns: int, warps_n: int, slices: int) -> Entry | None:
    """The entry with as many stages as the target has room for; None when that is fewer than two, or registers are too few."""
    groups = slices * p.warps.k
    threads = groups * warps_n * 32
    stage = groups * p.tile.k * (columns * DTYPE_BYTES[p.w] + rows * DTYPE_BYTES[p.x])
    stages = min(p.stages, (target.shared_limit - SharedLayout.RED_ZONE) // stage)
    sums = columns // (16 * warps_n) * rows // 2
    # Beside its sums a thread needs about 80 registers.
    most_blocks = target.registers_per_sm // (threads * (sums + 80))
    if stages < 2 or sums > 64 or not most_blocks:
        return None
    fit = target.shared_per_sm // (stages * stage + target.shared_reserved)
    return Entry(name, rows, most, columns, warps_n, slices, threads, stages, stages * stage, max(1, min(4, fit, most_blocks)))


def entries(p: Params, target: Target) -> tuple[Entry, ...]:
    """The row tiles that the target has room for and that up to `rows` rows have use for; ValueError when it has room for none."""
    found: list[Entry] = []
    for rows in ROW_TILES:
        entry = _entry(p, target, f"gemm_{rows}", rows, rows, p.tile.n, p.warps.n, 1)
        if entry is None or (found and found[-1].rows >= p.rows):
            break
        found.append(entry)
    if not found:
        need = 2 * p.warps.k * p.tile.k * (p.tile.n * DTYPE_BYTES[p.w] + ROW_TILES[0] * DTYPE_BYTES[p.x])
        raise ValueError(
            f"two stages of tile.n = {p.tile.n}, tile.k = {p.tile.k} for warps.k = {p.warps.k} groups need {need} bytes of shared memory; "
            f"{target.name} has {target.shared_limit - SharedLayout.RED_ZONE}"
        )
    found[-1] = replace(found[-1], most=0)
    if p.few_rows:
        few = _entry(p, target, "gemm_few", round_up(p.few_rows, 8), p.few_rows, 16, 1, p.slices)
        if few is None:
            raise ValueError(f"few_rows: {target.name} has no room for {p.parts} pipelines in a block; set few_rows = 0 or use fewer parts")
        found = [few] if p.few_rows >= p.rows else [few, *(entry for entry in found if not entry.most or entry.most > p.few_rows)]
    return tuple(found)


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: the rings of its pipelines, in which the groups' sums meet at the end."""
    return SharedLayout.place(target, ("ring", max(entry.shared_bytes for entry in entries(p, target)), 128))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface: the slices' sums, and their join when there are several; ValueError when nothing fits."""
    made = entries(p, target)
    layout = shared(p, target)
    launches = []
    above = 0
    for entry in made:
        bounds = [f"T > {above}"] * (above > 0) + [f"T <= {entry.most}"] * (0 < entry.most < p.rows)
        grid = (f"ceil_div(T, {entry.rows})", ceil_div(p.n, entry.columns), p.products * p.slices // entry.slices)
        size = layout.total if entry.shared_bytes == layout.sizes["ring"] else entry.shared_bytes
        launches.append(Launch(entry.name, grid, entry.threads, size, when=" and ".join(bounds), programmatic=target.bulk_copy))
        above = entry.most
    heads = (p.heads,) if p.heads else ()
    arguments = [
        Argument("x", p.x, ("T", *heads, p.x_columns), doc="rows"),
        Argument("w", p.w, (*heads, p.n, p.k), doc="weights, one row per output column"),
        Argument("row_count", "i32", ("T",), "dimension", "rows of x"),
        Argument("out", p.out, ("T", *heads, p.out_columns), "inout" if p.updates else "out", "x · wᵀ" + (", added" if p.residual else "")),
    ]
    if p.slices > 1 and p.few_rows < p.rows:
        when = f"T > {p.few_rows}" if p.few_rows else ""
        join = (ceil_div(p.n, JOIN_THREADS * p.join_unit), p.products, "T")
        launches.append(Launch("gemm_join", join, JOIN_THREADS, when=when, programmatic=target.bulk_copy))
        arguments.append(Argument("partials", "f32", (p.slices, "T", p.products * p.n), "workspace", "sum of each slice of K"))
    return Contract(
        family="gemm",
        arguments=tuple(arguments),
        capacities={"T": Capacity(1, p.rows)},
        launches=tuple(launches),
        pinned={"x": p.x, "w": p.w, "out": p.out, "tile.k": p.tile.k, "warps.k": p.warps.k, "slices": p.slices},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        "entries": tuple((e.name, e.rows // 8, e.stages, e.columns, e.warps_n, e.slices, e.blocks) for e in entries(p, target)),
        "sliced": p.slices > 1 and p.few_rows < p.rows,
        "products": p.products,
        "steps": p.steps,
        "parts": p.parts,
        "threads": p.threads,
        "fragments": p.fragments,
        "tensor": p.tensor,
        "x_columns": p.x_columns,
        "out_columns": p.out_columns,
        "x_bytes": DTYPE_BYTES[p.x],
        "w_bytes": DTYPE_BYTES[p.w],
        "join_unit": p.join_unit,
        "join_threads": JOIN_THREADS,
    }


def _by_head(p: Params, inputs: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The used columns of x `[T, products, K]`, and w `[products, N, K]`."""
    x = inputs["x"].reshape(-1, p.products, p.x_columns)[:, :, p.x_offset : p.x_offset + p.k]
    return x, inputs["w"].reshape(p.products, p.n, p.k)


def _put(p: Params, inputs: Arrays, sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What out becomes by sums `[T, products, N]`, in the sums' own type."""
    columns = slice(p.out_offset, p.out_offset + p.n)
    shape = (len(sums), *((p.heads,) if p.heads else ()), p.out_columns)
    wide = np.zeros((len(sums), p.products, p.out_columns), sums.dtype)
    if p.updates:
        wide[...] = inputs["out"].reshape(wide.shape)
    wide[:, :, columns] = wide[:, :, columns] + sums if p.residual else sums
    return wide.reshape(shape)


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The product in float64."""
    x, w = (array.astype(np.float64) for array in _by_head(p, inputs))
    with np.errstate(invalid="ignore"):  # rows that hold infinities and NaNs are rows too
        sums = np.matmul(x.transpose(1, 0, 2), w.transpose(0, 2, 1)).transpose(1, 0, 2)
        return {"out": _put(p, inputs, sums)}


def ordered(p: Params, inputs: Arrays) -> npt.NDArray[Any]:
    """`out` by the kernel's own order of operations.

    It equals the host target bit for bit, whose `mma` adds its 16 products in ascending order; a GPU's `mma` adds them in another. Fused
    multiply-adds are rounded to float64 first, which changes a result about once in 2^29 additions.
    """
    x, w = (array.astype(np.float64) for array in _by_head(p, inputs))
    total = np.zeros((len(x), p.products, p.n), np.float32)
    for s in range(p.slices):
        joined = np.zeros_like(total)
        for q in range(p.warps.k):
            i = s * p.warps.k + q
            sums = np.zeros_like(total)
            for k in range(i * p.steps // p.parts * p.tile.k, min(p.k, (i + 1) * p.steps // p.parts * p.tile.k)):
                sums = (sums + x[:, :, k][:, :, None] * w[:, :, k]).astype(np.float32)
            joined = sums if q == 0 else joined + sums
        total = joined if s == 0 else total + joined
    return _put(p, inputs, total).astype(numpy_dtype(p.out))


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """From the number of additions, and the rounding of out."""
    rounding = 2.0**-8 if p.out == "bf16" else 2.0**-23 if p.residual else 0.0
    if p.tensor:
        why = "fp32 additions of exact products, each within half an ulp of the running sum"
        return {"out": Tolerance(2.0**-24 * p.chain + rounding, why)}
    return {"out": Tolerance(2.0**-22 * math.sqrt(p.chain) + rounding, "fused fp32 multiply-adds, whose roundings have random signs")}


def random_weights(p: Params, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Weights that leave the size of a row as it is."""
    shape = (*((p.heads,) if p.heads else ()), p.n, p.k)
    return (rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(p.k))).astype(numpy_dtype(p.w))


def random_inputs(
    p: Params, rng: np.random.Generator, rows: int, w: npt.NDArray[Any], sizes: npt.NDArray[Any] | float = 1.0
) -> dict[str, npt.NDArray[Any]]:
    """Rows times `sizes` `[rows]`; columns of x that are not the product's are NaN, those of out are numbers to be kept."""
    x = np.full((rows, p.products, p.x_columns), np.nan, np.float32)
    scale = np.broadcast_to(np.asarray(sizes, np.float32), rows)[:, None, None]
    x[:, :, p.x_offset : p.x_offset + p.k] = rng.standard_normal((rows, p.products, p.k), np.float32) * scale
    heads = (p.heads,) if p.heads else ()
    inputs = {"x": x.reshape(rows, *heads, p.x_columns).astype(numpy_dtype(p.x)), "w": w}
    if p.updates:
        inputs["out"] = rng.standard_normal((rows, *heads, p.out_columns), np.float32).astype(numpy_dtype(p.out))
    return inputs


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Every remainder of the row tiles that matters, rows of wildly different size, and rows that hold infinities and NaNs."""
    w = random_weights(p, rng)
    for rows in sorted({t for t in (1, 7, 8, 9, 16, 17, 31, 33, 64, 127, 128) if t <= p.rows}):
        yield Case(f"T = {rows}", random_inputs(p, rng, rows, w, 2.0 ** rng.integers(-8, 8, size=rows)))
    count = min(p.rows, 11)
    inputs = random_inputs(p, rng, count, w)
    flat = inputs["x"].reshape(count, -1)
    for row, value in zip(range(0, count, 3), (np.nan, np.inf, -np.inf, np.nan), strict=False):
        flat[row, p.x_offset + int(rng.integers(p.k))] = value
    yield Case("NaN and infinity in some rows", inputs)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Few rows, weights from memory."""
    w = random_weights(p, rng)
    for rows in (t for t in (1, 8, 16, 32, 64) if t <= p.rows):
        inputs = random_inputs(p, rng, rows, w)
        used = rows * p.products
        moved = w.nbytes + used * (p.k * DTYPE_BYTES[p.x] + p.n * DTYPE_BYTES[p.out] * (2 if p.residual else 1))
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved, flops=2 * used * p.n * p.k, cold=True)


FAMILY = Family(
    name="gemm",
    summary="x · wᵀ for few rows, plain or per head, with an optional residual add",
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
