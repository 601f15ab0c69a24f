"""`tree_accept`: which drafted nodes the target agrees with, per sequence.

Definition. Node i agrees when its token is the target's choice at its parent; the root always does. The winner is the deepest node
whose whole path agrees, the first of equals. The tokens of siblings differ, so this is the walk "from the root, follow the child
whose token the target chose". The winner's path is accepted, its choice is the next root: a token decided but not yet in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels import tree_build
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """Sizes the kernel is built for; they match the `tree_build` whose trees it reads."""

    depth: Annotated[int, Field(ge=1, le=16, description="deepest node's depth")]
    budget: Annotated[int, Field(ge=0, le=255, description="most nodes beside the root")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block."""
    return SharedLayout.place(target, ("choices", (p.budget + 1) * 4, 16), ("agrees", p.budget + 1, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one warp per sequence."""
    nodes = p.budget + 1
    per_node, per_level = ("S", nodes), ("S", p.depth + 1)
    return Contract(
        family="tree_accept",
        arguments=(
            Argument("tokens", "i32", per_node, doc="node tokens"),
            Argument("parents", "i32", per_node, doc="parent node, −1 for the root"),
            Argument("depths", "i32", per_node, doc="node depths"),
            Argument("paths", "u8", ("S", nodes, tree_build.path_bytes(p.depth)), doc="node index at each depth up to the node itself"),
            Argument("counts", "i32", ("S",), doc="nodes, the root included"),
            Argument("choices", "i32", ("S", "R"), doc="the target's token after each of the first R nodes; there are no others"),
            Argument("choice_count", "i32", ("R",), "dimension", "nodes that the target has looked at"),
            Argument("starts", "i32", ("S",), doc="position of the root"),
            Argument("accepted", "i32", per_level, "out", "accepted nodes by depth, the root first; −1 beyond"),
            Argument("committed", "i32", per_level, "out", "their tokens; −1 beyond"),
            Argument("accepted_counts", "i32", ("S",), "out", "acceptance length: accepted nodes, 1 … depth + 1"),
            Argument("next_roots", "i32", ("S",), "out", "the bonus token: the target's choice after the last accepted node"),
            Argument("next_starts", "i32", ("S",), "out", "start + acceptance length"),
        ),
        capacities={"S": Capacity(1, p.sequences), "R": Capacity(1, nodes)},
        launches=(Launch("tree_accept", ("S", 1, 1), 32, shared(p, target).total),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"slots": ceil_div(p.budget + 1, 32), "path_bytes": tree_build.path_bytes(p.depth)}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Every output of the kernel, from the definition; exact."""
    tokens, parents, depths, choices = (inputs[name] for name in ("tokens", "parents", "depths", "choices"))
    sequences = len(tokens)
    out: dict[str, npt.NDArray[Any]] = {name: np.full((sequences, p.depth + 1), -1, np.int32) for name in ("accepted", "committed")}
    for name in ("accepted_counts", "next_roots", "next_starts"):
        out[name] = np.empty(sequences, np.int32)
    for s in range(sequences):
        agrees = [True]
        for i in range(1, min(int(inputs["counts"][s]), choices.shape[1])):
            parent = parents[s, i]
            agrees.append(bool(agrees[parent] and tokens[s, i] == choices[s, parent]))
        leaf = max(np.flatnonzero(agrees), key=lambda i: (depths[s, i], -i))
        path = [int(leaf)]
        while path[-1]:
            path.append(int(parents[s, path[-1]]))
        path.reverse()
        out["accepted"][s, : len(path)] = path
        out["committed"][s, : len(path)] = tokens[s, path]
        out["accepted_counts"][s] = len(path)
        out["next_roots"][s] = choices[s, leaf]
        out["next_starts"][s] = inputs["starts"][s] + len(path)
    return out


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Trees of the builder with targets that follow a path to every depth, that agree nowhere, and that have seen only part of it."""
    top_k = min(64, max(2, p.budget + 1))
    build = tree_build.Params(depth=p.depth, top_k=top_k, budget=p.budget, sequences=p.sequences)
    for name, follow, steps in (("follows a random path", 1.0, 0), ("leaves it now and then", 0.7, 2), ("agrees nowhere", 0.0, 0)):
        count = min(p.sequences, 16)
        tables = np.stack([tree_build.random_log_probs(rng, p.depth, top_k, 2.0, steps) for _ in range(count)])
        token_ids = np.stack([np.stack([rng.permutation(1000)[:top_k] for _ in range(p.depth)]) for _ in range(count)]).astype(np.int32)
        inputs = {
            "log_probs": tables,
            "token_ids": token_ids,
            "root_tokens": np.full(count, 7, np.int32),
            "starts": rng.integers(0, 200_000, size=count, dtype=np.int32),
            "budgets": rng.integers(0, p.budget + 1, size=count, dtype=np.int32),
        }
        tree = tree_build.reference(build, inputs)
        choices = rng.integers(1000, 2000, size=tree["tokens"].shape, dtype=np.int32)
        for s in range(count):
            node = int(rng.integers(0, tree["counts"][s]))
            while node:
                parent = tree["parents"][s, node]
                if rng.random() < follow:
                    choices[s, parent] = tree["tokens"][s, node]
                node = parent
        inputs = {
            **{key: tree[key] for key in ("tokens", "parents", "depths", "counts")},
            "paths": tree["paths_out"],
            "choices": choices,
            "starts": inputs["starts"],
        }
        yield Case(name, inputs)
    few = max(1, (p.budget + 1) // 2)
    yield Case("only the first nodes were looked at", {**inputs, "choices": np.ascontiguousarray(choices[:, :few])})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence's full tree whose target follows a random path."""
    one = Params(depth=p.depth, budget=p.budget, sequences=1)
    yield Workload(f"B = {p.budget}", next(cases(one, rng)).inputs)


FAMILY = Family(
    name="tree_accept",
    summary="the longest drafted path the target agrees with, and the bonus token",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="S",
)
