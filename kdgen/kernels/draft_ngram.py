"""`draft_ngram`: a draft from the sequence itself, by looking up where its last tokens occurred before.

Definition. The sequence is x[0 … start]: x[start] = root_tokens[s], and history[s, i] below. A negative token is unknown: it equals
nothing. A place e < start *matches* n tokens when x[e − i] = x[start − i] for i = 0 … n − 1, and n is the largest such number up to
n_max; places before 0 match nothing. n is the largest match of all places; when it is below n_min there is no draft at all.

The *occurrences* are the K latest places e that match n tokens, latest first. An occurrence's follower at depth d is x[e + d], where
e + d ≤ start and the token is known. The candidates of a depth are the distinct followers there, in the order of the occurrences; behind
them there is no token: id 0, log-prob −inf.

    log_probs    certainty[n][0] + rank · certainty[n][1], each operation rounded to f32: log of p · (1 − p)^rank with p = 0.6, 0.7,
                 0.8 for n = 1, 2, 3 and 0.9 from 4 on

A start outside the history makes no draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target

#: Places that a thread looks at in a step, all loads in flight.
PLACES = 8


class Params(FamilyParams):
    """Sizes the kernel is built for; depth and top_k match the `tree_build` that reads the draft."""

    depth: Annotated[int, Field(ge=1, le=16, description="draft positions L")]
    top_k: Annotated[int, Field(ge=1, le=64, description="most candidates K per depth, and occurrences that are looked at")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64
    positions: Annotated[int, Field(ge=1, le=1 << 24, description="columns of history")]
    n_max: Annotated[int, Field(ge=1, le=32, description="longest match that counts")] = 8
    n_min: Annotated[int, Field(ge=1, le=32, description="shortest match that makes a draft")] = 2

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.n_min > self.n_max:
            raise ValueError(f"n_min = {self.n_min} is above n_max = {self.n_max}")
        return self


def threads(p: Params) -> int:
    """Threads of a block: enough for the whole history in one step, where that is possible."""
    return min(1024, round_up(ceil_div(p.positions, PLACES), 32))


def certainty(n: int) -> tuple[float, float]:
    """(log-prob of rank 0, what each further rank adds) after a match of n tokens; both are f32 values."""
    likely = min(9, 5 + n) / 10
    return float(np.float32(math.log(likely))), float(np.float32(math.log1p(-likely)))


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: the last tokens, findings of each warp, the occurrences and their followers."""
    return SharedLayout.place(
        target,
        ("suffix", p.n_max * 4, 16),
        ("longest", 2 * 32 * 4, 16),
        ("hits", 32 * 4, 16),
        ("places", p.top_k * 4, 16),
        ("followers", p.depth * p.top_k * 4, 16),
        ("fresh", p.depth * p.top_k, 16),
    )


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a block per sequence."""
    return Contract(
        family="draft_ngram",
        arguments=(
            Argument("history", "i32", ("S", p.positions), doc="tokens by position; below the root only; negative: unknown"),
            Argument("starts", "i32", ("S",), doc="position of the root"),
            Argument("root_tokens", "i32", ("S",), doc="the token already decided, at the position starts"),
            Argument("log_probs", "f32", ("S", p.depth, p.top_k), "out", "natural log-probabilities, descending; −inf: no token"),
            Argument("token_ids", "i32", ("S", p.depth, p.top_k), "out", "their tokens; 0 where there is none"),
        ),
        capacities={"S": Capacity(1, p.sequences)},
        launches=(Launch("draft_ngram", ("S", 1, 1), threads(p), shared(p, target).total, programmatic=target.bulk_copy),),
        pinned={"n_max": p.n_max, "n_min": p.n_min, "top_k": p.top_k},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    certain = [certainty(n) for n in range(1, 5)]
    return {
        "threads": threads(p),
        "loads": PLACES,
        "firsts": tuple(x for x, _ in certain),
        "steps": tuple(x for _, x in certain),
    }


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Both outputs, from the definition; exact."""
    count = len(inputs["starts"])
    log_probs = np.full((count, p.depth, p.top_k), -np.inf, np.float32)
    token_ids = np.zeros((count, p.depth, p.top_k), np.int32)
    for s in range(count):
        start = int(inputs["starts"][s])
        if not 0 <= start < p.positions:
            continue
        x = np.append(inputs["history"][s, :start], inputs["root_tokens"][s])
        lengths = np.zeros(start, np.int64)
        matching = np.ones(start, bool)
        for i in range(min(p.n_max, start)):
            # Place e − i holds the token that is compared; the first i places have none.
            equal = np.zeros(start, bool)
            equal[i:] = (x[: start - i] == x[start - i]) & (x[start - i] >= 0)
            matching &= equal
            lengths += matching
        n = int(lengths.max(initial=0))
        if n < p.n_min:
            continue
        at_zero, step = (np.float32(value) for value in certainty(n))
        for d in range(1, p.depth + 1):
            followers = [int(x[e + d]) for e in np.flatnonzero(lengths == n)[::-1][: p.top_k] if e + d <= start and x[e + d] >= 0]
            for rank, token in enumerate(dict.fromkeys(followers)):
                token_ids[s, d - 1, rank] = token
                log_probs[s, d - 1, rank] = at_zero + np.float32(rank) * step
    return {"log_probs": log_probs, "token_ids": token_ids}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Random text of few and many words, planted repeats of every length and at both ends, one token only, unknown tokens, odd starts."""
    count = max(1, min(p.sequences, 16, (1 << 20) // p.positions))
    last = p.positions - 1

    def case(name: str, history: npt.NDArray[Any], starts: npt.NDArray[Any]) -> Case:
        history, starts = history.astype(np.int32), starts.astype(np.int32)
        inside = np.clip(starts, 0, last)
        roots = history[np.arange(count), inside].copy()
        for s in range(count):
            # Whatever the history holds from the root on is of no account.
            history[s, inside[s] :] = rng.integers(-(1 << 31), 1 << 31, size=p.positions - inside[s])
        return Case(name, {"history": history, "starts": starts, "root_tokens": roots})

    def text(words: int) -> npt.NDArray[Any]:
        return rng.integers(0, words, size=(count, p.positions))

    anywhere = rng.integers(0, p.positions, size=count)
    for words in (2, 5, 100, 163_840):
        yield case(f"{words} words", text(words), anywhere)
    yield case("short sequences", text(3), np.minimum(np.arange(count), last))
    yield case(
        "one token only", np.full((count, p.positions), 9), np.resize(np.array([last, 0, 1, p.n_max, last // 2]), count).clip(0, last)
    )
    for name, places in (("planted", 3), ("planted once", 1)):
        history = text(1 << 30)
        starts = np.full(count, last)
        for s in range(count):
            for _ in range(places):
                n = int(rng.integers(1, p.n_max + 3))
                e = int(rng.integers(0, max(1, last))) if s else min(n, last) - 1  # the first sequence: at the very beginning
                n = min(n, e + 1)
                if n > 0:
                    history[s, e - n + 1 : e + 1] = history[s, last - n + 1 : last + 1]
        yield case(name, history, starts)
    period = min(5, p.positions)
    yield case("a period", np.resize(np.arange(period), (count, p.positions)) % period, anywhere)
    unknown = text(3)
    unknown[rng.random(unknown.shape) < 0.2] = -1
    yield case("unknown tokens", unknown, anywhere)
    top = (1 << 31) - 1
    yield case("starts that are none", text(2), np.resize(np.array([-1, p.positions, top, -top - 1, last]), count))


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence of 8k and of all tokens, with a match far back."""
    for start in sorted({min(8192, p.positions) - 1, p.positions - 1}):
        history = rng.integers(0, 163_840, size=(1, p.positions), dtype=np.int32)
        n = min(p.n_max, start // 2)
        history[0, 1 : n + 1] = history[0, start - n + 1 : start + 1]
        inputs = {"history": history, "starts": np.full(1, start, np.int32), "root_tokens": history[:, start].copy()}
        yield Workload(f"{start + 1} tokens", inputs)


FAMILY = Family(
    name="draft_ngram",
    summary="a draft from the sequence itself: what followed when its last tokens occurred before",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="S",
)
