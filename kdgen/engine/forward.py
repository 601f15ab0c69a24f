"""The forward of a launch of T rows, from token ids to logits and the target's choices: every line of `Forward` is one kernel.

A row is a node of a draft tree, a decode token (a tree of one node), or a token of a prompt's chunk; the kernels make no difference.
What the rows are lies on the device (`Rows`), and so do all lengths, so that the same calls serve every round and can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kdgen.dtypes import numpy_dtype
from kdgen.engine.weights import ModelWeights
from kdgen.runtime import Kernel
from kdgen.runtime.array import Array
from kdgen.runtime.call import BoundCall
from kdgen.spec.model import EngineSpec

#: Every kernel that takes all rows of a launch; a model without experts or dense layers has fewer.
FORWARD_KERNELS = (
    "embed", "stream_norm", "norm", "qkv_a", "q_norm", "q_b", "absorb", "mla_prepare", "attention_plan", "tree_attention", "value_up", "o",
    "moe_route", "moe_plan", "shared_gate_up", "shared_down", "moe_gate_up", "moe_down", "moe_combine", "dense_gate_up", "dense_down",
    "head", "argmax",
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """What the rows of a launch are; arrays on the device.

    Attributes:
        ids: token of each row, i32 `[T]`.
        positions: of each row in its sequence, i32 `[T]`.
        slots: where each row's key is kept, i32 `[T]`; −1 for padding.
        sequences: of each row, i32 `[T]`; −1 for padding.
        depths: in its tree, i32 `[T]`.
        paths: node at each depth of its tree, u8 `[T, path bytes]`; 255 first: the row's keys lie one after another.
        starts: position of the tree's root, or of the chunk's first token, of each sequence, i32 `[S]`.
        page_tables: pages of each sequence, in order, i32 `[S, max_pages]`.
    """

    ids: Array
    positions: Array
    slots: Array
    sequences: Array
    depths: Array
    paths: Array
    starts: Array
    page_tables: Array

    @property
    def count(self) -> int:
        """T."""
        return len(self.ids)


class Stage(NamedTuple):
    """One kernel of a forward.

    Attributes:
        layer: None before the first and behind the last.
        name: of the stage; the kernel's in most cases.
        call: to launch.
        results: what it writes.
    """

    layer: int | None
    name: str
    call: BoundCall
    results: dict[str, Array]


class Forward:
    """All launches of a forward over T rows, bound to their arrays.

    Args:
        kit: kernels of an engine spec by name.
        spec: the engine part of that spec.
        weights: of the model, on the kit's device.
        cache: latents and rotary keys, `[layers, pages, page_size, width]`.
        rows: what the rows are.
        last_only: logits of the last row alone, as for a prompt's chunk.

    Attributes:
        stages: in order.
        logits: f32 `[T or 1, vocab / ranks]`.
        choices: most probable token of each of these rows, i32.
        stream: f32 `[T, hidden]`, the residual stream.
        plan, queries, entries, results: of attention and experts; every layer uses them anew.
    """

    def __init__(
        self, kit: Mapping[str, Kernel], spec: EngineSpec, weights: ModelWeights, cache: Array, rows: Rows, *, last_only: bool = False
    ):
        self.kit, self.rows, self.cache, self.weights = kit, rows, cache, weights
        self.stages: list[Stage] = []
        self._layer: int | None = None
        self._made: dict[str, dict[str, Any]] = {}  # by kernel: arrays that all layers share
        device, model, T = cache.device, spec.model, rows.count
        heads = model.heads // spec.ranks

        def empty(*shape: int, dtype: str = spec.types.activations) -> Array:
            return device.empty((T, *shape), numpy_dtype(dtype))

        self.stream = self._run("embed", ids=rows.ids, table=weights.embed, first=weights.first_token)["out"]
        self.plan = self._run(
            "attention_plan", starts=rows.starts, row_sequences=rows.sequences, row_depths=rows.depths, row_paths=rows.paths
        )
        self.queries = empty(heads, model.kv_lora_rank + model.qk_rope_head_dim)
        self.entries = empty(model.experts_per_token, model.moe_intermediate // spec.ranks)
        self.results = empty(model.experts_per_token, model.hidden, dtype="f32")
        added: Array | None = None  # what the layer before adds to the stream
        for number, layer in enumerate(weights.layers):
            self._layer = number
            x = self._normed(added, layer["input_norm"], "input_norm")
            self._attention(layer, x, number, heads)
            x = self._normed(None, layer["post_norm"], "post_norm")
            added = self._dense(layer, x) if number < model.dense_layers else self._experts(layer, x)
        self._layer = None
        x = self._normed(added, weights.norm, "final_norm")
        if last_only:
            x = x.part((T - 1) * model.hidden, (1, model.hidden))
        self.logits = self._run("head", x=x, w=weights.head)["out"]
        best = self._run("argmax", logits=self.logits, first=weights.first_token)
        self.choices = best["ids"]

    def _attention(self, layer: Mapping[str, Array], x: Array, number: int, heads: int) -> None:
        """Latent attention with absorbed projections, added to the stream."""
        rows, weights, cache = self.rows, self.weights, self.cache[number]
        low = self._run("qkv_a", x=x, w=layer["qkv_a"])["out"]
        q = self._run("q_norm", x=low, weight=layer["q_norm"])["out"]
        q = self._run("q_b", x=q, w=layer["q_b"])["out"]
        q = q.reshape(rows.count, heads, q.shape[1] // heads)
        self._run("absorb", x=q, w=layer["absorb"], out=self.queries)
        self._run(
            "mla_prepare", kv=low, kv_norm=layer["kv_norm"], queries=q, cosines=weights.cosines, sines=weights.sines,
            positions=rows.positions, slots=rows.slots, row_sequences=rows.sequences, page_tables=rows.page_tables, cache=cache,
            q=self.queries,
        )  # fmt: skip
        seen = self._run("tree_attention", q=self.queries, cache=cache, page_tables=rows.page_tables, **self.plan)["out"]
        values = self._run("value_up", x=seen, w=layer["value_up"])["out"]
        self._run("o", x=values.reshape(rows.count, values.size // rows.count), w=layer["o"], out=self.stream)

    def _dense(self, layer: Mapping[str, Array], x: Array) -> Array:
        """The MLP of a leading layer."""
        middle = self._run("dense_gate_up", x=x, w=layer["dense_gate_up"])["out"]
        return self._run("dense_down", x=middle, w=layer["dense_down"])["out"]

    def _experts(self, layer: Mapping[str, Array], x: Array) -> Array:
        """A row's routed experts by weight, and the shared one.

        The shared expert stands between the plan and the routed experts, whose kernels may then read the plan early.
        """
        topk = self._run("moe_route", x=x, w_gate=layer["gate"], bias=layer["gate_bias"])
        plan = self._run("moe_plan", topk_ids=topk["topk_ids"])
        lists = {name: plan[name] for name in ("expert_offsets", "sorted_rows")}
        shared = {}
        if "shared_gate_up" in layer:
            middle = self._run("shared_gate_up", x=x, w=layer["shared_gate_up"])["out"]
            shared["shared"] = self._run("shared_down", x=middle, w=layer["shared_down"])["out"]
        self._run("moe_gate_up", x=x, w=layer["experts_gate_up"], **lists, out=self.entries)
        self._run("moe_down", x=self.entries, w=layer["experts_down"], **lists, out=self.results)
        return self._run("moe_combine", y=self.results, topk_ids=topk["topk_ids"], topk_weights=topk["topk_weights"], **shared)["out"]

    def _normed(self, added: Array | None, weight: Array, name: str) -> Array:
        """The norm of the stream, to which `added` is added first."""
        if added is None:
            return self._run("stream_norm", name, x=self.stream, weight=weight)["out"]
        return self._run("norm", name, x=added, residual=self.stream, weight=weight)["out"]

    def _run(self, kernel: str, name: str = "", /, **arrays: Any) -> dict[str, Array]:
        """Bind a kernel. What it writes beside the given arrays is the same for all layers, made at the first one.

        Returns:
            The arrays that it writes, without workspaces.
        """
        bound = self.kit[kernel]
        written = [a for a in bound.contract.arguments if a.role in ("out", "inout", "workspace")]
        if kernel not in self._made:
            complete = bound.complete(fresh=("units",), **arrays)
            self._made[kernel] = {a.name: complete[a.name] for a in written if a.name not in arrays}
        call = bound.bind(**arrays, **self._made[kernel])
        results: dict[str, Array] = {a.name: ({**self._made[kernel], **arrays})[a.name] for a in written if a.role != "workspace"}
        self.stages.append(Stage(self._layer, name or kernel, call, results))
        return results

    def launch(self, stream: Any = None) -> None:
        """Launch everything on `stream`."""
        for stage in self.stages:
            stage.call.launch(stream)
