"""`tree_build`: per-depth top-K draft log-probs to the best-first draft tree (DDTree's builder).

Definition. A node at depth d is a tuple of ranks (r1 … rd); its token is the rd-th most probable of depth d, whatever its parent.
Scores are float64, summed in this order:

    score(r1)            = log_prob[0][0], then one sibling step per rank
    sibling step         = (score − log_prob[d−1][r]) + log_prob[d−1][r+1]
    first child          = (score + log_prob[d][0]) + depth_bonus

Start with the candidate (0). Repeatedly emit the candidate with the highest score, ties by the lexicographically smaller tuple, and
offer its next sibling and its first child. Emitted nodes are numbered 1, 2, …; 0 is the root, whose token the previous round
decided. A log-prob that is NaN, at most −1e30 or above 0.25 is no token: it makes no candidate, so nothing is reached through it.

Options: `chain_seed` emits the chain of rank-0 tokens first; `depth_bonus` favours depth; `width_cap` uses only the first ranks of
every depth; `pad` fills a short tree up with unused depth-1 tokens, in rank order, as children of the root.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target

LOWEST, LIKELIEST = np.float32(-1e30), np.float32(0.25)


class Params(FamilyParams):
    """Sizes and options the kernel is built for."""

    depth: Annotated[int, Field(ge=1, le=16, description="draft positions L: the deepest node's depth")]
    top_k: Annotated[int, Field(ge=1, le=64, description="candidates K given per depth, most probable first")]
    budget: Annotated[int, Field(ge=0, le=255, description="most nodes beside the root; a call may ask for fewer")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64
    chain_seed: Annotated[bool, Field(description="emit the chain of rank-0 tokens before the best-first search")] = False
    depth_bonus: Annotated[float, Field(ge=0.0, le=4.0, description="added to a score for every depth beyond the first")] = 0.0
    width_cap: Annotated[int, Field(ge=0, le=64, description="use only this many ranks per depth; 0 uses all")] = 0
    pad: Annotated[bool, Field(description="fill up with unused depth-1 tokens to `budget` nodes where there are enough")] = False


def ranks_used(p: Params) -> int:
    """Ranks per depth that can become nodes: the cap, and at most one per node of the budget."""
    capped = min(p.top_k, p.width_cap) if p.width_cap else p.top_k
    return max(1, min(capped, p.budget))


def path_bytes(depth: int) -> int:
    """Bytes of a row of `paths`: one per depth, the root's included, in whole 16-byte units."""
    return round_up(depth + 1, 16)


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one warp per sequence."""
    nodes = p.budget + 1
    per_node = ("S", nodes)
    return Contract(
        family="tree_build",
        arguments=(
            Argument("log_probs", "f32", ("S", p.depth, p.top_k), doc="natural log-probabilities, descending within a depth"),
            Argument("token_ids", "i32", ("S", p.depth, p.top_k), doc="their tokens"),
            Argument("root_tokens", "i32", ("S",), doc="the token already decided: node 0"),
            Argument("starts", "i32", ("S",), doc="position of the root"),
            Argument("budgets", "i32", ("S",), doc="nodes to build beside the root; clamped to 0…budget"),
            Argument("tokens", "i32", per_node, "out", "node tokens; rows past the count repeat the root"),
            Argument("positions", "i32", per_node, "out", "start + depth"),
            Argument("depths", "i32", per_node, "out", "0 for the root"),
            Argument("parents", "i32", per_node, "out", "node index, −1 for the root"),
            Argument("node_ranks", "i32", per_node, "out", "rank of the token at its depth, −1 for the root"),
            Argument("scores", "f64", per_node, "out", "0 for the root, −inf past the count"),
            Argument(
                "paths_out", "u8", ("S", nodes, path_bytes(p.depth)), "out", "node index at each depth up to the node itself; 255 beyond"
            ),
            Argument("first_child", "i32", per_node, "out", "node index or −1"),
            Argument("next_sibling", "i32", per_node, "out", "node index or −1"),
            Argument("counts", "i32", ("S",), "out", "nodes, the root included"),
        ),
        capacities={"S": Capacity(1, p.sequences)},
        launches=(Launch("tree_build", ("S", 1, 1), 32, shared(p, target).total, programmatic=False),),
        pinned={"depth_bonus": p.depth_bonus, "chain_seed": p.chain_seed, "width_cap": p.width_cap, "pad": p.pad},
    )


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: candidate entries, the table of log-probs, and the nodes."""
    nodes, width = p.budget + 1, ranks_used(p) + 2
    return SharedLayout.place(
        target,
        ("entries", (nodes + 1) * 16, 16),
        ("exact", (nodes + 1) * 8, 8),
        ("table", ((p.depth + 1) * width + 1) * 8, 8),
        ("gains", ((p.depth + 1) * width + 1) * 8, 8),
        ("scores", nodes * 8, 8),
        ("nodes", nodes * 4, 16),
        ("paths", nodes * path_bytes(p.depth), 16),
        ("links", 2 * nodes * 4, 16),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template.

    Keys have 24 bits. `scale` is the largest power of two that leaves 48 nats below score 0 and, above it, what bonuses and log-probs
    a little above 0 can add. A key is off by half a unit per level, for the log-prob and for the bonus.
    """
    above = p.depth_bonus * (p.depth - 1) + float(LIKELIEST) * p.depth
    scale = 2 ** int(math.log2(2**24 / (48 + above)))
    window = 2 * p.depth
    return {
        "scale": float(scale),
        "top_value": 2**24 - 1 - math.ceil(above * scale) - window,
        "bonus_units": round(p.depth_bonus * scale),
        "window": window,
        "reach": math.ceil((p.depth_bonus + float(LIKELIEST)) * p.depth * scale) + 2 * window,
        "ranks": ranks_used(p),
        "slots": max(1, ceil_div(p.budget, 32)),
        "out_slots": ceil_div(p.budget + 1, 32),
        "path_bytes": path_bytes(p.depth),
    }


def build_tree(p: Params, log_probs: npt.NDArray[np.float32], budget: int) -> list[tuple[int, int, int, float]]:
    """The heap algorithm of the definition for one sequence.

    Returns:
        (parent index, rank, depth, score) of nodes 1, 2, … in emission order.
    """
    table = log_probs.astype(np.float64)
    is_token = (log_probs > LOWEST) & (log_probs <= LIKELIEST)
    usable = min(p.top_k, p.width_cap) if p.width_cap else p.top_k
    nodes: list[tuple[int, int, int, float]] = []
    index: dict[tuple[int, ...], int] = {(): 0}
    heap: list[tuple[float, tuple[int, ...]]] = []

    def offer_sibling(score: float, ranks: tuple[int, ...]) -> None:
        row, rank = len(ranks) - 1, ranks[-1]
        if rank + 1 < usable and is_token[row, rank + 1]:
            heapq.heappush(heap, (-float((score - table[row, rank]) + table[row, rank + 1]), (*ranks[:-1], rank + 1)))

    def child_score(score: float, row: int) -> float:
        return float((score + table[row, 0]) + p.depth_bonus)

    def emit(score: float, ranks: tuple[int, ...]) -> None:
        nodes.append((index[ranks[:-1]], ranks[-1], len(ranks), score + 0.0))  # −0 becomes 0
        index[ranks] = len(nodes)

    if p.chain_seed:
        score = 0.0
        for row in range(min(p.depth, budget)):
            if not is_token[row, 0]:
                break
            score = float(table[0, 0]) if row == 0 else child_score(score, row)
            emit(score, (0,) * (row + 1))
        for _, _, depth, node_score in list(nodes):
            offer_sibling(node_score, (0,) * depth)
    elif budget and is_token[0, 0]:
        heapq.heappush(heap, (-float(table[0, 0]), (0,)))
    while heap and len(nodes) < budget:
        negated, ranks = heapq.heappop(heap)
        emit(-negated, ranks)
        offer_sibling(-negated, ranks)
        if len(ranks) < p.depth and is_token[len(ranks), 0]:
            heapq.heappush(heap, (-child_score(-negated, len(ranks)), (*ranks, 0)))
    if p.pad:
        used = {rank for parent, rank, _, _ in nodes if parent == 0}
        for rank in range(max(used, default=-1) + 1, p.top_k):
            if len(nodes) < budget and is_token[0, rank]:
                nodes.append((0, rank, 1, float(log_probs[0, rank])))
    return nodes


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Every output of the kernel, by the heap algorithm; exact."""
    log_probs, token_ids = inputs["log_probs"], inputs["token_ids"]
    sequences, nodes = log_probs.shape[0], p.budget + 1
    out: dict[str, npt.NDArray[Any]] = {
        name: np.full((sequences, nodes), fill, np.int32)
        for name, fill in (("depths", 0), ("parents", -1), ("node_ranks", -1), ("first_child", -1), ("next_sibling", -1))
    }
    out["tokens"] = np.repeat(inputs["root_tokens"][:, None], nodes, axis=1).astype(np.int32)
    out["scores"] = np.full((sequences, nodes), -np.inf)
    out["scores"][:, 0] = 0.0
    out["paths_out"] = np.full((sequences, nodes, path_bytes(p.depth)), 255, np.uint8)
    out["paths_out"][:, :, 0] = 0
    out["counts"] = np.empty(sequences, np.int32)
    for s in range(sequences):
        tree = build_tree(p, log_probs[s], int(np.clip(inputs["budgets"][s], 0, p.budget)))
        out["counts"][s] = len(tree) + 1
        last_child: dict[int, int] = {}
        for node, (parent, rank, depth, score) in enumerate(tree, 1):
            out["tokens"][s, node] = token_ids[s, depth - 1, rank]
            out["depths"][s, node], out["parents"][s, node], out["node_ranks"][s, node] = depth, parent, rank
            out["scores"][s, node] = score
            out["paths_out"][s, node, : depth + 1] = [*out["paths_out"][s, parent, :depth], node]
            if parent in last_child:
                out["next_sibling"][s, last_child[parent]] = node
            else:
                out["first_child"][s, parent] = node
            last_child[parent] = node
    out["positions"] = (inputs["starts"][:, None] + out["depths"]).astype(np.int32)
    return out


def random_log_probs(rng: np.random.Generator, depth: int, top_k: int, sharpness: float = 1.0, steps: int = 0) -> npt.NDArray[np.float32]:
    """`[depth, top_k]` log-probs, descending; `steps` > 0 rounds them to that many steps per nat, which makes exact ties."""
    logits = -np.sort(-rng.normal(size=(depth, max(top_k, 64))) * sharpness, axis=1)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    log_probs = log_probs[:, :top_k]
    if steps:
        log_probs = np.round(log_probs * steps) / steps
    return np.asarray(log_probs, np.float32)


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Random trees of every sharpness, exact ties, equal rows, NaN and −inf, and every kind of budget."""

    def case(name: str, log_probs: npt.NDArray[np.float32], budgets: list[int]) -> Case:
        count = len(log_probs)
        tokens = rng.integers(0, 163_840, size=(count, p.depth, p.top_k), dtype=np.int32)
        return Case(
            name,
            {
                "log_probs": log_probs,
                "token_ids": tokens,
                "root_tokens": rng.integers(0, 163_840, size=count, dtype=np.int32),
                "starts": rng.integers(0, 262_144 - p.depth, size=count, dtype=np.int32),
                "budgets": np.array(budgets, np.int32),
            },
        )

    most = min(p.sequences, 16)

    def rows(make: Any) -> npt.NDArray[np.float32]:
        return np.stack([make() for _ in range(most)])

    full = [p.budget] * most
    for sharpness in (0.3, 1.0, 4.0):
        table = rows(lambda sharpness=sharpness: random_log_probs(rng, p.depth, p.top_k, sharpness))
        yield case(f"random, sharpness {sharpness}", table, full)
    for steps in (1, 2, 4):
        yield case(f"ties at 1/{steps} nat", rows(lambda steps=steps: random_log_probs(rng, p.depth, p.top_k, 1.0, steps)), full)
    yield case("all equal", np.full((most, p.depth, p.top_k), -1.5, np.float32), full)
    yield case(
        "budgets 0, 1, …, beyond",
        rows(lambda: random_log_probs(rng, p.depth, p.top_k)),
        [(i - 1) * (p.budget + 3) // max(1, most - 2) for i in range(most)],
    )
    spoiled = rows(lambda: random_log_probs(rng, p.depth, p.top_k))
    spoiled[rng.random(spoiled.shape) < 0.2] = np.nan
    yield case("NaN", spoiled, full)
    spoiled = rows(lambda: random_log_probs(rng, p.depth, p.top_k))
    spoiled[rng.random(spoiled.shape) < 0.2] = -np.inf
    yield case("−inf", spoiled, full)
    nothing = np.full((most, p.depth, p.top_k), np.nan, np.float32)
    nothing[::2, 0] = random_log_probs(rng, 1, p.top_k)
    yield case("nothing usable", nothing, full)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence's tree, as drafts go (sharp at the first depths), at the full budget and at smaller ones."""
    for budget in sorted({b for b in (8, 16, 32, 64, 128, p.budget) if b <= p.budget}):
        yield Workload(
            f"B = {budget}",
            {
                "log_probs": random_log_probs(rng, p.depth, p.top_k, 2.0)[None],
                "token_ids": rng.integers(0, 163_840, size=(1, p.depth, p.top_k), dtype=np.int32),
                "root_tokens": np.zeros(1, np.int32),
                "starts": np.full(1, 4096, np.int32),
                "budgets": np.full(1, budget, np.int32),
            },
        )


FAMILY = Family(
    name="tree_build",
    summary="per-depth top-K log-probs to the best-first draft tree",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="S",
)
