"""`topk_logprob_merge`: the most probable tokens of each row and their log-probs, from those of every rank's slice.

Definition. Rank r gives what `topk_logprob` with `slice` found in its part of row t: `top_k` logits and their ids, the part's largest logit
m[r] and its sum s[r] = Σ e^(x − m[r]). Then, with the largest m as top:

    ids        of the `top_k` largest of the ranks · top_k logits, descending, of equal ones the lowest id first; negative ids come last
    log-prob   (logit − top) − ln Σ s[r] · e^(m[r] − top); −∞ where the logit is −∞, +∞ as in `topk_logprob`

The ids are those that one launch over the whole vocabulary would have given, whichever rank has which slice. So are the log-probs, up to
rounding: sums are joined in another order, and that order goes by rank. A row's ids must differ; a logit of NaN counts as −∞.

Order of the sum, all in f32, every operation rounded: lane l of a warp adds ranks l, l + 32, … in this order, then lanes are added with
l ^ 1, l ^ 2, l ^ 4, l ^ 8, l ^ 16. Up to 32 ranks that is ((0 + 1) + (2 + 3)) + …

Bytes: ranks · (8 · top_k + 8) read and 8 · top_k written a row. A block has a row; a gather over ranks leaves
its input in just this layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels import topk_logprob
from kdgen.kernels.argmax import special_rows
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """Sizes of the merge."""

    ranks: Annotated[int, Field(ge=1, le=64, description="slices of the vocabulary")]
    top_k: Annotated[int, Field(ge=1, le=64, description="tokens of a row, and of each rank's part of it")]
    rows: Annotated[int, Field(ge=1, le=1 << 20, description="most rows of a launch")] = 448


def threads(p: Params) -> int:
    """Threads of a block: about one for each logit, and as many as there can be groups of them."""
    return 128 if p.ranks * p.top_k <= 256 else 256


def candidates(p: Params) -> int:
    """Keys that can be candidates at the same time."""
    return topk_logprob.capacity(p.top_k, threads(p), p.ranks * p.top_k)


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block."""
    return topk_logprob.selection_shared(target, p.top_k, threads(p), candidates(p), p.ranks)


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a block per row."""
    chosen = (p.ranks, "T", p.top_k)
    return Contract(
        family="topk_logprob_merge",
        arguments=(
            Argument("rank_values", "f32", chosen, doc="largest logits of each rank's slice"),
            Argument("rank_ids", "i32", chosen, doc="their ids"),
            Argument("rank_maxima", "f32", (p.ranks, "T"), doc="the largest logit of each rank's slice"),
            Argument("rank_sums", "f32", (p.ranks, "T"), doc="Σ e^(x − maximum) of each rank's slice"),
            Argument("row_count", "i32", ("T",), "dimension", "rows"),
            Argument("log_probs", "f32", ("T", p.top_k), "out", "log-probs of the most probable tokens, descending"),
            Argument("ids", "i32", ("T", p.top_k), "out", "their ids"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(Launch("topk_logprob_merge", ("T", 1, 1), threads(p), shared(p, target).total, programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        **topk_logprob.selection_context(p.top_k, threads(p), candidates(p)),
        "loads": ceil_div(p.ranks * p.top_k, threads(p)),
        "logs": True,
    }


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The outputs, from the definition; sums in f64."""

    def by_row(name: str) -> npt.NDArray[Any]:
        array = inputs[name].swapaxes(0, 1)
        return array.reshape(len(array), -1)

    values, ids = by_row("rank_values"), by_row("rank_ids")
    values = np.where(np.isnan(values), np.float32(-np.inf), values)
    order = np.lexsort((ids.view(np.uint32), -values), axis=1)[:, : p.top_k]
    chosen = np.take_along_axis(values, order, axis=1)
    maxima, sums = by_row("rank_maxima").astype(np.float64), by_row("rank_sums").astype(np.float64)
    top = maxima.max(axis=1)
    with np.errstate(invalid="ignore"):
        weights = np.where(maxima == top[:, None], 1.0, np.exp(maxima - top[:, None]))
    total = (sums * weights).sum(axis=1)
    return {"log_probs": topk_logprob.log_probs(chosen, top, total), "ids": np.take_along_axis(ids, order, axis=1)}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """Ids are exact."""
    return {"log_probs": Tolerance(2.0**-19, "ex2.approx: 2 ulp; log-probs of some nats")}


def gathered(p: Params, rows: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """What the ranks would give for their parts of rows [T, ranks · n]."""
    width = rows.shape[1] // p.ranks
    part = topk_logprob.Params(vocab=width, top_k=p.top_k, slice=True, rows=max(1, len(rows)))
    found = [
        topk_logprob.reference(part, {"logits": piece, "first": np.array(width * rank, np.int32)})
        for rank, piece in enumerate(np.split(rows, p.ranks, axis=1))
    ]
    arrays = {f"rank_{name}": np.stack([result[name] for result in found]) for name in ("values", "ids", "maxima", "sums")}
    return {**arrays, "rank_sums": arrays["rank_sums"].astype(np.float32)}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Results for slices of rows that go wrong easily, of rows with all large logits in one slice, and of random ones with ties; NaN."""
    vocab = 64 * p.ranks
    yield Case("special rows", gathered(p, special_rows(vocab, rng)[: p.rows]))
    crowded = np.full((p.ranks, vocab), -8, np.float32)
    for rank in range(p.ranks):
        crowded[rank, 64 * rank : 64 * rank + 64] = rng.normal(size=64)
    yield Case("one slice has all", gathered(p, crowded[: p.rows]))
    holes = gathered(p, rng.normal(size=(min(p.rows, 9), vocab)).astype(np.float32))
    holes["rank_values"][rng.random(holes["rank_values"].shape) < 0.4] = np.nan
    holes["rank_values"][:, 0] = np.where(rng.random((p.ranks, p.top_k)) < 0.5, np.nan, -np.inf)
    yield Case("NaN among the logits", holes)
    for rows in sorted({1, min(p.rows, 33)}):
        yield Case(f"T = {rows}", gathered(p, 3 * rng.normal(size=(rows, vocab)).astype(np.float32)))
        yield Case(f"T = {rows}, many ties", gathered(p, np.round(rng.normal(size=(rows, vocab))).astype(np.float32)))


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Random logits of draft positions: seven a sequence; latency is all there is."""
    for rows in (t for t in (1, 7, 56, 448) if t <= p.rows):
        yield Workload(f"T = {rows}", gathered(p, 3 * rng.standard_normal(size=(rows, 64 * p.ranks), dtype=np.float32)))


FAMILY = Family(
    name="topk_logprob_merge",
    summary="the most probable tokens of each row and their log-probs, over the ranks",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    workloads=workloads,
)
