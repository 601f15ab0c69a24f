"""`tree_commit`: what a round decided goes into the state of every sequence; says which of them go on.

Terms:
    start, root    the root is the newest decided token; it sits at position `start` and is not yet in the cache.
    a              acceptance length of the round, `accepted_counts[s]` clamped to 1 … depth + 1.
    new tokens     committed[s, 1 … a − 1], then next_roots[s]; the j-th of them (from 0) belongs to position start + 1 + j.
    limit          min(position_limit[s], positions): positions from here on do not exist, in the cache or in the history.
    most           min(max_new_tokens[s], max_new)

Definition, for every sequence with active[s] ≠ 0; of the others nothing changes. New tokens are kept in order until

    one of them is a stop token (which is kept),
    new_counts[s] has reached `most`, or
    one of them stands at `limit` (it is kept: the model chose it, but there is no room to decode it);

each of these ends the sequence, and the rest is dropped. Then, with `keep` tokens kept:

    new_tokens[s], new_counts[s]   the tokens are appended
    history[s, position]           the token, where position < positions
    root_tokens[s], starts[s]      the last token kept, start + keep
    budgets[s]                     min(wanted_budgets[s], limit − start − 1, budget), at least 0: the nodes of the next tree take the
                                   slots start + 1 … start + budgets[s], which must exist; 0 when ended
    active[s]                      0 when ended
    rounds[s]                      one more
    acceptance[s, a − 1]           one more
    running[0]                     sequences still active

A count or a position that is out of bounds writes nothing outside the arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """Sizes the kernel is built for; depth and budget match the `tree_accept` whose outcome it reads."""

    depth: Annotated[int, Field(ge=1, le=16, description="deepest node's depth")]
    budget: Annotated[int, Field(ge=0, le=255, description="most nodes beside the root")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64
    stops: Annotated[int, Field(ge=1, le=32, description="most stop tokens")] = 8
    max_new: Annotated[int, Field(ge=1, le=1 << 24, description="most new tokens of a sequence: columns of new_tokens")]
    positions: Annotated[int, Field(ge=1, le=1 << 24, description="columns of history")]

    @property
    def lanes(self) -> int:
        """Lanes of a sequence: one per new token, a power of two."""
        return 1 << self.depth.bit_length()

    @property
    def warps(self) -> int:
        """Warps of the block."""
        return min(32, ceil_div(self.sequences * self.lanes, 32))


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of the block: active sequences, counted by each warp."""
    return SharedLayout.place(target, ("still", p.warps * 4, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one block."""
    each = ("S",)
    return Contract(
        family="tree_commit",
        arguments=(
            Argument("committed", "i32", ("S", p.depth + 1), doc="tokens of the accepted nodes, the root first"),
            Argument("accepted_counts", "i32", each, doc="acceptance length: accepted nodes, 1 … depth + 1"),
            Argument("next_roots", "i32", each, doc="the bonus token"),
            Argument("stop_tokens", "i32", (p.stops,), doc="tokens that end a sequence; negative: unused"),
            Argument("max_new_tokens", "i32", each, doc="most new tokens"),
            Argument("position_limit", "i32", each, doc="positions from here on do not exist"),
            Argument("wanted_budgets", "i32", each, doc="nodes beside the root, where there is room"),
            Argument("sequence_count", "i32", each, "dimension", "sequences"),
            Argument("root_tokens", "i32", each, "inout", "the newest decided token"),
            Argument("starts", "i32", each, "inout", "its position"),
            Argument("active", "i32", each, "inout", "0: ended"),
            Argument("budgets", "i32", each, "inout", "nodes of the next tree beside the root"),
            Argument("new_tokens", "i32", ("S", p.max_new), "inout", "the tokens decided so far"),
            Argument("new_counts", "i32", each, "inout", "how many they are"),
            Argument("history", "i32", ("S", p.positions), "inout", "every decided token by position"),
            Argument("rounds", "i32", each, "inout", "rounds so far"),
            Argument("acceptance", "i32", ("S", p.depth + 1), "inout", "rounds by acceptance length, 1 … depth + 1"),
            Argument("running", "i32", (1,), "out", "sequences still active"),
        ),
        capacities={"S": Capacity(1, p.sequences)},
        launches=(Launch("tree_commit", (1, 1, 1), p.warps * 32, shared(p, target).total, programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"lanes": p.lanes, "warps": p.warps, "group_bits": (1 << p.lanes) - 1}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Every output of the kernel, token by token from the definition; exact."""
    changed = (
        "root_tokens", "starts", "active", "budgets", "new_tokens", "new_counts", "history", "rounds", "acceptance",
    )  # fmt: skip
    out = {name: inputs[name].copy() for name in changed}
    stops = {int(token) for token in inputs["stop_tokens"] if token >= 0}
    for s in np.flatnonzero(inputs["active"]):
        a = int(np.clip(inputs["accepted_counts"][s], 1, p.depth + 1))
        limit = min(int(inputs["position_limit"][s]), p.positions)
        most = min(int(inputs["max_new_tokens"][s]), p.max_new)
        start, written, root = int(inputs["starts"][s]), int(inputs["new_counts"][s]), int(inputs["root_tokens"][s])
        stopped = False
        for token in [*inputs["committed"][s, 1:a].tolist(), int(inputs["next_roots"][s])]:
            if stopped or written >= most or start >= limit:
                break
            if 0 <= written < p.max_new:
                out["new_tokens"][s, written] = token
            start, written, root = start + 1, written + 1, token
            if 0 <= start < p.positions:
                out["history"][s, start] = token
            stopped = token in stops
        ended = stopped or written >= most or start >= limit
        out["root_tokens"][s], out["starts"][s], out["new_counts"][s] = root, start, written
        out["budgets"][s] = 0 if ended else max(0, min(int(inputs["wanted_budgets"][s]), limit - start - 1, p.budget))
        if ended:
            out["active"][s] = 0
        out["rounds"][s] += 1
        out["acceptance"][s, a - 1] += 1
    out["running"] = np.array([np.count_nonzero(out["active"])], np.int32)
    return out


def random_state(p: Params, rng: np.random.Generator, count: int) -> dict[str, npt.NDArray[Any]]:
    """`count` sequences in the middle of their work, with room on all sides where the sizes allow it."""
    reach = p.depth + 1
    accepted = rng.integers(1, p.depth + 2, size=count, dtype=np.int32)
    committed = rng.integers(100, 163_840, size=(count, p.depth + 1), dtype=np.int32)
    committed[np.arange(p.depth + 1) >= accepted[:, None]] = -1
    stops = np.full(p.stops, -1, np.int32)
    stops[: (p.stops + 1) // 2] = rng.permutation(50)[: (p.stops + 1) // 2]
    return {
        "committed": committed,
        "accepted_counts": accepted,
        "next_roots": rng.integers(100, 163_840, size=count, dtype=np.int32),
        "stop_tokens": rng.permutation(stops),
        "max_new_tokens": np.full(count, p.max_new, np.int32),
        "position_limit": np.full(count, p.positions, np.int32),
        "wanted_budgets": rng.integers(0, p.budget + 1, size=count, dtype=np.int32),
        "root_tokens": rng.integers(100, 163_840, size=count, dtype=np.int32),
        "starts": rng.integers(0, max(1, p.positions - reach - p.budget), size=count, dtype=np.int32),
        "active": np.ones(count, np.int32),
        "budgets": rng.integers(0, p.budget + 1, size=count, dtype=np.int32),
        "new_tokens": rng.integers(-(1 << 31), 1 << 31, size=(count, p.max_new)).astype(np.int32),
        "new_counts": rng.integers(0, max(1, p.max_new - reach), size=count, dtype=np.int32),
        "history": rng.integers(-(1 << 31), 1 << 31, size=(count, p.positions)).astype(np.int32),
        "rounds": rng.integers(0, 100, size=count, dtype=np.int32),
        "acceptance": rng.integers(0, 100, size=(count, p.depth + 1), dtype=np.int32),
    }


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Sequences that go on and sequences that end for every reason, in every place of a round; garbage in those that have ended."""
    count = max(1, min(p.sequences, 48, (1 << 20) // (p.positions + p.max_new)))
    state = random_state(p, rng, 1)
    yield Case("one sequence", state)
    yield Case("all go on", random_state(p, rng, count))

    state = random_state(p, rng, count)
    stop = int(state["stop_tokens"].max())
    for s in range(count):
        for place in rng.integers(0, state["accepted_counts"][s] + 1, size=1 + s % 2):
            if place < state["accepted_counts"][s]:
                state["committed"][s, place] = stop  # as the root too: that one was decided before and stops nothing
            else:
                state["next_roots"][s] = stop
    yield Case("stop tokens", state)

    state = random_state(p, rng, count)
    state["max_new_tokens"] = (state["new_counts"] + rng.integers(-1, p.depth + 3, size=count)).astype(np.int32)
    yield Case("most new tokens", state)
    state = random_state(p, rng, count)
    state["new_counts"] = np.clip(p.max_new - rng.integers(0, p.depth + 3, size=count), 0, None).astype(np.int32)
    state["max_new_tokens"][:] = (1 << 31) - 1
    yield Case("the output is full", state)

    state = random_state(p, rng, count)
    state["position_limit"] = (state["starts"] + rng.integers(-1, p.depth + p.budget + 3, size=count)).astype(np.int32)
    yield Case("the context ends", state)
    state = random_state(p, rng, count)
    state["starts"] = np.clip(p.positions - rng.integers(0, p.depth + 3, size=count), 0, None).astype(np.int32)
    state["position_limit"][:] = (1 << 31) - 1
    yield Case("the history is full", state)

    state = random_state(p, rng, count)
    state["active"] = rng.integers(0, 2, size=count, dtype=np.int32)
    ended = state["active"] == 0
    for name, value in state.items():
        if name not in ("active", "stop_tokens"):
            value[ended] = rng.integers(-(1 << 31), 1 << 31, size=value[ended].shape)
    yield Case("garbage in ended sequences", state)
    state = random_state(p, rng, count)
    for name in ("accepted_counts", "max_new_tokens", "position_limit", "wanted_budgets", "starts", "new_counts"):
        wild = rng.integers(-(1 << 31), 1 << 31, size=count)
        # Not so near the ends that a count itself runs over.
        state[name] = np.where(rng.random(count) < 0.4, np.clip(wild, -(1 << 31), (1 << 31) - 64), state[name]).astype(np.int32)
    yield Case("values beyond all bounds", state)
    yield Case("all ended", {**random_state(p, rng, count), "active": np.zeros(count, np.int32)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Sequences that go on."""
    for count in sorted({1, min(8, p.sequences), p.sequences}):
        yield Workload(f"S = {count}", random_state(p, rng, count))


FAMILY = Family(
    name="tree_commit",
    summary="what a round decided into the state of every sequence, and which of them go on",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="S",
)
