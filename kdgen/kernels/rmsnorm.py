"""`rmsnorm`: root-mean-square norm of rows, with the residual added first if there is one.

Definition, for one row of `hidden` values, all arithmetic in f32 with every operation rounded:

    v      = residual + x, rounded to the residual's type and stored there; or v = x when there is no residual
    r      = 1 / sqrt(Σ v² / hidden + eps)
    out    = v · r, rounded to bf16 if that is the output's type, then · weight, rounded to the output's type

Order of the sum, a function of `hidden`, `threads` and the types alone; so a row's bits depend on nothing but the row:

    unit      E consecutive values, E = 8 when x, residual and output are all bf16, else 4. Squares of a unit are added as a tree of
              neighbours: (s0 + s1) + (s2 + s3) …
    thread    t of N takes units t, t + N, t + 2N, …, adding their sums in this order
    warp      lanes l and l ^ 16, then l ^ 8, l ^ 4, l ^ 2, l ^ 1
    block     the warps' sums, zeros up to 32 of them, in the way of a warp

The reference does the same operations in the same order, so results are compared bit for bit.

Bytes: x and the residual are read once, the residual and the output written once, the weight comes from L2 for all rows but the
first. At hidden = 7168 with x, weight and output in bf16 and an f32 residual that is 86,016 bytes a row. A block has one row; all loads
of x and the residual are in flight together, those of the weight while the sum is made, and the row stays in registers throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target

Floats = npt.NDArray[np.float32]
FloatType = Literal["bf16", "f32"]


class Params(FamilyParams):
    """Sizes, types and the shape of a block."""

    hidden: Annotated[int, Field(ge=4, le=16384, description="values of a row")]
    eps: Annotated[float, Field(ge=0.0, le=1.0, description="added to the mean of squares")]
    rows: Annotated[int, Field(ge=1, le=1 << 20, description="most rows of a launch")] = 512
    x: Annotated[FloatType, Field(description="type of x")] = "bf16"
    residual: Annotated[Literal["none", "bf16", "f32"], Field(description="type of the residual stream that x is added to")] = "none"
    weight: Annotated[FloatType, Field(description="type of the weight")] = "bf16"
    out: Annotated[FloatType, Field(description="type of the output; bf16 also rounds before the weight")] = "bf16"
    x_width: Annotated[int, Field(ge=0, le=1 << 20, description="values of a row of x; 0: x_offset + hidden")] = 0
    x_offset: Annotated[int, Field(ge=0, le=1 << 20, description="first of them that is normed")] = 0
    threads: Annotated[int, Field(ge=32, le=1024, multiple_of=32, description="most threads of a block; decides the order of the sum")] = (
        512
    )

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if self.hidden % self.unit:
            raise ValueError(
                f"hidden = {self.hidden} is not a multiple of {self.unit}: rows are read 16 bytes at a time (x {self.x}, "
                f"residual {self.residual}, out {self.out})"
            )
        for name, size in (("x_width", self.x_columns), ("x_offset", self.x_offset)):
            if size % self.unit:
                raise ValueError(f"{name} = {size} is not a multiple of {self.unit}: rows are read 16 bytes at a time")
        if self.x_offset + self.hidden > self.x_columns:
            raise ValueError(f"values {self.x_offset} … {self.x_offset + self.hidden - 1} of x do not fit x_width = {self.x_columns}")
        held = self.slots * self.unit
        if held > 32:
            raise ValueError(
                f"hidden = {self.hidden} leaves {held} values to each of {self.threads} threads; allowed 32: give more threads"
            )
        return self

    @property
    def unit(self) -> int:
        """Values that a thread takes at once: 16 bytes of the widest array that streams by."""
        return 16 // max(DTYPE_BYTES[dtype] for dtype in (self.x, self.residual, self.out) if dtype != "none")

    @property
    def x_columns(self) -> int:
        """Values of a row of x."""
        return self.x_width or self.x_offset + self.hidden

    @property
    def units(self) -> int:
        """Units of a row."""
        return self.hidden // self.unit

    @property
    def block(self) -> int:
        """Threads of a block: no more than there are units, in whole warps."""
        return min(self.threads, round_up(self.units, 32))

    @property
    def slots(self) -> int:
        """Units of a thread."""
        return ceil_div(self.units, self.block)


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: the sums of its warps."""
    return SharedLayout.place(target, ("sums", p.block // 32 * 4, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one block per row."""
    row = ("T", p.hidden)
    stream = (Argument("residual", p.residual, row, "inout", "the residual stream: x is added to it"),) if p.residual != "none" else ()
    return Contract(
        family="rmsnorm",
        arguments=(
            Argument("x", p.x, ("T", p.x_columns), doc="rows"),
            *stream,
            Argument("weight", p.weight, (p.hidden,), doc="factor of each column"),
            Argument("out", p.out, row, "out", "normed rows"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(Launch("rmsnorm", ("T", 1, 1), p.block, shared(p, target).total, programmatic=target.bulk_copy),),
        pinned={"threads": p.block, "unit": p.unit},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"x_columns": p.x_columns, "unit": p.unit, "units": p.units, "threads": p.block, "slots": p.slots, "warps": p.block // 32}


def sum_of_squares(p: Params, rows: Floats) -> Floats:
    """Σ v² of each row `[T, hidden]`, in the kernel's order."""
    count = len(rows)
    padded = np.zeros((count, p.slots * p.block * p.unit), np.float32)
    padded[:, : p.hidden] = rows * rows
    sums = padded.reshape(count, p.slots, p.block, p.unit)
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    thread = sums[:, 0, :, 0]
    for slot in range(1, p.slots):
        thread = thread + sums[:, slot, :, 0]
    warps = np.zeros((count, 32), np.float32)
    warps[:, : p.block // 32] = _warp_sum(thread.reshape(count, -1, 32))
    return _warp_sum(warps)


def _warp_sum(lanes: Floats) -> Floats:
    """The sum over the last axis, 32 long: halves added to each other."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Outputs by the definition, with the kernel's order of operations; exact."""
    result: dict[str, npt.NDArray[Any]] = {}
    with np.errstate(all="ignore"):  # rows that hold infinities and NaNs are rows too
        v = inputs["x"][:, p.x_offset : p.x_offset + p.hidden].astype(np.float32)
        if p.residual != "none":
            result["residual"] = (inputs["residual"].astype(np.float32) + v).astype(numpy_dtype(p.residual))
            v = result["residual"].astype(np.float32)
        r = np.float32(1) / np.sqrt(sum_of_squares(p, v) / np.float32(p.hidden) + np.float32(p.eps))
        normed = (v * r[:, None]).astype(numpy_dtype(p.out)).astype(np.float32)
        result["out"] = (normed * inputs["weight"].astype(np.float32)).astype(numpy_dtype(p.out))
    return result


def random_inputs(p: Params, rng: np.random.Generator, rows: int) -> dict[str, npt.NDArray[Any]]:
    """Rows of the size that a residual stream has; values of x that do not belong to them are NaN."""
    x = np.full((rows, p.x_columns), np.nan, np.float32)
    x[:, p.x_offset : p.x_offset + p.hidden] = rng.normal(size=(rows, p.hidden))
    inputs = {"x": x.astype(numpy_dtype(p.x))}
    if p.residual != "none":
        inputs["residual"] = (8 * rng.normal(size=(rows, p.hidden))).astype(numpy_dtype(p.residual))
    inputs["weight"] = (1 + rng.normal(size=p.hidden) / 4).astype(numpy_dtype(p.weight))
    return inputs


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Rows of ordinary size; rows of every size down to zero; rows that hold infinities and NaNs among ordinary ones."""
    for rows in sorted({t for t in (1, 5, 64) if t <= p.rows}):
        yield Case(f"T = {rows}", random_inputs(p, rng, rows))
    count = min(p.rows, 7)
    inputs = random_inputs(p, rng, count)
    # 2^80 squared is beyond f32: such a row's factor is zero.
    scales = np.array([2.0**k for k in (-130, -70, -20, 0, 20, 60, 80)], np.float32)[:count, None]
    for name in inputs.keys() - {"weight"}:
        inputs[name] = (inputs[name].astype(np.float32) * scales).astype(inputs[name].dtype)
    yield Case("sizes from tiny to overflow", inputs)
    inputs = random_inputs(p, rng, count)
    for name in inputs.keys() - {"weight"}:
        inputs[name][0] = np.where(np.isnan(inputs[name][0]), inputs[name][0], 0)
    yield Case("a row of zeros", inputs)
    inputs = random_inputs(p, rng, count)
    for row, value in zip(range(0, count, 2), (np.nan, np.inf, -np.inf), strict=False):
        inputs["x"][row, p.x_offset + rng.integers(p.hidden)] = value
    yield Case("NaN and infinity in some rows", inputs)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Rows as the product before has just written them."""
    for rows in (t for t in (1, 8, 64, 512) if t <= p.rows):
        inputs = random_inputs(p, rng, rows)
        moved = sum(array.nbytes for array in inputs.values()) + rows * p.hidden * DTYPE_BYTES[p.out]
        if p.residual != "none":
            moved += inputs["residual"].nbytes
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved)


FAMILY = Family(
    name="rmsnorm",
    summary="root-mean-square norm of rows, the residual added first",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="T",
)
