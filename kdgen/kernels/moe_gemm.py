"""`moe_gemm`: the experts' products over routed rows: gate and up projection with SwiGLU, or the down projection.

Definition. Entry i = row · top_k + slot of a `moe_plan` belongs to expert e when i is among sorted_rows[expert_offsets[e] :
expert_offsets[e + 1]]; w_e is the expert's matrix.

    gate_up   out[row, slot] = silu(w_gate_e · x[row]) · (w_up_e · x[row])          silu(v) = v / (1 + exp(−v))
    down      out[row, slot] = w_down_e · x[row, slot]

Entries in no expert's list (padding) are left as they were. Weights are 4-bit integers with a scale per 32 columns in a layout of
`kdgen.weights.prepack`, or plain bf16 or f32 matrices, gate rows before up rows.

Order of operations, so that every bit is determined and none depends on T, on the routing, or on other rows. K is cut into steps of 64
columns, a step into two groups of 32. `slices` · `parts` runs of as many steps each are the parts; `parts` in a row are a slice. A part's
sum starts at 0 and takes its groups in ascending order:

    x bf16    int4 weights   two `mma` from zero, first over the columns 0 … 3 of each 8, then over 4 … 7, of the integers; then
                             sum ← fma(result, scale, sum). Integers and scales are exact in bf16: a weight is never rounded.
              bf16 weights   the same two `mma`, on the sum itself
    x f32     share t = 0 … 3 of a group is its columns 8 t … 8 t + 7, by fused multiply-adds from 0 in ascending order; share t's sum ←
              fma(result, scale, sum) for int4, sum + result otherwise; at the part's end (share 0 + share 1) + (share 2 + share 3)

The parts of a slice are added in ascending order, then the slices. exp(−v) is `exp2_approx(v · −log2 e)`; v / (1 + that) and the product
with up are rounded to float32, and the result once to its type.

An entry is one column of `mma` (or a sum of its own), so row tiles and teams, chosen by T, have no influence on bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.kernels import moe_plan
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target
from kdgen.weights import prepack
from kdgen.weights.int4 import Int4Weight

#: Columns of K that are multiplied at a time.
STEP = 64

#: Routings of a workload, and how uneven the uneven ones are: with 384 experts and top-8 the most popular one is in half of the rows.
TURNS = 24
SKEW = 0.8

#: Most steps of a part: its loop is unrolled.
MOST_STEPS = 16

Floats = npt.NDArray[np.float64]


class Launching(FamilyParams):
    """How launches of up to so many rows are cut; without influence on bits."""

    rows: Annotated[int, Field(ge=1, le=65536, description="largest T it is for")]
    row_tile: Annotated[Literal[8, 16, 32], Field(description="rows of an expert that share one reading of its weights")] = 8
    wide: Annotated[bool, Field(description="a warp per part instead of one per slice: more copies in flight when units are few")] = False
    stages: Annotated[int, Field(ge=2, le=8, description="steps of a warp's ring in shared memory")] = 4
    resident: Annotated[bool, Field(description="x of a tile is fetched once for all slabs of a warp's run; needs slices · parts = 1")] = (
        False
    )


class Params(FamilyParams):
    """Shapes, types, and how the product is cut."""

    role: Annotated[Literal["gate_up", "down"], Field(description="two projections with SwiGLU, or one")]
    experts: Annotated[int, Field(ge=1, le=4096, description="most experts of a launch")]
    top_k: Annotated[int, Field(ge=1, le=16, description="experts of a row")]
    n: Annotated[int, Field(ge=16, le=65536, description="values of an output row")]
    k: Annotated[int, Field(ge=64, le=65536, multiple_of=64, description="values of an input row")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of a launch")] = 512
    weights: Annotated[Literal["int4", "bf16", "f32"], Field(description="of the experts")] = "int4"
    x_dtype: Annotated[Literal["bf16", "f32"], Field(description="of the rows; bf16 multiplies on tensor cores")] = "bf16"
    out_dtype: Annotated[Literal["bf16", "f32"], Field(description="of the result")] = "bf16"
    slices: Annotated[int, Field(ge=1, le=16, description="slices of K: a warp each")]
    parts: Annotated[int, Field(ge=1, le=64, description="parts of a slice, summed one after another")] = 1
    warps: Annotated[int, Field(ge=1, le=16, description="warps of a block, in teams of `slices`")] = 8
    launches: Annotated[tuple[Launching, ...], Field(min_length=1, max_length=8, description="by T, ascending", strict=False)] = (
        Launching(rows=65536),
    )
    early: Annotated[
        bool, Field(description="read plan and weights before the launch just before has ended: it may write x, but neither of them")
    ] = False
    blocks: Annotated[int, Field(ge=0, le=65535, description="blocks of a launch; 0: as many as the target's multiprocessors hold")] = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        unit = self.slab
        if self.n % unit:
            raise ValueError(f"n = {self.n} must be a multiple of {unit} for {self.role}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} is more than experts = {self.experts}")
        if self.weights == "f32" and self.x_dtype == "bf16":
            raise ValueError("f32 weights need f32 rows; got x_dtype = bf16")
        cuts = self.slices * self.parts
        if self.steps % cuts:
            raise ValueError(f"slices · parts = {cuts} does not divide the {self.steps} steps of k = {self.k}")
        if self.part_steps > MOST_STEPS:
            raise ValueError(f"a part has {self.part_steps} steps, at most {MOST_STEPS} are allowed: raise parts")
        if self.warps % self.slices:
            raise ValueError(f"slices = {self.slices} does not divide warps = {self.warps}")
        before = 0
        for item in self.launches:
            if item.rows <= before:
                raise ValueError(f"launches must be for ascending rows; got {item.rows} after {before}")
            before = item.rows
            if item.stages > self.part_steps:
                raise ValueError(f"stages = {item.stages} is more than the {self.part_steps} steps of a part")
            if item.wide and cuts > 16:
                raise ValueError(f"wide needs a warp for each of the {cuts} parts; a block has at most 16")
            if item.resident and cuts > 1:
                raise ValueError(f"resident needs slices · parts = 1; got {cuts}")
            if item.row_tile > 8 and not self.matrix:
                raise ValueError(f"row_tile = {item.row_tile} needs bf16 rows; allowed for f32: 8")
        if before < self.rows:
            raise ValueError(f"no launch is for more than {before} rows, but rows = {self.rows}")
        return self

    @property
    def slab(self) -> int:
        """Values of an output row that a unit makes from 32 weight rows."""
        return 16 if self.role == "gate_up" else 32

    @property
    def slabs(self) -> int:
        """Units of an output row."""
        return self.n // self.slab

    @property
    def steps(self) -> int:
        """Steps of K."""
        return self.k // STEP

    @property
    def part_steps(self) -> int:
        """Steps of a part."""
        return self.steps // (self.slices * self.parts)

    @property
    def matrix(self) -> bool:
        """The product is by `mma`."""
        return self.x_dtype == "bf16"

    @property
    def weight_rows(self) -> int:
        """Rows of an expert's matrix."""
        return self.n * (2 if self.role == "gate_up" else 1)

    @property
    def used_launches(self) -> tuple[Launching, ...]:
        """The launches that some T ≤ rows needs."""
        return tuple(item for i, item in enumerate(self.launches) if i == 0 or self.launches[i - 1].rows < self.rows)


def team_of(p: Params, item: Launching) -> int:
    """Warps that work on a unit together."""
    return p.slices * p.parts if item.wide else p.slices


def warps_of(p: Params, item: Launching) -> int:
    """Warps of a block."""
    team = team_of(p, item)
    return max(p.warps // team, 1) * team


def buffers_of(p: Params, item: Launching) -> int:
    """Buffers through which a team adds its sums; two save a barrier per unit."""
    return 2 if item.row_tile == 8 and not item.wide else 1


def weight_bytes(p: Params) -> int:
    """Bytes of a step's weights in the ring: 32 rows × 64 columns, and scales."""
    return 1152 if p.weights == "int4" else 32 * STEP * DTYPE_BYTES[p.weights]


def slot_bytes(p: Params, item: Launching) -> int:
    """Bytes of a step in the ring: weights, then the rows' part of x unless that is resident."""
    return weight_bytes(p) + (0 if item.resident else item.row_tile * STEP * DTYPE_BYTES[p.x_dtype])


def regions(p: Params, item: Launching) -> dict[str, int]:
    """Bytes of the regions in shared memory that a launch needs."""
    warps, team = warps_of(p, item), team_of(p, item)
    return {
        "ring": warps * (item.stages * slot_bytes(p, item) + item.resident * item.row_tile * p.k * DTYPE_BYTES[p.x_dtype]),
        "exchange": buffers_of(p, item) * warps * item.row_tile * 128 if team > 1 else 0,
    }


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block, of whichever launch needs most: experts with entries, sums on their way, the ring."""
    needs = [regions(p, item) for item in p.used_launches]
    most = {name: max(need[name] for need in needs) for name in needs[0]}
    return SharedLayout.place(
        target,
        ("counts", 16 * 4, 16),
        ("begins", (p.experts + 1) * 4, 16),
        ("starts", (p.experts + 1) * 4, 16),
        ("numbers", p.experts * 4, 16),
        ("exchange", most["exchange"], 128),
        ("ring", most["ring"], 128),
    )


def launch_bytes(p: Params, target: Target, item: Launching) -> int:
    """Shared memory of a launch: the ring is last, and as long as it needs."""
    layout = shared(p, target)
    need = regions(p, item)["ring"]
    return layout.total if need == layout.sizes["ring"] else layout.offsets["ring"] + need


def blocks_per_sm(p: Params, target: Target, item: Launching) -> int:
    """Blocks meant to share a multiprocessor: two when shared memory and registers suffice."""
    fits = 2 * (launch_bytes(p, target, item) + target.shared_reserved) <= target.shared_per_sm
    return 2 if fits and item.row_tile == 8 and warps_of(p, item) <= 8 and p.matrix else 1


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; ValueError when a launch needs more shared memory than the target has."""
    launches = []
    above = 0
    for number, item in enumerate(p.used_launches):
        size = launch_bytes(p, target, item)
        if size > target.shared_limit:
            raise ValueError(
                f"launches[{number}]: {size} bytes of shared memory; {target.name} has {target.shared_limit}: "
                "fewer stages, warps or rows per tile"
            )
        warps = warps_of(p, item)
        # The host's blocks are few, so that a team works off several units, as on a GPU.
        blocks = p.blocks or (5 if target.is_host else target.sms * blocks_per_sm(p, target, item))
        conditions = [f"T > {above}"] * (number > 0) + [f"T <= {item.rows}"] * (item.rows < p.rows)
        launches.append(
            Launch(
                f"moe_gemm_{number}",
                (f"min(ceil_div(T * {p.top_k * p.slabs}, {warps // team_of(p, item)}), {blocks})", 1, 1),
                warps * 32,
                size,
                when=" and ".join(conditions),
                programmatic=target.bulk_copy,
            )
        )
        above = item.rows
    gate_up = p.role == "gate_up"
    if p.weights == "int4":
        weights = Argument("w", "u32", ("E", p.slabs, p.steps, prepack.ATOM_WORDS), doc="the experts' matrices, prepacked")
    else:
        rows = "gate rows, then up rows" if gate_up else "a row per output value"
        weights = Argument("w", p.weights, ("E", p.weight_rows, p.k), doc=f"the experts' matrices: {rows}")
    layout = prepack.GATE_UP_LAYOUT if gate_up else prepack.ROWS_LAYOUT
    return Contract(
        family="moe_gemm",
        arguments=(
            Argument("x", p.x_dtype, ("T", p.k) if gate_up else ("T", p.top_k, p.k), doc="rows" if gate_up else "entries"),
            weights,
            Argument("expert_count", "i32", ("E",), "dimension", "experts"),
            Argument("expert_offsets", "i32", ("E + 1",), doc="where each expert's entries begin in sorted_rows, from moe_plan"),
            Argument("sorted_rows", "i32", (f"T * {p.top_k}",), doc="entries (row · top_k + slot) by expert, from moe_plan"),
            Argument("out", p.out_dtype, ("T", p.top_k, p.n), "inout", "results of the entries; those in no list stay as they are"),
        ),
        capacities={"T": Capacity(1, p.rows), "E": Capacity(1, p.experts)},
        launches=tuple(launches),
        pinned={name: getattr(p, name) for name in ("role", "weights", "x_dtype", "out_dtype", "slices", "parts")},
        layouts={"w": layout} if p.weights == "int4" else {},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    used = p.used_launches
    return {
        "gate_up": p.role == "gate_up",
        "matrix": p.matrix,
        "slab": p.slab,
        "slabs": p.slabs,
        "steps": p.steps,
        "part_steps": p.part_steps,
        "weight_bytes": weight_bytes(p),
        "atom_bytes": prepack.ATOM_WORDS * 4,
        "x_size": DTYPE_BYTES[p.x_dtype],
        "weight_size": 0 if p.weights == "int4" else DTYPE_BYTES[p.weights],
        "weight_rows": p.weight_rows,
        "log2_e": float(np.float32(math.log2(math.e))),
        "entry_names": tuple(f"moe_gemm_{i}" for i in range(len(used))),
        "entry_columns": tuple(item.row_tile // 8 for item in used),
        "entry_teams": tuple(team_of(p, item) for item in used),
        "entry_warps": tuple(warps_of(p, item) for item in used),
        "entry_stages": tuple(item.stages for item in used),
        "entry_buffers": tuple(buffers_of(p, item) for item in used),
        "entry_resident": tuple(item.resident for item in used),
        "entry_blocks": tuple(blocks_per_sm(p, target, item) for item in used),
    }


def matrices(p: Params, weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The matrices `[…, weight_rows, k]` in f32 or bf16 that the argument `w` holds, exactly; gate rows before up rows."""
    if p.weights != "int4":
        return weights
    if p.role == "down":
        return prepack.unprepack(weights).dequantize()
    return np.concatenate([half.dequantize() for half in prepack.unprepack_gate_up(weights)], axis=-2)


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The definition in float64."""
    offsets, listed = inputs["expert_offsets"], inputs["sorted_rows"]
    out = inputs["out"].astype(np.float64).reshape(-1, p.n)
    rows = inputs["x"].reshape(-1, p.k)
    for e in range(len(offsets) - 1):
        mine = listed[offsets[e] : offsets[e + 1]]
        if len(mine):
            taken = rows[mine // p.top_k if p.role == "gate_up" else mine].astype(np.float64)
            product = taken @ matrices(p, inputs["w"][e : e + 1])[0].astype(np.float64).T
            if p.role == "gate_up":
                gate, up = product[:, : p.n], product[:, p.n :]
                with np.errstate(over="ignore"):
                    product = gate / (1 + np.exp(-gate)) * up
            out[mine] = product
    return {"out": out.reshape(inputs["out"].shape)}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """One rounding to the result's type, and fp32 sums of terms of random sign."""
    sums = 2.0**-24 * (64 + 8 * math.sqrt(p.k))
    last = 2.0**-8 if p.out_dtype == "bf16" else 0.0
    why = "fp32 sums of terms of random sign and exp2, relative to the largest result; then at most half an ulp of its type"
    return {"out": Tolerance(last + 2 * sums, why)}


def _plan_params(p: Params, experts: int) -> moe_plan.Params:
    return moe_plan.Params(experts=experts, top_k=p.top_k, rows=p.rows)


def planned(p: Params, ids: npt.NDArray[np.int32], experts: int) -> dict[str, npt.NDArray[Any]]:
    """`expert_offsets` and `sorted_rows` of some choices `[T, top_k]`."""
    plan = moe_plan.reference(_plan_params(p, experts), {"topk_ids": ids})
    return {name: plan[name] for name in ("expert_offsets", "sorted_rows")}


def choices(p: Params, inputs: Arrays) -> npt.NDArray[np.int32]:
    """The choices `[T, top_k]` that a plan was made from; −1 for entries in no list."""
    offsets, listed = inputs["expert_offsets"], inputs["sorted_rows"]
    ids = np.full(len(listed), -1, np.int32)
    ids[listed[: offsets[-1]]] = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    return ids.reshape(-1, p.top_k)


def take_rows(p: Params, inputs: Arrays, rows: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
    """Inputs of some rows alone, planned anew."""
    experts = len(inputs["expert_offsets"]) - 1
    return {
        **inputs,
        "x": inputs["x"][rows],
        "out": inputs["out"][rows],
        **planned(p, choices(p, inputs)[rows], experts),
    }


def random_weights(p: Params, rng: np.random.Generator, experts: int) -> npt.NDArray[Any]:
    """The argument `w`: every integer −8 … 7 where weights are 4-bit, scales of the size that keeps results near 1."""
    shape = (experts, p.weight_rows, p.k)
    if p.weights != "int4":
        return (rng.normal(size=shape) / math.sqrt(p.k)).astype(numpy_dtype(p.weights))

    def packed(rows: int) -> Int4Weight:
        words = rng.integers(0, 1 << 32, size=(experts, rows, p.k // 8), dtype=np.uint32)
        scale = rng.uniform(0.5, 1.5, size=(experts, rows, p.k // prepack.GROUP)) / (4.6 * math.sqrt(p.k))
        return Int4Weight(words, scale.astype(numpy_dtype("bf16")))

    return prepack.prepack_gate_up(packed(p.n), packed(p.n)) if p.role == "gate_up" else prepack.prepack(packed(p.n))


def make_inputs(p: Params, rng: np.random.Generator, ids: npt.NDArray[np.int32], weights: npt.NDArray[Any]) -> dict[str, Any]:
    """A launch's arguments for some choices `[T, top_k]`; rows differ in size."""
    rows = len(ids)
    shape = (rows, p.k) if p.role == "gate_up" else (rows, p.top_k, p.k)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-2, 2, size=(*shape[:-1], 1))
    return {
        "x": x.astype(numpy_dtype(p.x_dtype)),
        "w": weights,
        **planned(p, ids, len(weights)),
        "out": np.full((rows, p.top_k, p.n), 0.5, numpy_dtype(p.out_dtype)),
    }


def random_choices(p: Params, rng: np.random.Generator, rows: int, experts: int, skew: float = 0.0) -> npt.NDArray[np.int32]:
    """Distinct experts per row `[rows, top_k]`; the i-th most popular is drawn with weight (i + 1)^−skew."""
    popularity = -skew * np.log1p(rng.permutation(experts))
    keys = popularity + rng.gumbel(size=(rows, experts))
    return np.argsort(-keys, axis=1)[:, : p.top_k].astype(np.int32)


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Few and many rows; experts with no row, with one, with all; many experts; every remainder of the row tile that matters; padding."""
    experts = min(p.experts, p.top_k + 4)
    weights = random_weights(p, rng, experts)
    for rows in sorted({t for t in (1, 2, 5, 19) if t <= p.rows}):
        yield Case(f"T = {rows}", make_inputs(p, rng, random_choices(p, rng, rows, experts), weights))
    for rows in sorted({t for t in (8, 9, 33) if t <= p.rows}):
        same = np.broadcast_to(rng.permutation(experts)[: p.top_k].astype(np.int32), (rows, p.top_k))
        yield Case(f"{rows} rows to the same experts", make_inputs(p, rng, np.ascontiguousarray(same), weights))
    rows = min(p.rows, 12)
    ids = random_choices(p, rng, rows, experts)
    ids[rng.random(rows) < 0.4] = -1
    yield Case("padding", make_inputs(p, rng, ids, weights))
    ids = np.full((rows, p.top_k), -1, np.int32)
    yield Case("no valid row", make_inputs(p, rng, ids, weights))
    ids[-1, -1] = experts - 1
    yield Case("one entry", make_inputs(p, rng, ids, weights))
    # As many experts as there may be, if they are small: most have no entry.
    many = min(p.experts, (8 << 20) // (weights.nbytes // experts))
    if many > experts:
        weights = random_weights(p, rng, many)
        yield Case(f"{many} experts", make_inputs(p, rng, random_choices(p, rng, min(p.rows, 3), many), weights))
        yield Case("the last experts", make_inputs(p, rng, many - 1 - random_choices(p, rng, min(p.rows, 9), p.top_k + 1), weights))


def moved_bytes(p: Params, inputs: Arrays) -> int:
    """Bytes of the weights that the launch must read, of its rows and of its results."""
    active = int((np.diff(inputs["expert_offsets"]) > 0).sum())
    entries = int(inputs["expert_offsets"][-1])
    return active * int(inputs["w"][0].nbytes) + int(inputs["x"].nbytes) + entries * p.n * DTYPE_BYTES[p.out_dtype]


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Rows routed evenly and unevenly over all experts, another routing with every turn, so that weights come from memory."""
    few = random_weights(p, rng, min(p.experts, 8))
    weights = np.concatenate([few] * -(-p.experts // len(few)))[: p.experts]
    for rows, skew in ((t, skew) for skew in (0.0, SKEW) for t in (1, 4, 8, 16, 32, 64, 512) if t <= p.rows and (t in (8, 64) or not skew)):
        every = [make_inputs(p, rng, random_choices(p, rng, rows, p.experts, skew), weights) for _ in range(TURNS)]
        yield Workload(
            f"T = {rows}" + (", skewed" if skew else ""),
            every[0],
            moved_bytes=sum(moved_bytes(p, inputs) for inputs in every) // TURNS,
            flops=2 * rows * p.top_k * p.weight_rows * p.k,
            turns=tuple({name: value for name, value in inputs.items() if name not in ("w", "out")} for inputs in every),
        )


FAMILY = Family(
    name="moe_gemm",
    summary="the experts' products over routed rows, of 4-bit or plain weights: gate and up with SwiGLU, or down",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    workloads=workloads,
    rows="T",
    take_rows=take_rows,
)
