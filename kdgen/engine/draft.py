"""Drafters: what proposes tokens for the next positions.

Each is one kernel, which fills log-probs and ids `[S, depth, top_k]` on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kdgen.engine.state import State
from kdgen.errors import UsageError
from kdgen.runtime import Kernel
from kdgen.runtime.array import Array
from kdgen.runtime.call import BoundCall

#: No tree has so many ranks.
MOST_RANK = 1 << 16


class Drafter(Protocol):
    """What proposes tokens."""

    @property
    def name(self) -> str:
        """As given on the command line."""

    def bind(self, kit: Mapping[str, Kernel], state: State) -> tuple[BoundCall, Array, Array]:
        """The launch, and the log-probs and token ids that it writes."""


@dataclass(frozen=True)
class Ngram:
    """Prompt lookup: what followed the last few tokens when they stood before."""

    name: str = "ngram"

    def bind(self, kit: Mapping[str, Kernel], state: State) -> tuple[BoundCall, Array, Array]:
        """See `Drafter`."""
        kernel = kit["draft_ngram"]
        arrays = kernel.complete(history=state.history, starts=state.starts, root_tokens=state.root_tokens)
        return kernel.bind(**arrays), arrays["log_probs"], arrays["token_ids"]


@dataclass(frozen=True)
class Oracle:
    """Knows the target's continuation, and errs as often as it is told; for tests and for timing.

    Attributes:
        hit_rates: per depth, how often the true token is among the candidates; the last one holds for all further depths.
        ranks: per depth, at which rank it then stands, 0 is the most probable; likewise.
        seed: of its errors.
        truth: the target's tokens by position, one list per sequence; −1 or missing: unknown.
    """

    hit_rates: tuple[float, ...] = (1.0,)
    ranks: tuple[int, ...] = (0,)
    seed: int = 0
    truth: tuple[tuple[int, ...], ...] = ()
    name: str = "oracle"

    def __post_init__(self) -> None:
        if not self.hit_rates or not self.ranks or not 0 <= self.seed < 1 << 32:
            raise UsageError(f"an oracle needs a hit rate, a rank, and a seed of 0 … 2^32 − 1; got {self}")

    def bind(self, kit: Mapping[str, Kernel], state: State) -> tuple[BoundCall, Array, Array]:
        """See `Drafter`."""
        kernel, device = kit["draft_oracle"], state.starts.device
        depth = kernel.contract.extent("log_probs", 1)
        truth = np.full(state.history.shape, -1, np.int32)
        for row, known in zip(truth, self.truth, strict=False):
            row[: len(known)] = known[: len(row)]
        arrays: dict[str, Any] = kernel.complete(
            truth=device.array(truth),
            starts=state.starts,
            hit_rates=device.array(np.array(_filled(self.hit_rates, depth), np.float32)),
            ranks=device.array(np.array(_filled(self.ranks, depth), np.int32)),
            seed=device.array(np.array([self.seed], np.uint32)),
        )
        return kernel.bind(**arrays), arrays["log_probs"], arrays["token_ids"]


def _filled(values: Sequence[Any], count: int) -> list[Any]:
    return [*values[:count], *[values[-1]] * (count - len(values))]


def parse_drafter(text: str) -> Drafter:
    """`ngram`, `oracle`, `oracle:0.9`, `oracle:0.9,0.5` (per depth), `oracle:0.9@2` (true tokens at rank 2).

    Raises:
        UsageError: anything else.
    """
    name, _, rest = text.partition(":")
    if name == "ngram" and not rest:
        return Ngram()
    if name == "oracle":
        rates, _, ranks = rest.partition("@")
        try:
            hit_rates = tuple(float(rate) for rate in rates.split(",")) if rates else (1.0,)
            places = tuple(int(rank) for rank in ranks.split(",")) if ranks else (0,)
        except ValueError:
            hit_rates, places = (-1.0,), (0,)
        if all(0 <= rate <= 1 for rate in hit_rates) and all(0 <= rank < MOST_RANK for rank in places):
            return Oracle(hit_rates, places, name=text)
    raise UsageError(f"drafter '{text}': allowed are ngram, oracle, oracle:RATE[,RATE…][@RANK[,RANK…]] with rates 0 … 1 and ranks from 0")
