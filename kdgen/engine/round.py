"""One round of decoding on the device: draft → tree → rows → forward → accepted path → compacted cache → next root.

A plain decode step is a round without a draft, whose trees are the root alone; a chain is a tree as wide as one node. So whatever a
row's neighbours are, its logits come from the same launches' same arithmetic, and all modes give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kdgen.engine.draft import Drafter
from kdgen.engine.forward import Forward, Rows
from kdgen.engine.state import State
from kdgen.engine.weights import ModelWeights
from kdgen.runtime import Kernel
from kdgen.runtime.array import Array
from kdgen.runtime.call import BoundCall
from kdgen.spec.model import EngineSpec


class Round:
    """The launches of a round for every sequence of a state, bound to its arrays.

    Args:
        kit: kernels of an engine spec by name.
        spec: the engine part of that spec.
        weights: of the model.
        cache: latents and rotary keys of every layer.
        state: the sequences.
        nodes: rows per sequence: the root and as many nodes as the largest tree of the round may have.
        builder: the kernel that builds the tree: `tree_build` or `chain_build`.
        drafter: None for plain decoding.

    Attributes:
        forward: of T = sequences · nodes rows.
        tree: what the builder wrote.
        accepted: what was accepted: `accepted`, `accepted_counts`, `committed`, `next_roots`, `next_starts`.
    """

    def __init__(
        self,
        kit: Mapping[str, Kernel],
        spec: EngineSpec,
        weights: ModelWeights,
        cache: Array,
        state: State,
        nodes: int,
        builder: str,
        drafter: Drafter | None,
    ):
        device, S = cache.device, state.sequences
        shape = (S, spec.tree.depth, spec.tree.top_k)
        self.before: list[tuple[str, BoundCall]] = []
        self.after: list[tuple[str, BoundCall]] = []
        if drafter is None:
            log_probs, token_ids = device.array(np.zeros(shape, np.float32)), device.array(np.zeros(shape, np.int32))
        else:
            call, log_probs, token_ids = drafter.bind(kit, state)
            self.before.append(("draft", call))

        def run(to: list[tuple[str, BoundCall]], kernel: str, /, **arrays: Any) -> dict[str, Any]:
            complete = kit[kernel].complete(**arrays)
            to.append((kernel, kit[kernel].bind(**complete)))
            return complete

        self.tree = run(
            self.before, builder, log_probs=log_probs, token_ids=token_ids, root_tokens=state.root_tokens, starts=state.starts,
            budgets=state.budgets,
        )  # fmt: skip
        tree = {name: self.tree[name] for name in ("tokens", "depths", "counts")}
        rows = run(
            self.before, "tree_rows", **tree, nodes=device.array(np.arange(nodes, dtype=np.int32)),
            positions=self.tree["positions"], paths=self.tree["paths_out"],
            starts=state.starts, active=state.active,
        )  # fmt: skip
        self.forward = Forward(
            kit, spec, weights, cache,
            Rows(
                ids=rows["ids"], positions=rows["row_positions"], slots=rows["row_slots"], sequences=rows["row_sequences"],
                depths=rows["row_depths"], paths=rows["row_paths"], starts=state.starts, page_tables=state.page_tables,
            ),
        )  # fmt: skip
        choices = self.forward.choices.reshape(S, nodes)
        self.accepted = run(
            self.after, "tree_accept", **tree, parents=self.tree["parents"], paths=self.tree["paths_out"], choices=choices,
            starts=state.starts,
        )  # fmt: skip
        path = {name: self.accepted[name] for name in ("accepted", "accepted_counts")}
        run(self.after, "kv_compact", cache=cache, page_tables=state.page_tables, starts=state.starts, **path)
        committed = {name: self.accepted[name] for name in ("committed", "accepted_counts", "next_roots")}
        run(
            self.after, "tree_commit", **committed, stop_tokens=state.stop_tokens, max_new_tokens=state.max_new_tokens,
            position_limit=state.position_limit, wanted_budgets=state.wanted_budgets, root_tokens=state.root_tokens,
            starts=state.starts, active=state.active, budgets=state.budgets, new_tokens=state.new_tokens, new_counts=state.new_counts,
            history=state.history, rounds=state.rounds, acceptance=state.acceptance, running=state.running,
        )  # fmt: skip
        self.nodes = nodes

    def launch(self, stream: Any = None) -> None:
        """Launch everything on `stream`."""
        for _, call in self.before:
            call.launch(stream)
        self.forward.launch(stream)
        for _, call in self.after:
            call.launch(stream)
