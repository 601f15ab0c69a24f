"""`moe_route`: from rows to their experts: gate logits, scores, biased top-k, weights.

Definition, for row r, expert e, hidden value h:

    logit[r, e]  = Σ_h x[r, h] · w_gate[e, h]
    score[r, e]  = 1 / (1 + exp(−logit))                      scoring: sigmoid
                 = exp(logit) / Σ_e' exp(logit[r, e'])        scoring: softmax
    choice[r, e] = score + bias[e]                            bias: true; the score itself otherwise
    topk_ids[r]     = the k experts of highest choice, highest first, the lower index first among equals
    topk_weights[r] = score (without bias) of each, / (their sum + epsilon) if `normalise`, · scaling

Groups (n_group > 1): experts stand in n_group runs of equal length. A group's worth is the sum of its two highest choices; only experts of
the topk_group worthiest groups (the lower group first among equals) can be chosen, however low their choices are.

NaN. A NaN choice is lower than every number, and a NaN worth too, so a row always gets k distinct experts of its allowed groups. The
weight of an expert whose score is NaN is NaN, and so are all weights of a normalised row that chose one. One NaN logit makes all softmax
scores of its row NaN.

Order of operations, so that every bit is determined and none depends on T or on other rows. K = hidden is cut into groups of 32 values, and
those into slices · warps consecutive parts: part i holds groups ⌊G·i/P⌋ … ⌊G·(i+1)/P⌋ − 1 of G, for P parts. A part's sum starts at 0:
    bf16 · bf16   two `mma` per group, in ascending order; the first takes values 0-3 of each 8 consecutive ones, the second 4-7
    otherwise     shares t = 0 … 3: share t takes values 4t … 4t + 3 of each 16 consecutive ones, by fused multiply-adds in ascending
                  order; the part is (share 0 + share 1) + (share 2 + share 3)
The parts of a slice are added in ascending order, then the slices in ascending order. Softmax: lane l of 32 has experts l·E/32 …; the sum
adds a lane's terms in ascending order, then lanes by a butterfly (distances 1, 2, 4, 8, 16). exp is `exp2_approx(x · log2 e)`; every other
operation is rounded to float32. The weights' sum adds in order of selection.

Rows share a block only as columns of `mma` (or as separate sums), so tiles, chosen by T, have no influence on bits; `pinned` has what does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target

#: Values of K that are multiplied at a time; parts are whole groups.
GROUP = 32

#: Parameters that decide result bits.
PINNED = (
    "slices", "warps", "x_dtype", "gate_dtype", "scoring", "bias", "n_group", "topk_group", "normalise", "epsilon", "scaling",
)  # fmt: skip


class Params(FamilyParams):
    """The gate, the way of choosing, and how the product is cut."""

    experts: Annotated[int, Field(ge=32, le=512, multiple_of=32, description="routed experts: rows of w_gate")]
    hidden: Annotated[int, Field(ge=64, le=65536, multiple_of=64, description="values of a row")]
    top_k: Annotated[int, Field(ge=1, le=16, description="experts chosen per row")]
    rows: Annotated[int, Field(ge=1, le=65536, description="most rows of a launch")] = 512
    x_dtype: Annotated[Literal["bf16", "f32"], Field(description="of the rows")] = "bf16"
    gate_dtype: Annotated[Literal["bf16", "f32"], Field(description="of w_gate; two times bf16 multiplies on tensor cores")] = "bf16"
    scoring: Annotated[Literal["sigmoid", "softmax"], Field(description="logits to scores; softmax is over all experts")] = "sigmoid"
    bias: Annotated[bool, Field(description="a bias per expert takes part in the choice, not in the weights")] = True
    n_group: Annotated[Literal[1, 2, 4, 8, 16, 32], Field(description="groups of experts")] = 1
    topk_group: Annotated[int, Field(ge=1, le=32, description="groups that a row may choose from")] = 1
    normalise: Annotated[bool, Field(description="weights are divided by their sum")] = True
    epsilon: Annotated[float, Field(ge=0.0, le=1.0, description="added to that sum")] = 1e-20
    scaling: Annotated[float, Field(gt=0.0, le=1e6, description="factor of all weights")] = 1.0
    slices: Annotated[int, Field(ge=1, le=64, description="slices of K that blocks multiply apart")]
    warps: Annotated[int, Field(ge=1, le=8, description="parts of a slice: a warp each")]
    tile_e: Annotated[Literal[16, 32, 64], Field(description="experts of a block")] = 32
    row_tile: Annotated[Literal[8, 16, 32, 64], Field(description="most rows of a block; few rows take smaller tiles")] = 64
    early_weights: Annotated[
        bool,
        Field(description="read w_gate before the launches ahead have ended: none of them may write it (bf16 · bf16)"),
    ] = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        size = self.experts // self.n_group
        if self.experts % self.tile_e:
            raise ValueError(f"tile_e = {self.tile_e} does not divide experts = {self.experts}")
        if self.parts > self.hidden // GROUP:
            raise ValueError(
                f"slices · warps = {self.parts} parts; hidden = {self.hidden} allows at most {self.hidden // GROUP}, of {GROUP} values each"
            )
        if self.n_group > 1 and size < 2:
            raise ValueError(f"n_group = {self.n_group} leaves {size} of {self.experts} experts per group; at least 2 are needed")
        if self.topk_group > self.n_group:
            raise ValueError(f"topk_group = {self.topk_group} is more than n_group = {self.n_group}")
        if self.top_k > size * self.topk_group:
            raise ValueError(f"top_k = {self.top_k} experts cannot come from {self.topk_group} groups of {size}")
        most = 2048 if self.matrix else 512  # 64 sums per thread
        if self.tile_e * self.row_tile > most:
            raise ValueError(
                f"tile_e · row_tile = {self.tile_e * self.row_tile}; allowed: at most {most} for {self.x_dtype} · {self.gate_dtype}"
            )
        if self.early_weights and not self.matrix:
            raise ValueError(f"early_weights needs bf16 rows and weights; got {self.x_dtype} · {self.gate_dtype}")
        return self

    @property
    def matrix(self) -> bool:
        """The product is by `mma`."""
        return self.x_dtype == self.gate_dtype == "bf16"

    @property
    def parts(self) -> int:
        """Parts of K, each summed by a warp."""
        return self.slices * self.warps


def row_tiles(p: Params) -> tuple[int, ...]:
    """The row tiles that are built, ascending: up to `row_tile`, none larger than the first that holds all rows."""
    tiles = [tile for tile in (8, 16, 32, 64) if tile <= p.row_tile]
    return tuple(tile for i, tile in enumerate(tiles) if i == 0 or tiles[i - 1] < p.rows)


def select_threads(p: Params) -> int:
    """Threads of a choosing block: one per 4 experts, in whole warps."""
    return round_up(p.experts // 4, 32)


def sums_bytes(p: Params, tile: int) -> int:
    """Shared memory through which the warps of a block add their parts; 4 floats after each row keep stores free of bank conflicts."""
    return p.warps * tile * (p.tile_e + 4) * 4


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: three arrays over the experts when choosing, the sums of parts when multiplying."""
    return SharedLayout.place(
        target,
        ("logits", p.experts * 4 if p.scoring == "softmax" else 0, 16),
        ("scores", p.experts * 4, 16),
        ("ranks", p.experts * 4, 16),
        ("sums", sums_bytes(p, row_tiles(p)[-1]), 16),
    )


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface: slices of the product to the workspace, then a block per row that chooses."""
    layout, tiles = shared(p, target), row_tiles(p)
    launches = []
    for i, tile in enumerate(tiles):
        above = f"T > {tiles[i - 1]}" if i else ""
        upto = f"T <= {tile}" if i + 1 < len(tiles) else ""
        launches.append(
            Launch(
                f"moe_route_gate_{tile}",
                (p.experts // p.tile_e, p.slices, f"ceil_div(T, {tile})"),
                p.warps * 32,
                layout.total if tile == tiles[-1] else layout.offsets["sums"] + sums_bytes(p, tile),
                when=" and ".join(filter(None, (above, upto))),
                programmatic=target.bulk_copy,
            )
        )
    launches.append(
        Launch("moe_route_select", ("T", 1, 1), select_threads(p), layout.offsets["sums"], programmatic=target.bulk_copy),
    )
    return Contract(
        family="moe_route",
        arguments=(
            Argument("x", p.x_dtype, ("T", p.hidden), doc="rows"),
            Argument("w_gate", p.gate_dtype, (p.experts, p.hidden), doc="weights of the gate, one row per expert"),
            *((Argument("bias", "f32", (p.experts,), doc="added to scores when choosing"),) if p.bias else ()),
            Argument("row_count", "i32", ("T",), "dimension", "rows"),
            Argument("topk_ids", "i32", ("T", p.top_k), "out", "chosen experts, in order of selection"),
            Argument("topk_weights", "f32", ("T", p.top_k), "out", "their weights"),
            Argument("partials", "f32", ("T", p.slices, p.experts), "workspace", "logits of each slice of hidden"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=tuple(launches),
        pinned={name: getattr(p, name) for name in PINNED},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    groups = p.hidden // GROUP
    # Weights of this many groups are read at a time: 64 registers at most.
    ahead = min(ceil_div(groups, p.parts), 128 // p.tile_e)
    return {
        "matrix": p.matrix,
        "group": GROUP,
        "groups": groups,
        "parts": p.parts,
        "ahead": ahead,
        "even": groups == ahead * p.parts,
        "threads": p.warps * 32,
        "select_threads": select_threads(p),
        "tiles": row_tiles(p),
        "per_lane": p.experts // 32,
        "group_lanes": 32 // p.n_group,
        "log2_e": float(np.float32(math.log2(math.e))),
    }


def logits_of(inputs: Arrays) -> npt.NDArray[np.float64]:
    """The logits `[T, E]` in float64; equal rows of w_gate have equal ones, which a blocked product alone does not grant."""
    w = inputs["w_gate"]
    _, first, back = np.unique(w.view(np.uint8).reshape(len(w), -1), axis=0, return_index=True, return_inverse=True)
    with np.errstate(invalid="ignore", over="ignore"):
        products = inputs["x"].astype(np.float64) @ w[first].astype(np.float64).T
    wanted: npt.NDArray[np.float64] = products[:, back.reshape(-1)]
    return wanted


def scores_of(p: Params, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scores `[T, E]` of logits, in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        if p.scoring == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-logits)))
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def order(values: npt.NDArray[np.float64], allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Indices from the highest value down: the lower index first among equals, NaN after all numbers, what is not allowed last."""
    unknown = np.isnan(values)
    return np.lexsort((np.arange(len(values)), -np.where(unknown, 0.0, values), unknown, ~allowed))


def worths(p: Params, choice: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The groups' worths `[n_group]` from a row's choices `[E]`."""
    groups = choice.reshape(p.n_group, -1)
    every = np.ones(groups.shape[1], np.bool_)
    return np.array([group[order(group, every)[:2]].sum() for group in groups])


def allowed_of(p: Params, choice: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which experts `[E]` a row may choose, from its choices."""
    allowed = np.ones((p.n_group, p.experts // p.n_group), np.bool_)
    if p.n_group > 1:
        allowed[order(worths(p, choice), np.ones(p.n_group, np.bool_))[p.topk_group :]] = False
    return allowed.reshape(-1)


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The definition in float64. Where two choices differ by less than rounding, a kernel may rightly decide otherwise."""
    scores = scores_of(p, logits_of(inputs))
    choices = scores + inputs["bias"].astype(np.float64) if p.bias else scores
    ids = np.stack([order(choice, allowed_of(p, choice))[: p.top_k] for choice in choices]).astype(np.int32)
    weights = np.take_along_axis(scores, ids, axis=1)
    if p.normalise:
        with np.errstate(invalid="ignore"):
            weights = weights / (weights.sum(axis=1, keepdims=True) + p.epsilon)
    return {"topk_ids": ids, "topk_weights": weights * p.scaling}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """Weights follow the logits, whose error is that of a sum of terms of random sign."""
    bound = 2.0**-24 * (64 + 8 * math.sqrt(p.hidden))
    return {"topk_weights": Tolerance(bound, "a logit's fp32 sum, then exp2, a division or two and a sum of k terms: a few ulp each")}


#: How far apart choices must be, relative to the largest score of the row, for the order to be beyond doubt.
GAP = 1e-4


def clear_rows(p: Params, inputs: Arrays) -> npt.NDArray[np.bool_]:
    """Rows `[T]` whose selection rounding cannot change: neighbours in the order are equal, or further apart than `GAP`."""
    scores = scores_of(p, logits_of(inputs))
    choices = scores + inputs["bias"].astype(np.float64) if p.bias else scores
    clear = np.ones(len(choices), np.bool_)
    for r, choice in enumerate(choices):
        known = scores[r][~np.isnan(scores[r])]
        gap = GAP * max(known.max(initial=0.0), 1e-30)

        def apart(values: npt.NDArray[np.float64], gap: float = gap) -> bool:
            steps = -np.diff(values[~np.isnan(values)])
            return bool(((steps == 0) | (steps > gap)).all())

        if p.n_group > 1:
            clear[r] = apart(np.sort(worths(p, choice))[::-1])
        clear[r] &= apart(choice[order(choice, allowed_of(p, choice))[: min(p.top_k + 1, p.topk_group * p.experts // p.n_group)]])
    return clear


def _inputs(p: Params, rng: np.random.Generator, rows: int, distinct: int, offset: float) -> dict[str, npt.NDArray[Any]]:
    """Random rows; `distinct` different experts, each as often as needed; biases around `offset`."""
    kinds = rng.permutation(p.experts) % distinct
    w = (rng.normal(size=(distinct, p.hidden)) / np.sqrt(p.hidden)).astype(numpy_dtype(p.gate_dtype))
    inputs: dict[str, npt.NDArray[Any]] = {"x": np.zeros((rows, p.hidden), numpy_dtype(p.x_dtype)), "w_gate": w[kinds]}
    if p.bias:
        spread = 0.1 if p.scoring == "sigmoid" else 0.5 / p.experts
        inputs["bias"] = (offset + rng.normal(size=distinct) * spread).astype(np.float32)[kinds]
    unclear = np.ones(rows, np.bool_)
    for _ in range(1000):
        count = int(unclear.sum())
        fresh = rng.normal(size=(count, p.hidden)) * rng.choice([0.5, 1.0, 1.5], size=(count, 1))
        inputs["x"][unclear] = fresh.astype(numpy_dtype(p.x_dtype))
        again = np.flatnonzero(unclear)
        unclear[again] = ~clear_rows(p, {**inputs, "x": inputs["x"][again]})
        if not unclear.any():
            return inputs
    raise ValueError("found no rows whose selection is beyond doubt")


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Every remainder of the row tiles that matters, ties, low biases, rows and experts that are NaN."""
    for rows in sorted({t for t in (1, 7, 8, 9, 16, 17, 33, 65) if t <= p.rows}):
        yield Case(f"T = {rows}", _inputs(p, rng, rows, p.experts, 0.0))
    few = min(p.rows, 6)
    for distinct in (p.experts // 4, 2, 1):
        yield Case(f"{distinct} different experts", _inputs(p, rng, few, distinct, 0.0))
    if p.bias:
        yield Case("every choice negative", _inputs(p, rng, few, p.experts, -5.0))
        # Softmax scores are small beside the biases that decide here.
        inputs = _inputs(p, rng, few, p.experts, 0.0)
        inputs["bias"] = rng.permutation(p.experts).astype(np.float32) - np.float32(p.experts // 2)
        if clear_rows(p, inputs).all():
            yield Case("biases decide", inputs)
    zero = _inputs(p, rng, few, 1, 0.0)
    zero["x"][...] = 0
    yield Case("rows of zeros", zero)
    broken = _inputs(p, rng, few, p.experts, 0.0)
    broken["x"][few // 2, int(rng.integers(p.hidden))] = np.nan
    yield Case("a row is NaN", broken)
    # So many experts are NaN that some of them must be chosen, if no group is.
    lost = _inputs(p, rng, few, p.experts, 0.0)
    lost["w_gate"] = lost["w_gate"].copy()
    lost["w_gate"][rng.permutation(p.experts)[p.top_k // 2 :], 3] = np.nan
    if clear_rows(p, lost).all():
        yield Case("most experts are NaN", lost)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Few rows, the gate's weights from memory."""
    w = (rng.normal(size=(p.experts, p.hidden)) / np.sqrt(p.hidden)).astype(numpy_dtype(p.gate_dtype))
    for rows in (t for t in (1, 4, 8, 16, 32, 64, 512) if t <= p.rows):
        x = rng.normal(size=(rows, p.hidden)).astype(numpy_dtype(p.x_dtype))
        inputs = {"x": x, "w_gate": w}
        if p.bias:
            inputs["bias"] = (rng.normal(size=p.experts) * 0.1).astype(np.float32)
        moved = w.nbytes + x.nbytes + rows * p.top_k * 8
        yield Workload(f"T = {rows}", inputs, moved_bytes=moved, flops=2 * rows * p.experts * p.hidden, cold=True)


FAMILY = Family(
    name="moe_route",
    summary="gate logits, scores, biased top-k of experts per row, and their weights",
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
