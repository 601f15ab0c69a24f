"""`gemm`: out = x · wᵀ for few rows of x and dense weights in bf16, f32 or INT4; plain or per head, with a residual add or SwiGLU.

Definition, for row r (and head h, when there are heads), with O = `x_offset`, Q = `out_offset`:

    sum[r, h, n]            = Σ_k x[r, h, O + k] · w[h, n, k]                            k = 0 … K − 1
    out[r, h, Q + n]        = sum, or out + sum when out is a residual stream            one rounding to out's type

With SwiGLU w has 2 N rows, gate rows before up rows, and v = silu(sum of gate row n) · (sum of up row n) takes the sum's place, where
silu(g) = g / (1 + exp(−g)).

Columns of x and out beside those are neither used nor changed, so a product may read part of a wider row and write part of another.

INT4 weights are in the layouts of `kdgen.weights.prepack`, integers with a scale per 32 columns: the rows' layout, or the gate/up layout
with SwiGLU. A weight is q · scale exactly; it is never rounded.

Row-exactness: a row's bits follow from w and that row of x (and of a residual) alone. The order is fixed by the spec, never by T:

    parts       K is cut into steps of `tile.k`, the steps into `slices` · `warps.k` parts in order; part i of P has the steps
                ⌊i · steps / P⌋ … ⌊(i + 1) · steps / P⌋ − 1. What stands past K in the last step counts as zeros.
    a part      starts from zero.
                bf16 · bf16   one `mma` per 16 consecutive k, ascending
                bf16 · INT4   per group of 32 consecutive k, ascending: two `mma` from zero, of the integers, first over the columns 0 … 3
                              of each 8, then over 4 … 7; then sum ← fma(result, scale, sum). As in `moe_gemm`.
                otherwise     one fused multiply-add per k, ascending, in f32; INT4 weights are exact in f32, so that they give the bits of
                              the same weights in f32
    slice       the sums of its `warps.k` parts, added in order
    out         the sums of the slices, added in order; then out + sum for a residual, or SwiGLU; then the rounding
    SwiGLU      exp(−g) is `exp2_approx(g · −log2 e)`; 1 + that, g divided by it and the product with up are each rounded to float32. As in
                `moe_gemm`.

Rows are the 8-wide operand of `mma`, whose columns never mix, so it decides no bits how many rows share a tile, nor what they hold.
Nor do `tile.n`, `warps.n`, `few_rows` or `stages`.

Bytes: w is read once for each tile of up to 64 rows; x once for each `tile.n` rows of w, mostly from L2; with more than one slice, the
slices' sums are written and read as f32, also through L2. The 2112 × 7168 bf16 weights of a K2.6 layer's down-projections are 30.3 MB,
the gate and up rows of its shared expert on one of eight ranks 7.3 MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
from kdgen.weights import prepack
from kdgen.weights.int4 import Int4Weight, unpack

Floats = npt.NDArray[np.float32]
FloatType = Literal["bf16", "f32"]

JOIN_THREADS = 128
ROW_TILES = (8, 16, 32, 64)
LOG2_E = float(np.float32(math.log2(math.e)))


class Tile(FamilyParams):
    """What a block takes of each dimension at a time."""

    n: Annotated[int, Field(ge=16, le=256, multiple_of=16, description="rows of w: columns of out, or twice as many with SwiGLU")] = 64
    k: Annotated[Literal[64, 128, 256], Field(description="elements of K per step of a pipeline; decides bits")] = 64


class Warps(FamilyParams):
    """How the warps of a block share its work: `k` groups of `n` warps; a group has a pipeline of its own."""

    n: Annotated[int, Field(ge=1, le=16, description="warps that share the columns of a tile")] = 4
    k: Annotated[int, Field(ge=1, le=8, description="groups of warps that share a slice of K; decides bits")] = 2


class Params(FamilyParams):
    """Shapes and types, and how the work is cut."""

    n: Annotated[int, Field(ge=1, le=1 << 20, description="columns of the result: rows of w, or half of them with SwiGLU")]
    k: Annotated[int, Field(ge=4, le=1 << 20, description="the reduced dimension")]
    heads: Annotated[
        int, Field(ge=0, le=1024, description="independent products, one per head; 0: one product, arrays without a head axis")
    ] = 0
    rows: Annotated[int, Field(ge=1, le=65535, description="most rows of x")] = 512
    x: Annotated[FloatType, Field(description="type of x")] = "bf16"
    w: Annotated[Literal["bf16", "f32", "int4"], Field(description="type of the weights")] = "bf16"
    out: Annotated[FloatType, Field(description="type of out")] = "bf16"
    epilogue: Annotated[
        Literal["none", "swiglu"], Field(description="swiglu: w has gate rows, then up rows; out = silu(gate · x) · (up · x)")
    ] = "none"
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
        Field(
            description="up to so many rows, blocks of 16 rows of w (32 of INT4) take all slices, "
            "which saves the launch that joins them; 0: never"
        ),
    ] = 0
    stages: Annotated[int, Field(ge=2, le=8, description="most steps in flight and in use per pipeline; fewer where memory is short")] = 4
    early_weights: Annotated[
        bool, Field(description="fetch the first weights before the launch just before has ended; it must not be what writes them")
    ] = False

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.int4:
            self._check_atoms()
        if self.gated and self.residual:
            raise ValueError("epilogue = swiglu makes a new value, which no residual stream is the sum of; set residual = false")
        floats = "bf16" if self.int4 else self.w
        pieces = (("k", self.x, self.k), ("k", floats, self.k), ("x_width", self.x, self.x_columns), ("x_offset", self.x, self.x_offset))
        for name, dtype, size in pieces:
            unit = 16 // DTYPE_BYTES[dtype]
            if size % unit:
                raise ValueError(f"{name} = {size} is not a multiple of {unit}: {dtype} is fetched 16 bytes at a time")
        if self.x_offset + self.k > self.x_columns:
            raise ValueError(f"columns {self.x_offset} … {self.x_offset + self.k - 1} of x do not fit x_width = {self.x_columns}")
        if self.out_offset + self.n > self.out_columns:
            raise ValueError(f"columns {self.out_offset} … {self.out_offset + self.n - 1} of out do not fit out_width = {self.out_columns}")
        return self

    def _check_atoms(self) -> None:
        rows = prepack.ATOM_ROWS // 2 if self.gated else prepack.ATOM_ROWS
        for name, size, unit in (("n", self.n, rows), ("k", self.k, prepack.ATOM_COLUMNS), ("tile.n", self.tile.n, prepack.ATOM_ROWS)):
            if size % unit:
                raise ValueError(
                    f"{name} = {size} is not a multiple of {unit}: int4 weights are atoms of {prepack.ATOM_ROWS} rows of w"
                    f"{', half of them gate rows,' if self.gated else ''} and {prepack.ATOM_COLUMNS} columns"
                )

    @model_validator(mode="after")
    def _work_fits(self) -> Self:
        if self.tile.n % (16 * self.warps.n) or self.fragments not in (1, 2, 4):
            raise ValueError(f"tile.n = {self.tile.n} must be 16, 32 or 64 columns for each of warps.n = {self.warps.n} warps")
        if self.threads > 512:
            raise ValueError(f"warps.n · warps.k = {self.threads // 32} warps; at most 16 are allowed")
        if (self.gated or self.int4) and self.warps.n & (self.warps.n - 1):
            reason = "int4: warps copy atoms by turns" if self.int4 else "swiglu: gate and up rows are copied by turns"
            raise ValueError(f"warps.n = {self.warps.n} must be a power of two for {reason}")
        widest = max(DTYPE_BYTES[self.x], 0 if self.int4 else DTYPE_BYTES[self.w])
        if self.tile.k * widest > 512:
            raise ValueError(f"tile.k = {self.tile.k} of f32 is more than 128, the most that 16-byte pieces per lane allow")
        if self.parts > self.steps:
            raise ValueError(
                f"slices · warps.k = {self.parts} parts, but K = {self.k} has only {self.steps} steps of tile.k = {self.tile.k}"
            )
        if self.few_rows and not (self.slices > 1 and self.parts <= 16):
            raise ValueError(f"few_rows needs 2 or more slices, and at most 16 parts; got {self.slices} slices of {self.warps.k} parts")
        narrow = self.few_tile if self.few_rows else self.tile.n
        for name, size in (("rows of w / tile", ceil_div(self.weight_rows, narrow)), ("heads · slices", max(1, self.heads) * self.slices)):
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
    def int4(self) -> bool:
        """The weights are integers and scales, prepacked."""
        return self.w == "int4"

    @property
    def gated(self) -> bool:
        """The weights are gate and up rows, whose sums SwiGLU joins."""
        return self.epilogue == "swiglu"

    @property
    def weight_rows(self) -> int:
        """Rows of w, of each head."""
        return self.n * (2 if self.gated else 1)

    @property
    def few_tile(self) -> int:
        """Rows of w that a block for few rows has."""
        return prepack.ATOM_ROWS if self.int4 else 16

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
        return self.x == "bf16" and self.w != "f32"

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
        whole = self.n % 4 == 0 and self.out_columns % 4 == 0 and self.out_offset % 4 == 0
        # It holds all that it adds; of gate and up it would be too much for its registers.
        return 4 if whole and not (self.gated and self.slices > 16) else 1


@dataclass(frozen=True)
class Entry:
    """One entry point: the kernel for one row tile.

    Attributes:
        name: the symbol.
        rows: of its tile.
        most: rows of x that it is for; 0: any number.
        columns: rows of w of its tile: columns of the product, of which SwiGLU makes half as many.
        warps_n: warps that share the columns.
        slices: that a block has.
        threads: of a block.
        stages: of its pipelines.
        shared_bytes: of a block's rings, in which its groups' sums meet later.
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


def stage_bytes(p: Params, rows: int, columns: int) -> int:
    """Bytes of a step of one pipeline: `columns` rows of w, `rows` rows of x."""
    if p.int4:
        weights = columns // prepack.ATOM_ROWS * (p.tile.k // prepack.ATOM_COLUMNS) * prepack.ATOM_WORDS * 4
    else:
        weights = columns * p.tile.k * DTYPE_BYTES[p.w]
    return weights + rows * p.tile.k * DTYPE_BYTES[p.x]


def _entry(p: Params, target: Target, name: str, rows: int, most: int, columns: int, warps_n: int, slices: int) -> Entry | None:
    """The entry with as many stages as the target has room for; None when that is fewer than two, or registers are too few."""
    groups = slices * p.warps.k
    threads = groups * warps_n * 32
    limit = target.shared_limit - SharedLayout.RED_ZONE
    stage = groups * stage_bytes(p, rows, columns)
    stages = min(p.stages, limit // stage)
    size = max(stages * stage, (groups - 1) * columns * rows * 4)
    sums = columns // (16 * warps_n) * rows // 2
    # Beside its sums a thread needs about 80 registers.
    if stages < 2 or size > limit or sums > 64 or threads * (sums + 80) > target.registers_per_sm:
        return None
    # Of INT4 it also holds 8 registers of integers and 2 scales for each 16 rows of its warp: fewer blocks rather than spills.
    more = columns // (16 * warps_n) * 10 if p.int4 and p.tensor else 0
    most_blocks = max(1, target.registers_per_sm // (threads * (sums + 80 + more)))
    fit = target.shared_per_sm // (size + target.shared_reserved)
    return Entry(name, rows, most, columns, warps_n, slices, threads, stages, size, max(1, min(4, fit, most_blocks)))


def entries(p: Params, target: Target) -> tuple[Entry, ...]:
    """The row tiles that the target has room for and that up to `rows` rows have use for; ValueError when it has room for none."""
    found: list[Entry] = []
    for rows in ROW_TILES:
        entry = _entry(p, target, f"gemm_{rows}", rows, rows, p.tile.n, p.warps.n, 1)
        if entry is None or (found and found[-1].rows >= p.rows):
            break
        found.append(entry)
    if not found:
        need = 2 * p.warps.k * stage_bytes(p, ROW_TILES[0], p.tile.n)
        raise ValueError(
            f"two stages of tile.n = {p.tile.n}, tile.k = {p.tile.k} for warps.k = {p.warps.k} groups need {need} bytes of shared memory; "
            f"{target.name} has {target.shared_limit - SharedLayout.RED_ZONE}"
        )
    found[-1] = replace(found[-1], most=0)
    if p.few_rows:
        few = _entry(p, target, "gemm_few", round_up(p.few_rows, 8), p.few_rows, p.few_tile, 1, p.slices)
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
        grid = (f"ceil_div(T, {entry.rows})", ceil_div(p.weight_rows, entry.columns), p.products * p.slices // entry.slices)
        size = layout.total if entry.shared_bytes == layout.sizes["ring"] else entry.shared_bytes
        launches.append(Launch(entry.name, grid, entry.threads, size, when=" and ".join(bounds), programmatic=target.bulk_copy))
        above = entry.most
    heads = (p.heads,) if p.heads else ()
    result = "silu(gate) · up" if p.gated else "x · wᵀ" + (", added" if p.residual else "")
    if p.int4:
        atoms = (ceil_div(p.weight_rows, prepack.ATOM_ROWS), p.k // prepack.ATOM_COLUMNS, prepack.ATOM_WORDS)
        weights = Argument("w", "u32", (*heads, *atoms), doc="weights, prepacked")
    else:
        order = "gate rows, then up rows" if p.gated else "one row per output column"
        weights = Argument("w", p.w, (*heads, p.weight_rows, p.k), doc=f"weights, {order}")
    arguments = [
        Argument("x", p.x, ("T", *heads, p.x_columns), doc="rows"),
        weights,
        Argument("row_count", "i32", ("T",), "dimension", "rows of x"),
        Argument("out", p.out, ("T", *heads, p.out_columns), "inout" if p.updates else "out", result),
    ]
    if p.slices > 1 and p.few_rows < p.rows:
        when = f"T > {p.few_rows}" if p.few_rows else ""
        join = (ceil_div(p.n, JOIN_THREADS * p.join_unit), p.products, "T")
        launches.append(Launch("gemm_join", join, JOIN_THREADS, when=when, programmatic=target.bulk_copy))
        arguments.append(Argument("partials", "f32", (p.slices, "T", p.products * p.weight_rows), "workspace", "sum of each slice of K"))
    return Contract(
        family="gemm",
        arguments=tuple(arguments),
        capacities={"T": Capacity(1, p.rows)},
        launches=tuple(launches),
        pinned={
            **{name: getattr(p, name) for name in ("x", "w", "out", "epilogue", "slices")},
            **{"tile.k": p.tile.k, "warps.k": p.warps.k},
        },
        layouts={"w": prepack.GATE_UP_LAYOUT if p.gated else prepack.ROWS_LAYOUT} if p.int4 else {},
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
        "int4": p.int4,
        "gated": p.gated,
        "weight_rows": p.weight_rows,
        "few_tile": p.few_tile,
        "atom_bytes": prepack.ATOM_WORDS * 4,
        "log2_e": LOG2_E,
        "x_columns": p.x_columns,
        "out_columns": p.out_columns,
        "x_bytes": DTYPE_BYTES[p.x],
        "w_bytes": 0 if p.int4 else DTYPE_BYTES[p.w],
        "join_unit": p.join_unit,
        "join_threads": JOIN_THREADS,
    }


def matrices(p: Params, w: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The argument `w` as plain matrices `[(heads,) weight_rows, K]`, exactly, gate rows before up rows; INT4 as f32."""
    if not p.int4:
        return w
    if p.gated:
        return np.concatenate([half.dequantize() for half in prepack.unprepack_gate_up(w)], axis=-2)
    return prepack.unprepack(w).dequantize()


def _by_head(p: Params, inputs: Arrays) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The used columns of x `[T, products, K]`, and w `[products, weight_rows, K]`."""
    x = inputs["x"].reshape(-1, p.products, p.x_columns)[:, :, p.x_offset : p.x_offset + p.k]
    return x, matrices(p, inputs["w"]).reshape(p.products, p.weight_rows, p.k)


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
    with np.errstate(invalid="ignore", over="ignore"):  # rows that hold infinities and NaNs are rows too
        sums = np.matmul(x.transpose(1, 0, 2), w.transpose(0, 2, 1)).transpose(1, 0, 2)
        if p.gated:
            gate, up = sums[..., : p.n], sums[..., p.n :]
            sums = gate / (1 + np.exp(-gate)) * up
        return {"out": _put(p, inputs, sums)}


def ordered(p: Params, inputs: Arrays, exp2: Callable[[Floats], Floats] = np.exp2) -> npt.NDArray[Any]:
    """`out` by the kernel's own order of operations.

    It equals the host target bit for bit, whose `mma` adds its 16 products in ascending order; a GPU's `mma` adds them in another. Fused
    multiply-adds are rounded to float64 first, which changes a result about once in 2^29 additions.

    Args:
        p: the parameters.
        inputs: the kernel's arguments.
        exp2: 2 to some power, as the target computes it; numpy's differs from C's in the last bit now and then.
    """
    x, w = (array.astype(np.float64) for array in _by_head(p, inputs))
    total = np.zeros((len(x), p.products, p.weight_rows), np.float32)
    for s in range(p.slices):
        joined = np.zeros_like(total)
        for q in range(p.warps.k):
            i = s * p.warps.k + q
            begin, end = i * p.steps // p.parts * p.tile.k, min(p.k, (i + 1) * p.steps // p.parts * p.tile.k)
            sums = _integer_part(p, inputs, x, begin, end) if p.int4 and p.tensor else _float_part(x, w, begin, end)
            joined = sums if q == 0 else joined + sums
        total = joined if s == 0 else total + joined
    if p.gated:
        gate, up = total[..., : p.n], total[..., p.n :]
        total = gate / (np.float32(1) + exp2(gate * np.float32(-LOG2_E))) * up
    return _put(p, inputs, total).astype(numpy_dtype(p.out))


def _float_part(x: npt.NDArray[np.float64], w: npt.NDArray[np.float64], begin: int, end: int) -> Floats:
    """The sums of the columns from `begin` to before `end` of K: one after another."""
    sums = np.zeros((len(x), *w.shape[:2]), np.float32)
    for k in range(begin, end):
        sums = (sums + x[:, :, k][:, :, None] * w[:, :, k]).astype(np.float32)
    return sums


def _integer_part(p: Params, inputs: Arrays, x: npt.NDArray[np.float64], begin: int, end: int) -> Floats:
    """As `_float_part`, by groups of 32 columns: their integers' sum, then its scale."""
    halves = prepack.unprepack_gate_up(inputs["w"]) if p.gated else (prepack.unprepack(inputs["w"]),)
    shape = (p.products, p.weight_rows, -1)
    integers = np.concatenate([unpack(half.packed) for half in halves], axis=-2).reshape(shape).astype(np.float64)
    scales = np.concatenate([half.scale for half in halves], axis=-2).reshape(shape).astype(np.float64)
    sums = np.zeros((len(x), *shape[:2]), np.float32)
    # Columns of a group in the order of the two `mma`: half, pair, share, which of the pair.
    columns = np.arange(prepack.GROUP).reshape(4, 2, 2, 2).transpose(1, 2, 0, 3).ravel()
    for group in range(begin // prepack.GROUP, end // prepack.GROUP):
        result = np.zeros_like(sums)
        for k in group * prepack.GROUP + columns:
            result = (result + x[:, :, k][:, :, None] * integers[:, :, k]).astype(np.float32)
        sums = (sums + result * scales[:, :, group]).astype(np.float32)
    return sums


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """From the number of additions, and the rounding of out; what SwiGLU multiplies has two such errors, and its own roundings."""
    rounding = 2.0**-8 if p.out == "bf16" else 2.0**-23 if p.residual else 0.0
    # The largest gate and the largest up are seldom those of one column; the largest result is then less than their product.
    both, own = (8, 2.0**-20) if p.gated else (1, 0.0)
    if p.tensor:
        why = "fp32 additions of exact products, each within half an ulp of the running sum"
        return {"out": Tolerance(both * 2.0**-24 * p.chain + own + rounding, why)}
    why = "fused fp32 multiply-adds, whose roundings have random signs"
    return {"out": Tolerance(both * 2.0**-22 * math.sqrt(p.chain) + own + rounding, why)}


def random_weights(p: Params, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Weights that leave the size of a row as it is."""
    heads = (p.heads,) if p.heads else ()
    if not p.int4:
        shape = (*heads, p.weight_rows, p.k)
        return (rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(p.k))).astype(numpy_dtype(p.w))

    def packed() -> Int4Weight:  # every integer −8 … 7; their mean square is 21.5
        words = rng.integers(0, 1 << 32, size=(*heads, p.n, p.k // 8), dtype=np.uint32)
        scale = rng.uniform(0.5, 1.5, size=(*heads, p.n, p.k // prepack.GROUP)) / (4.6 * math.sqrt(p.k))
        return Int4Weight(words, scale.astype(numpy_dtype("bf16")))

    return prepack.prepack_gate_up(packed(), packed()) if p.gated else prepack.prepack(packed())


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
    small = p.products * p.weight_rows * p.k <= 1 << 15
    for rows in sorted({t for t in (1, 7, 8, 9, 16, 17, 31, 33, 64, 127, 128, 512) if t <= p.rows and (t < 512 or small)}):
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
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved, flops=2 * used * p.weight_rows * p.k, cold=True)


FAMILY = Family(
    name="gemm",
    summary="x · wᵀ for few rows, of plain or 4-bit weights, alone or per head, with a residual add or SwiGLU",
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
