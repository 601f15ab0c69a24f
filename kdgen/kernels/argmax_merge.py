"""`argmax_merge`: the largest value of each row and its id, from those of every rank's slice.

Definition. Of row t's pairs (values[r, t], ids[r, t]), r = 0 … ranks − 1: the largest value, of equal ones the lowest id. −0 equals 0 and
comes out as 0. NaN never wins; when all values are NaN the lowest id wins, with value NaN. With what `argmax` gives for the slices this
is what `argmax` gives for the whole vocabulary, whichever rank has which slice. Negative ids come after all others.

Bytes: 8 · ranks read and 8 written a row. One thread per row; a gather over ranks leaves its pairs in just this layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import round_up
from kdgen.kernels import argmax
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """Sizes of the merge."""

    ranks: Annotated[int, Field(ge=1, le=64, description="pairs of a row")]
    rows: Annotated[int, Field(ge=1, le=1 << 20, description="most rows of a launch")] = 512


def threads(p: Params) -> int:
    """Threads of a block: one per row, in whole warps."""
    return min(128, round_up(p.rows, 32))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface."""
    return Contract(
        family="argmax_merge",
        arguments=(
            Argument("rank_values", "f32", (p.ranks, "T"), doc="largest logit of each rank's slice"),
            Argument("rank_ids", "i32", (p.ranks, "T"), doc="its id"),
            Argument("row_count", "i32", ("T",), "dimension", "rows"),
            Argument("values", "f32", ("T",), "out", "the largest of all"),
            Argument("ids", "i32", ("T",), "out", "the lowest id that has it"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(Launch("argmax_merge", (f"ceil_div(T, {threads(p)})", 1, 1), threads(p), programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"threads": threads(p)}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The outputs, from the definition; exact."""
    pairs = zip(inputs["rank_values"].T, inputs["rank_ids"].T, strict=True)
    values, ids = list[np.float32](), list[int]()
    for row_values, row_ids in pairs:
        numbers = row_values[~np.isnan(row_values)]
        winners = row_values == numbers.max() if len(numbers) else np.ones(p.ranks, np.bool_)
        values.append(row_values[winners][0] + np.float32(0))
        ids.append(min(row_ids[winners].tolist(), key=lambda i: (i < 0, i)))
    return {"values": np.array(values, np.float32), "ids": np.array(ids, np.int32)}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Results of `argmax` for slices of rows that go wrong easily; random pairs with many ties, and ids in any order."""
    slices = argmax.Params(vocab=64 * p.ranks)
    whole = np.concatenate([argmax.special_rows(slices.vocab, rng) for _ in range(3)])[: p.rows]
    parts = [
        argmax.reference(slices, {"logits": np.ascontiguousarray(piece), "first": np.array(64 * rank, np.int32)})
        for rank, piece in enumerate(np.split(whole, p.ranks, axis=1))
    ]
    yield Case(
        "special rows",
        {"rank_values": np.stack([part["values"] for part in parts]), "rank_ids": np.stack([part["ids"] for part in parts])},
    )
    for rows in sorted({1, min(p.rows, 130), p.rows if p.rows <= 4096 else 1}):
        shape = (p.ranks, rows)
        values = rng.choice(
            np.array([-np.inf, -2, -0.0, 0.0, 1, np.inf, np.nan], np.float32), shape, p=[0.2, 0.2, 0.1, 0.1, 0.2, 0.05, 0.15]
        )
        ids = rng.choice(np.array([-5, -1, 0, 1, 2, 70_000, (1 << 31) - 1, -(1 << 31)], np.int32), shape)
        yield Case(f"T = {rows}, many ties", {"rank_values": values, "rank_ids": ids})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Random pairs; latency is all there is."""
    for rows in (t for t in (1, 64, 512) if t <= p.rows):
        values = rng.normal(size=(p.ranks, rows)).astype(np.float32)
        ids = rng.integers(0, 163_840, size=(p.ranks, rows), dtype=np.int32)
        yield Workload(f"T = {rows}", {"rank_values": values, "rank_ids": ids})


FAMILY = Family(
    name="argmax_merge",
    summary="the largest value of each row and its id, over the ranks",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
