"""`tree_rows`: the draft trees of all sequences to the rows of one forward.

Definition. Row t = s · R + r is node i = nodes[r] of sequence s, of R rows each: so many nodes as the round's trees may have, 0 … R − 1. It
is real when i < counts[s] and sequence s is active; every other row is padding, so the number of rows never changes and one captured
graph serves every round.

    output          real row              padding
    ids             tokens[s, i]          0
    row_positions   positions[s, i]       0
    row_slots       starts[s] + i         −1      place of its key in the cache: node order, so that siblings do not collide
    row_sequences   s                     −1
    row_depths      depths[s, i]          0
    row_paths       paths[s, i]           0, then 255: the path of a root

What the inputs hold for padding is of no account.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.kernels import tree_build
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.targets import Target

#: Threads of a block, a row each.
THREADS = 128


class Params(FamilyParams):
    """Sizes the kernel is built for; they match the `tree_build` whose trees it reads."""

    depth: Annotated[int, Field(ge=1, le=16, description="deepest node's depth")]
    budget: Annotated[int, Field(ge=0, le=255, description="most nodes beside the root")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64

    @property
    def nodes(self) -> int:
        """Most rows of a sequence."""
        return self.budget + 1


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a thread per row."""
    per_node, rows = ("S", p.nodes), "S * R"
    path = tree_build.path_bytes(p.depth)
    return Contract(
        family="tree_rows",
        arguments=(
            Argument("tokens", "i32", per_node, doc="node tokens"),
            Argument("positions", "i32", per_node, doc="node positions"),
            Argument("depths", "i32", per_node, doc="node depths"),
            Argument("paths", "u8", ("S", p.nodes, path), doc="node index at each depth up to the node itself"),
            Argument("counts", "i32", ("S",), doc="nodes, the root included"),
            Argument("starts", "i32", ("S",), doc="position of the root"),
            Argument("active", "i32", ("S",), doc="0: all rows of the sequence are padding"),
            Argument("nodes", "i32", ("R",), doc="which nodes become rows: 0, 1, …; a number that no node has: padding"),
            Argument("sequence_count", "i32", ("S",), "dimension", "sequences"),
            Argument("node_count", "i32", ("R",), "dimension", "rows of a sequence"),
            Argument("ids", "i32", (rows,), "out", "token of each row; 0 for padding"),
            Argument("row_positions", "i32", (rows,), "out", "position of each row; 0 for padding"),
            Argument("row_slots", "i32", (rows,), "out", "place of each row's key in its sequence; −1: padding"),
            Argument("row_sequences", "i32", (rows,), "out", "sequence of each row; −1 for padding"),
            Argument("row_depths", "i32", (rows,), "out", "depth of each row in its tree; 0 for padding"),
            Argument("row_paths", "u8", (rows, path), "out", "node at each depth, the row's own last; a root's for padding"),
        ),
        capacities={"S": Capacity(1, p.sequences), "R": Capacity(1, p.nodes)},
        launches=(Launch("tree_rows", (f"ceil_div(S * R, {THREADS})", 1, 1), THREADS, programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"threads": THREADS, "nodes": p.nodes, "path_units": tree_build.path_bytes(p.depth) // 16}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Every output of the kernel, from the definition; exact."""
    sequences, nodes = inputs["tokens"].shape
    node, sequence = np.meshgrid(inputs["nodes"], np.arange(sequences))
    real = (node >= 0) & (node < nodes) & (node < inputs["counts"][:, None]) & (inputs["active"] != 0)[:, None]
    taken = np.clip(node, 0, nodes - 1)
    root_path = np.full(inputs["paths"].shape[2], 255, np.uint8)
    root_path[0] = 0

    def rows(values: npt.NDArray[Any], padding: int) -> npt.NDArray[Any]:
        return np.where(real, values, padding).astype(np.int32).reshape(-1)

    def of_node(name: str) -> npt.NDArray[Any]:
        return np.asarray(inputs[name][sequence, taken])

    return {
        "ids": rows(of_node("tokens"), 0),
        "row_positions": rows(of_node("positions"), 0),
        "row_slots": rows(inputs["starts"][:, None].astype(np.int64) + node, -1),
        "row_sequences": rows(sequence, -1),
        "row_depths": rows(of_node("depths"), 0),
        "row_paths": np.where(real[:, :, None], of_node("paths"), root_path).reshape(real.size, -1),
    }


def random_trees(p: Params, rng: np.random.Generator, count: int) -> dict[str, npt.NDArray[Any]]:
    """Trees of `tree_build` for `count` active sequences: the inputs of this family."""
    top_k = min(64, max(2, p.nodes))
    build = tree_build.Params(depth=p.depth, top_k=top_k, budget=p.budget, sequences=p.sequences)
    starts = rng.integers(0, 200_000, size=count, dtype=np.int32)
    tree = tree_build.reference(
        build,
        {
            "log_probs": np.stack([tree_build.random_log_probs(rng, p.depth, top_k, 2.0) for _ in range(count)]),
            "token_ids": rng.integers(0, 163_840, size=(count, p.depth, top_k), dtype=np.int32),
            "root_tokens": rng.integers(0, 163_840, size=count, dtype=np.int32),
            "starts": starts,
            "budgets": rng.integers(0, p.budget + 1, size=count, dtype=np.int32),
        },
    )
    return {
        **{name: tree[name] for name in ("tokens", "positions", "depths", "counts")},
        "paths": tree["paths_out"],
        "starts": starts,
        "active": np.ones(count, np.int32),
        "nodes": np.arange(p.nodes, dtype=np.int32),
    }


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Trees of many sizes, ended sequences among them, garbage wherever nothing is real, counts beyond all bounds."""
    count = min(p.sequences, 16)
    yield Case("one sequence", random_trees(p, rng, 1))
    yield Case("all active", random_trees(p, rng, count))
    some = random_trees(p, rng, count)
    some["active"] = rng.integers(0, 2, size=count, dtype=np.int32)
    yield Case("some ended", some)
    spoiled = random_trees(p, rng, count)
    spoiled["active"][::2] = 0
    for name in ("counts", "starts"):
        spoiled[name][::2] = rng.integers(-(1 << 31), 1 << 31, size=spoiled[name][::2].shape)
    unused = (np.arange(p.nodes) >= spoiled["counts"][:, None]) | (spoiled["active"] == 0)[:, None]
    for name in ("tokens", "positions", "depths"):
        spoiled[name][unused] = rng.integers(-(1 << 31), 1 << 31, size=int(unused.sum()))
    spoiled["paths"][unused] = rng.integers(0, 256, size=spoiled["paths"][unused].shape)
    yield Case("garbage in padding", spoiled)
    bounds = random_trees(p, rng, count)
    bounds["counts"] = np.resize(np.array([0, 1, p.nodes, p.nodes + 1, (1 << 31) - 1, -(1 << 31)]), count).astype(np.int32)
    yield Case("counts at and beyond the bounds", bounds)
    few = random_trees(p, rng, count)
    few["nodes"] = few["nodes"][: max(1, p.nodes // 3)]
    yield Case("only the first nodes", few)
    yield Case("nodes that there are not", {**few, "nodes": np.resize(np.array([p.nodes, 0, -1, 1 << 30]), p.nodes).astype(np.int32)})
    yield Case("all ended", {**random_trees(p, rng, count), "active": np.zeros(count, np.int32)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence, and as many as there may be."""
    for count in sorted({1, p.sequences}):
        one = random_trees(p, rng, 1)
        every = {name: value if name == "nodes" else np.repeat(value, count, axis=0) for name, value in one.items()}
        yield Workload(f"S = {count}", every)


FAMILY = Family(
    name="tree_rows",
    summary="draft trees to the rows of one forward, unused nodes and ended sequences as padding",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
