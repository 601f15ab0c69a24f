"""`moe_combine`: a row's experts added by weight, with the shared expert's result and the residual.

Definition, for row r; slot s is valid when 0 ≤ topk_ids[r, s] < experts:

    out[r] = Σ_s valid  topk_weights[r, s] · y[r, s]  +  shared[r]  +  residual[r]          the last two as the parameters say

Order of operations, in float32: a sum starts at 0 and takes the valid slots in slot order, each by a fused multiply-add; then shared is
added, then the residual; the result is rounded once, to its type. What y holds in other slots is not read.
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
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.targets import Target

#: Values that a thread makes.
UNIT = 4

Kind = Literal["bf16", "f32"]
Floats = npt.NDArray[np.float32]


class Params(FamilyParams):
    """Shapes and types."""

    experts: Annotated[int, Field(ge=1, le=4096, description="routed experts: ids from 0 to below that are valid")]
    top_k: Annotated[int, Field(ge=1, le=16, description="experts of a row")]
    hidden: Annotated[int, Field(ge=4, le=65536, multiple_of=4, description="values of a row")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of a launch")] = 512
    y_dtype: Annotated[Kind, Field(description="of the experts' results")] = "f32"
    shared: Annotated[Literal["none", "bf16", "f32"], Field(description="type of the shared expert's results, if any")] = "none"
    residual: Annotated[Literal["none", "bf16", "f32"], Field(description="type of the residual, if it is added here")] = "none"
    out_dtype: Annotated[Kind, Field(description="of the result")] = "bf16"
    threads: Annotated[Literal[64, 128, 256, 512], Field(description="of a block; each makes 4 values")] = 256

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} is more than experts = {self.experts}")
        return self

    @property
    def extras(self) -> tuple[str, ...]:
        """What is added after the experts, in order."""
        return tuple(name for name in ("shared", "residual") if getattr(self, name) != "none")


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a thread per 4 values."""
    docs = {"shared": "results of the shared expert", "residual": "the residual stream"}
    return Contract(
        family="moe_combine",
        arguments=(
            Argument("y", p.y_dtype, ("T", p.top_k, p.hidden), doc="results of the experts, by slot"),
            Argument("topk_ids", "i32", ("T", p.top_k), doc="expert of each slot; outside 0 … experts − 1: none"),
            Argument("topk_weights", "f32", ("T", p.top_k), doc="weight of each slot"),
            *(Argument(name, getattr(p, name), ("T", p.hidden), doc=docs[name]) for name in p.extras),
            Argument("out", p.out_dtype, ("T", p.hidden), "out", "their sum"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(
            Launch(
                "moe_combine", ("T", ceil_div(p.hidden, UNIT * p.threads), 1), p.threads, programmatic=target.bulk_copy,
            ),
        ),
        pinned={"shared": p.shared, "residual": p.residual, "y_dtype": p.y_dtype, "out_dtype": p.out_dtype},
    )  # fmt: skip


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"unit": UNIT, "units": p.hidden // UNIT, "extras": p.extras}


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a · b + c rounded once. The product is exact in float64; its sum with c is first rounded to odd, then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = c.astype(np.float64)
    total = product + wide
    # What the float64 sum lost (Knuth's two-sum), to tell on which side of it the exact value lies.
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (lost != 0) & (bits & 1 == 0)
    outward = (lost > 0) == (total > 0)
    odd = np.where(inexact, bits + np.where(outward, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The definition with the kernel's order of operations; exact."""
    ids = inputs["topk_ids"]
    total = np.zeros((len(ids), p.hidden), np.float32)
    with np.errstate(all="ignore"):
        for slot in range(p.top_k):
            valid = (ids[:, slot] >= 0) & (ids[:, slot] < p.experts)
            weights = np.broadcast_to(inputs["topk_weights"][valid, slot, None], (int(valid.sum()), p.hidden))
            total[valid] = fma(weights, inputs["y"][valid, slot].astype(np.float32), total[valid])
        for name in p.extras:
            total = total + inputs[name].astype(np.float32)
        return {"out": total.astype(numpy_dtype(p.out_dtype))}


def random_inputs(p: Params, rng: np.random.Generator, rows: int) -> dict[str, npt.NDArray[Any]]:
    """Rows with weights as a router gives them."""
    weights = rng.random((rows, p.top_k)).astype(np.float32)
    inputs: dict[str, npt.NDArray[Any]] = {
        "y": rng.normal(size=(rows, p.top_k, p.hidden)).astype(np.float32).astype(numpy_dtype(p.y_dtype)),
        "topk_ids": np.stack([rng.permutation(p.experts)[: p.top_k] for _ in range(rows)]).astype(np.int32),
        "topk_weights": (2.827 * weights / weights.sum(axis=1, keepdims=True)).astype(np.float32),
    }
    for name in p.extras:
        inputs[name] = rng.normal(size=(rows, p.hidden)).astype(np.float32).astype(numpy_dtype(getattr(p, name)))
    return inputs


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Few and many rows, invalid slots whose results are NaN, rows of no valid slot, values of every size, infinities."""
    for rows in sorted({t for t in (1, 3, 17) if t <= p.rows}):
        yield Case(f"T = {rows}", random_inputs(p, rng, rows))
    rows = min(p.rows, 9)
    inputs = random_inputs(p, rng, rows)
    none = rng.random((rows, p.top_k)) < 0.4
    none[0] = True
    inputs["topk_ids"][none] = np.where(rng.random(int(none.sum())) < 0.5, -1, p.experts)
    inputs["y"][none] = np.nan
    yield Case("invalid slots", inputs)
    inputs = random_inputs(p, rng, rows)
    # Up to 2^60 in steps of 2^20: sums that lose everything, and that cancel.
    scale = 2.0 ** (20 * rng.integers(-3, 4, size=inputs["y"].shape))
    inputs["y"] = (inputs["y"].astype(np.float64) * scale).astype(np.float32).astype(inputs["y"].dtype)
    yield Case("values of every size", inputs)
    inputs = random_inputs(p, rng, rows)
    for row, value in zip(range(0, rows, 2), (np.nan, np.inf, -np.inf), strict=False):
        inputs["y"][row, rng.integers(p.top_k), rng.integers(p.hidden)] = value
    yield Case("NaN and infinity in some rows", inputs)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Results as the down projection has just written them."""
    for rows in (t for t in (1, 8, 64, 512) if t <= p.rows):
        inputs = random_inputs(p, rng, rows)
        moved = sum(array.nbytes for array in inputs.values()) + rows * p.hidden * DTYPE_BYTES[p.out_dtype]
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved)


FAMILY = Family(
    name="moe_combine",
    summary="a row's experts added by weight, with the shared expert's result and the residual",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="T",
)
