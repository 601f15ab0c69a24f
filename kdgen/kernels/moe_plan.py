"""`moe_plan`: the rows of each expert, from the experts of each row.

Definition. Entry i = row · top_k + slot of `topk_ids` is valid when 0 ≤ id < experts; others (padding has −1) are in no list.

    expert_offsets[e]   valid entries of lower experts, e = 0 … experts; the last is the number of valid entries
    sorted_rows         valid entries, ascending by (expert, entry): expert e's are sorted_rows[expert_offsets[e] : expert_offsets[e + 1]];
                        −1 behind the last
    active_experts      experts with entries, ascending; −1 behind the last
    active_count        how many those are

Nothing is padded, and the order depends on nothing but the ids. An entry i is row i // top_k, slot i % top_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target

#: Warps of a block; each looks after one expert.
WARPS = 8


class Params(FamilyParams):
    """Sizes the kernel is built for; they match the `moe_route` whose choices it reads."""

    experts: Annotated[int, Field(ge=1, le=4096, description="routed experts")]
    top_k: Annotated[int, Field(ge=1, le=16, description="experts of a row")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of a launch")] = 512

    @model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k = {self.top_k} is more than experts = {self.experts}")
        return self


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: which experts have entries."""
    return SharedLayout.place(target, ("seen", p.experts * 4, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a warp per expert, and one for what lies behind the last."""
    blocks = ceil_div(p.experts + 1, WARPS)
    return Contract(
        family="moe_plan",
        arguments=(
            Argument("topk_ids", "i32", ("T", p.top_k), doc="experts of each row; others than 0 … experts − 1 are in no list"),
            Argument("row_count", "i32", ("T",), "dimension", "rows"),
            Argument("expert_offsets", "i32", (p.experts + 1,), "out", "where each expert's entries begin in sorted_rows"),
            Argument("sorted_rows", "i32", (f"T * {p.top_k}",), "out", "row · top_k + slot, by expert, then row; −1 behind the last"),
            Argument("active_experts", "i32", (p.experts,), "out", "experts with entries, ascending; −1 behind the last"),
            Argument("active_count", "i32", (1,), "out", "how many they are"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(Launch("moe_plan", (blocks, 1, 1), WARPS * 32, shared(p, target).total, programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"threads": WARPS * 32}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Every output of the kernel, from the definition; exact."""
    ids = inputs["topk_ids"].reshape(-1)
    entries = sorted((int(expert), i) for i, expert in enumerate(ids) if 0 <= expert < p.experts)
    sizes = np.zeros(p.experts, np.int32)
    for expert, _ in entries:
        sizes[expert] += 1
    listed = np.full(len(ids), -1, np.int32)
    listed[: len(entries)] = [i for _, i in entries]
    active = np.full(p.experts, -1, np.int32)
    busy = np.flatnonzero(sizes)
    active[: len(busy)] = busy
    return {
        "expert_offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        "sorted_rows": listed,
        "active_experts": active,
        "active_count": np.array([len(busy)], np.int32),
    }


def _routed(p: Params, rng: np.random.Generator, rows: int, among: int) -> npt.NDArray[np.int32]:
    """Distinct experts per row, from `among` random ones (at least top_k)."""
    pool = rng.permutation(p.experts)[: max(among, p.top_k)]
    return np.stack([pool[rng.permutation(len(pool))[: p.top_k]] for _ in range(rows)]).astype(np.int32)


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Few and many rows, all rows to the same experts, padding rows, ids out of range, no valid row at all."""
    for rows in sorted({t for t in (1, 2, 7, 16, 33, 64, p.rows) if t <= min(p.rows, 512)}):
        yield Case(f"T = {rows}", {"topk_ids": _routed(p, rng, rows, p.experts)})
    rows = min(p.rows, 37)
    yield Case("the same experts", {"topk_ids": _routed(p, rng, rows, 0)})
    padded = _routed(p, rng, rows, p.experts)
    padded[rng.random(rows) < 0.4] = -1
    padded[0, 0], padded[-1, -1] = p.experts, np.iinfo(np.int32).min
    yield Case("padding and ids out of range", {"topk_ids": padded})
    yield Case("no valid row", {"topk_ids": np.full((rows, p.top_k), -1, np.int32)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Rows routed uniformly."""
    for rows in (t for t in (1, 8, 64, 512) if t <= p.rows):
        yield Workload(f"T = {rows}", {"topk_ids": _routed(p, rng, rows, p.experts)})


FAMILY = Family(
    name="moe_plan",
    summary="the rows of each expert, sorted and without padding, and which experts have any",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
