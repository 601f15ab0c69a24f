"""What a batch of sequences is while it decodes: arrays on the device that the kernels of a round read and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdgen.runtime.array import Array
from kdgen.runtime.device import Device


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: new tokens at most.
    """

    prompt: Sequence[int]
    max_tokens: int


class State:
    """The sequences of a batch; all arrays are i32 with one entry (or row) per sequence.

    Attributes:
        root_tokens: the token that is decided but not yet in the cache.
        starts: its position: how many tokens are in the cache.
        active: 1 while the sequence decodes.
        budgets: nodes beside the root in the next round.
        wanted_budgets: what budgets are while there is room.
        position_limit: positions from here on do not exist.
        max_new_tokens, new_tokens, new_counts: how many new tokens there may be, which, and how many there are.
        stop_tokens: `[stops]`, of all sequences; −1: none.
        history: `[S, positions]`, all decided tokens by position; −1: not decided.
        page_tables: `[S, max_pages]`.
        rounds: verifications so far.
        acceptance: `[S, depth + 1]`: verifications by acceptance length, 1 … depth + 1.
        running: `[1]`: sequences that are active.
    """

    def __init__(self, device: Device, sequences: int, positions: int, max_pages: int, max_new: int, depth: int, stops: int):
        def make(*shape: int, fill: int = 0) -> Array:
            return device.array(np.full(shape, fill, np.int32))

        S = sequences
        self.sequences = S
        self.root_tokens, self.starts, self.active, self.budgets, self.wanted_budgets = (make(S) for _ in range(5))
        self.position_limit, self.max_new_tokens, self.new_counts, self.rounds = (make(S) for _ in range(4))
        self.new_tokens, self.stop_tokens = make(S, max_new, fill=-1), make(stops, fill=-1)
        self.history, self.page_tables = make(S, positions, fill=-1), make(S, max_pages)
        self.acceptance, self.running = make(S, depth + 1), make(1)

    def set(self, **values: Any) -> None:
        """Overwrite arrays by name."""
        for name, value in values.items():
            array: Array = getattr(self, name)
            array.copy_from(np.asarray(value, np.int32).reshape(array.shape))
