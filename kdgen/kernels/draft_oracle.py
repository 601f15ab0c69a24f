"""`draft_oracle`: a drafter for tests that knows how the target goes on, and errs as often as it is told to.

Definition. All integers are 32-bit and wrap. With q = starts[s] + d the position that depth d drafts for, the *truth* is truth[s, q];
it is unknown when q is outside the table or the token is outside the vocabulary. Every choice is a hash of seed and position, so
neither the sequence's number nor its batch mates matter:

    mix(x)         x ^= x >> 16;  x *= 0x85ebca6b;  x ^= x >> 13;  x *= 0xc2b2ae35;  x ^= x >> 16
    hash(c)        mix(mix(mix(seed + 0x9e3779b9) ^ q) ^ c)

    hit            the truth is known, 0 ≤ ranks[d − 1] < K, and (hash(0) >> 8) · 2^−24 < hit_rates[d − 1]
    candidates     at a hit the truth stands at rank ranks[d − 1]; all others are wrong tokens, number 0, 1, … by rank
    wrong token i  the vocabulary has K + 1 strata of width w = vocab // (K + 1) (what remains belongs to none). Number i lies in
                   stratum (hash(1) + i') mod (K + 1), at offset hash(2 + i') mod w; i' = i, or i + 1 from the stratum that holds a
                   known truth on. So all candidates of a depth differ.
    log_probs      level[0] + rank · level[1], each operation rounded to f32, with the level number hash(0) & 3 of `LEVELS`:
                   geometric distributions, from sharp to flat
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.targets import Target

#: (log-prob of rank 0, what each further rank adds) of p(rank) = (1 − r) · r^rank.
LEVELS = tuple((float(np.float32(math.log(1 - r))), float(np.float32(math.log(r)))) for r in (0.3, 0.45, 0.6, 0.75))
WORDS = 1 << 32


class Params(FamilyParams):
    """Sizes the kernel is built for; depth and top_k match the `tree_build` that reads the draft."""

    depth: Annotated[int, Field(ge=1, le=16, description="draft positions L")]
    top_k: Annotated[int, Field(ge=1, le=64, description="candidates K given per depth")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")] = 64
    positions: Annotated[int, Field(ge=1, le=1 << 24, description="columns of truth")]
    vocab: Annotated[int, Field(ge=2, le=1 << 30, description="token ids are below this")]

    @model_validator(mode="after")
    def _enough_tokens(self) -> Self:
        if self.vocab <= self.top_k:
            raise ValueError(f"vocab = {self.vocab} leaves no {self.top_k} wrong tokens; it must be at least top_k + 1 = {self.top_k + 1}")
        return self

    @property
    def width(self) -> int:
        """Tokens of a stratum."""
        return self.vocab // (self.top_k + 1)


def threads(p: Params) -> int:
    """Threads of a block: one per candidate, in whole warps."""
    return min(256, round_up(p.depth * p.top_k, 32))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; a block per sequence."""
    return Contract(
        family="draft_oracle",
        arguments=(
            Argument("truth", "i32", ("S", p.positions), doc="tokens by position; others than 0 … vocab − 1: unknown"),
            Argument("starts", "i32", ("S",), doc="position of the root"),
            Argument("hit_rates", "f32", (p.depth,), doc="probability by depth that the truth is among the candidates"),
            Argument("ranks", "i32", (p.depth,), doc="where a hit stands, by depth; others than 0 … top_k − 1: nowhere"),
            Argument("seed", "u32", (1,), doc="of every choice"),
            Argument("log_probs", "f32", ("S", p.depth, p.top_k), "out", "natural log-probabilities, descending within a depth"),
            Argument("token_ids", "i32", ("S", p.depth, p.top_k), "out", "their tokens"),
        ),
        capacities={"S": Capacity(1, p.sequences)},
        launches=(Launch("draft_oracle", ("S", 1, 1), threads(p), programmatic=target.bulk_copy),),
        pinned={"vocab": p.vocab, "top_k": p.top_k},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"threads": threads(p), "width": p.width, "firsts": tuple(x for x, _ in LEVELS), "steps": tuple(x for _, x in LEVELS)}


def mix(x: int) -> int:
    """The finaliser of MurmurHash3: every bit of the result depends on every bit of x."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % WORDS
    x ^= x >> 13
    x = x * 0xC2B2AE35 % WORDS
    return x ^ x >> 16


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Both outputs, from the definition; exact."""
    count = len(inputs["starts"])
    log_probs = np.empty((count, p.depth, p.top_k), np.float32)
    token_ids = np.empty((count, p.depth, p.top_k), np.int32)
    seeded, strata = mix((int(inputs["seed"][0]) + 0x9E3779B9) % WORDS), p.top_k + 1
    for s in range(count):
        for d in range(1, p.depth + 1):
            q = int(inputs["starts"][s]) + d
            base = mix(seeded ^ q % WORDS)
            truth = int(inputs["truth"][s, q]) if 0 <= q < p.positions else -1
            known = 0 <= truth < p.vocab
            first = mix(base ^ 1) % strata
            avoided = (truth // p.width - first) % strata if known and truth // p.width < strata else strata
            shifted = (i + (i >= avoided) for i in range(p.top_k))
            wrong = [(first + i) % strata * p.width + mix(base ^ 2 + i) % p.width for i in shifted]
            rank, chance = int(inputs["ranks"][d - 1]), np.float32((mix(base) >> 8) * 2.0**-24)
            if known and 0 <= rank < p.top_k and bool(chance < inputs["hit_rates"][d - 1]):
                wrong.insert(rank, truth)
            token_ids[s, d - 1] = wrong[: p.top_k]
            at_zero, step = (np.float32(x) for x in LEVELS[mix(base) & 3])
            log_probs[s, d - 1] = at_zero + np.arange(p.top_k, dtype=np.float32) * step
    return {"log_probs": log_probs, "token_ids": token_ids}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Hits always, never and now and then, at every rank; unknown truths, starts near and beyond both ends, ranks that are none."""
    count = max(1, min(p.sequences, 16, (1 << 20) // p.positions))

    def case(name: str, **other: npt.NDArray[Any]) -> Case:
        starts = rng.integers(0, p.positions, size=count, dtype=np.int32)
        return Case(
            name,
            {
                "truth": rng.integers(0, p.vocab, size=(count, p.positions), dtype=np.int32),
                "starts": starts,
                "hit_rates": rng.uniform(size=p.depth).astype(np.float32),
                "ranks": rng.integers(0, p.top_k, size=p.depth, dtype=np.int32),
                "seed": rng.integers(0, WORDS, size=1, dtype=np.uint32),
                **other,
            },
        )

    yield case("now and then")
    yield case("always", hit_rates=np.ones(p.depth, np.float32), ranks=np.zeros(p.depth, np.int32))
    yield case("never", hit_rates=np.zeros(p.depth, np.float32))
    yield case("the last rank", hit_rates=np.full(p.depth, 2, np.float32), ranks=np.full(p.depth, p.top_k - 1, np.int32))
    truth = rng.integers(-3, p.vocab + 3, size=(count, p.positions))
    truth[rng.random(truth.shape) < 0.5] = -1
    yield case("unknown truths", truth=truth.astype(np.int32), hit_rates=np.ones(p.depth, np.float32))
    top = (1 << 31) - 1
    edges = np.resize(np.array([-1, 0, -p.depth, p.positions - 1, p.positions, top, -top - 1]), count).astype(np.int32)
    yield case("starts at and beyond the ends", starts=edges, hit_rates=np.ones(p.depth, np.float32))
    odd = np.resize(np.array([-1, p.top_k, top, -top - 1]), p.depth).astype(np.int32)
    yield case("ranks that are none", ranks=odd, hit_rates=np.ones(p.depth, np.float32))
    yield case("rates that are no number", hit_rates=np.full(p.depth, np.nan, np.float32))
    yield case("the last tokens", truth=np.full((count, p.positions), p.vocab - 1, np.int32))


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One sequence, and eight."""
    for count in sorted({1, min(8, p.sequences)}):
        yield Workload(
            f"S = {count}",
            {
                "truth": np.zeros((count, p.positions), np.int32),
                "starts": rng.integers(0, p.positions, size=count, dtype=np.int32),
                "hit_rates": np.full(p.depth, 0.7, np.float32),
                "ranks": np.zeros(p.depth, np.int32),
                "seed": np.ones(1, np.uint32),
            },
        )


FAMILY = Family(
    name="draft_oracle",
    summary="a drafter for tests that knows how the target goes on, and errs as often as it is told to",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="S",
)
