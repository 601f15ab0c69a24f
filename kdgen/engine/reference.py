"""The forward pass by its definition, in float64: what an engine's results are compared with.

One sequence, n new tokens at positions P … P + n − 1 behind P cached ones. Weights are the stored ones, widened exactly; INT4 weights are
(nibble − 8) · scale, exact in float32. For every layer, with x the residual stream and norm(v) = v / sqrt(mean v² + eps) · weight:

    h           = norm(x)
    q           = q_b · norm(q_a · h), per head [nope | rope];       kv = kv_a · h = [latent | rotary key]
    cached      norm(latent) and the turned rotary key, one for all heads
    key, value  = kv_b · cached latent, per head [nope | v]; every head's key ends with the rotary key
    x          += o · Σ softmax(scale · q · key) · value             over the positions up to the row's own
    h           = norm(x)
    x          += down · (silu(gate · h) · (up · h))                 in the leading dense layers
    x          += Σ weight_e · expert_e(h) + shared(h)               in all others, experts and weights as `moe_route` defines them

and logits = head · norm(x). Interleaved rotary values are brought into halves first (evens, then odds); angles are the float32 products of
`kdgen.rope`, and their cosines and sines are float32. In the stages q_b and kv_a rotary values stand as in the checkpoint, in rope_query
and rope_key in halves.

Rounding. With `rounding="none"` nothing is rounded. Otherwise values are rounded where an engine stores them, to nearest, ties to even
(through float32), so that the difference to an engine is that of its sums alone. "bf16" means an engine with bf16 activations, "f32" one
with float32 activations; A is that type below. Attention is then computed as engines do, in the latent space.

    to A            input_norm, q_a, kv_a, q_norm, q_b, rope_query, latent, rope_key, query_latent, attention_latent, attention, o,
                    post_norm, dense_gate_up, dense, gate_up, shared_gate_up, shared, moe, final_norm
    twice to A      every norm, when A is bf16: the normalised value before its weight is applied, and the product
    to float32      embed, residual, router_logits, router_weights, experts, output, logits
    never           scores and weights of the attention, products and sums before the places above

Stages, in the order in which `on_stage(layer, stage, array)` sees them, with their shapes (layer is None for the first and the last two):

    embed [n, hidden]
    input_norm [n, hidden]  q_a [n, q_lora]  kv_a [n, latent + rope]  q_norm [n, q_lora]  q_b [n, heads, nope + rope]
    rope_query [n, heads, rope]  latent [n, latent]  rope_key [n, rope]
    query_latent [n, heads, latent], attention_latent [n, heads, latent]: only when attention is computed in the latent space
    attention [n, heads, v]  o [n, hidden]  residual [n, hidden]  post_norm [n, hidden]
    dense layers: dense_gate_up [n, dense_intermediate]  dense [n, hidden]
    others: router_logits [n, E]  router_ids [n, k] i32  router_weights [n, k]  gate_up [n, k, moe_intermediate]  experts [n, k, hidden]
            shared_gate_up [n, shared · moe_intermediate]  shared [n, hidden]  moe [n, hidden]: experts and shared together
    output [n, hidden]: the residual stream behind the layer
    final_norm [n, hidden]  logits [n, vocab]
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.engine.checkpoint import Checkpoint
from kdgen.engine.inventory import expert_name
from kdgen.kernels.moe_route import logits_of, order
from kdgen.rope import rope_table, softmax_scale
from kdgen.weights.int4 import Int4Weight

Floats = npt.NDArray[np.float64]
Rounding = Literal["none", "bf16", "f32"]
StageHook = Callable[[int | None, str, npt.NDArray[Any]], None]

#: What `on_stage` sees, in order.
STAGES = (
    "embed", "input_norm", "q_a", "kv_a", "q_norm", "q_b", "rope_query", "latent", "rope_key", "query_latent", "attention_latent",
    "attention", "o", "residual", "post_norm", "dense_gate_up", "dense", "router_logits", "router_ids", "router_weights", "gate_up",
    "experts", "shared_gate_up", "shared", "moe", "output", "final_norm", "logits",
)  # fmt: skip
_FLOAT32_STAGES = frozenset({"embed", "residual", "router_logits", "router_weights", "experts", "output", "logits"})

#: Added to the sum of the chosen experts' scores before they are divided by it.
ROUTER_EPSILON = 1e-20

#: Rows of the head that are multiplied at a time: its widened form may be larger than memory.
_HEAD_ROWS = 8192


@dataclass
class SequenceCache:
    """What a sequence's tokens leave behind for later ones, layer by layer.

    Attributes:
        latent: normed latents [length, kv_lora_rank] per layer.
        rope_key: turned rotary keys [length, qk_rope_head_dim] per layer, in halves.
    """

    latent: list[Floats]
    rope_key: list[Floats]

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.latent[0])

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; ValueError when there are fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens cannot be cut to {length}")
        self.latent = [values[:length] for values in self.latent]
        self.rope_key = [values[:length] for values in self.rope_key]

    def fork(self) -> SequenceCache:
        """A cache that goes on from here on its own."""
        return SequenceCache(list(self.latent), list(self.rope_key))


@dataclass
class _WideWeights:
    """Weights in float64, the least recently used dropped beyond a number of bytes."""

    limit: int
    _kept: OrderedDict[str, Floats] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def get(self, name: str, load: Callable[[], npt.NDArray[Any]]) -> Floats:
        """The weight of that name, loaded when it is not kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        wide = load().astype(np.float64)
        self._kept[name] = wide
        self._bytes += wide.nbytes
        while self._bytes > self.limit and self._kept:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return wide


class Reference:
    """A model's forward pass, for one sequence at a time.

    Args:
        checkpoint: the weights; kept open by the caller.
        rounding: where values are rounded: see the module's docstring.
        int4: type to which a quantized weight is rounded: "f32" is exact, "bf16" is what decompressing a checkpoint gives.
        latent_attention: compute attention in the latent space; by default when there is rounding. Without rounding, results are equal.
        on_stage: called after each stage with (layer or None, name, values); the values must not be changed.
        cache_bytes: of weights kept in float64.

    Raises:
        ValueError: an unknown rounding or type.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rounding: Rounding = "none",
        int4: Literal["f32", "bf16"] = "f32",
        latent_attention: bool | None = None,
        on_stage: StageHook | None = None,
        cache_bytes: int = 2 << 30,
    ):
        if rounding not in ("none", "bf16", "f32"):
            raise ValueError(f"rounding is {rounding!r}; allowed: none, bf16, f32")
        if int4 not in ("f32", "bf16"):
            raise ValueError(f"int4 is {int4!r}; allowed: f32, bf16")
        self.checkpoint, self.config, self.rounding, self.int4 = checkpoint, checkpoint.config, rounding, int4
        self.on_stage = on_stage
        self.latent_attention = rounding != "none" if latent_attention is None else latent_attention
        self._wide = _WideWeights(cache_bytes)
        self._angles = self._table(256)

    def new_cache(self) -> SequenceCache:
        """The cache of a sequence without tokens."""
        m = self.config.model
        return SequenceCache([np.zeros((0, m.kv_lora_rank))] * m.layers, [np.zeros((0, m.qk_rope_head_dim))] * m.layers)

    def forward(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]], cache: SequenceCache) -> Floats:
        """Logits [n, vocab] of n tokens behind those of the cache, which they join.

        Raises:
            ValueError: no tokens, a token outside the vocabulary, or more tokens than the model has positions. The cache is as before.
        """
        ids = np.asarray(tokens)
        self._check(ids, cache)
        # The cache gets its new rows when all layers are done: an error in between leaves it whole.
        grown = cache.fork()
        # Row by row: the table may be larger than memory.
        rows = [self.checkpoint.rows("model.embed_tokens.weight", int(token), int(token) + 1) for token in ids]
        x = self._stage(None, "embed", np.concatenate(rows).astype(np.float64))
        for layer in range(self.config.model.layers):
            x = self._layer(layer, x, grown)
        h = self._norm(None, "final_norm", x, "model.norm.weight", self.config.model.rms_norm_eps)
        cache.latent, cache.rope_key = grown.latent, grown.rope_key
        return self._head(h)

    def generate(
        self, prompt: Sequence[int], max_tokens: int, *, stop: bool = True, cache: SequenceCache | None = None
    ) -> tuple[list[int], Floats]:
        """Continue a prompt by the most likely token, the lowest id among equals.

        Args:
            prompt: at least one token.
            max_tokens: most tokens to add, at least 1.
            stop: end behind a stop token of the configuration; it is part of the result.
            cache: of the tokens before the prompt. Afterwards it holds all tokens but the last one added.

        Returns:
            (tokens added, the logits [tokens added, vocab] that decided them).

        Raises:
            ValueError: as in `forward`, or `max_tokens` below 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; allowed: 1 or more")
        cache = self.new_cache() if cache is None else cache
        added: list[int] = []
        rows: list[Floats] = []
        following: Sequence[int] = prompt
        while len(added) < max_tokens:
            rows.append(self.forward(following, cache)[-1])
            added.append(int(np.argmax(rows[-1])))
            following = added[-1:]
            if stop and added[-1] in self.config.stop_token_ids:
                break
        return added, np.stack(rows)

    def _check(self, ids: npt.NDArray[Any], cache: SequenceCache) -> None:
        m = self.config.model
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens are {ids.dtype} {list(ids.shape)}; they must be a list of at least one integer")
        if ids.min() < 0 or ids.max() >= m.vocab:
            raise ValueError(f"token {ids.min() if ids.min() < 0 else ids.max()} is outside the vocabulary of {m.vocab}")
        if cache.length + len(ids) > m.max_position:
            raise ValueError(f"{cache.length + len(ids)} tokens; the model has {m.max_position} positions")

    def _layer(self, layer: int, x: Floats, cache: SequenceCache) -> Floats:
        name, m = f"model.layers.{layer}", self.config.model
        h = self._norm(layer, "input_norm", x, f"{name}.input_layernorm.weight", m.rms_norm_eps)
        o = self._attention(layer, h, cache)
        x = self._stage(layer, "residual", x + o)
        h = self._norm(layer, "post_norm", x, f"{name}.post_attention_layernorm.weight", m.rms_norm_eps)
        if layer < m.dense_layers:
            mixed = self._stage(layer, "dense", self._mlp(layer, "dense_gate_up", h, f"{name}.mlp"))
        else:
            mixed = self._experts(layer, h)
        return self._stage(layer, "output", x + mixed)

    def _attention(self, layer: int, h: Floats, cache: SequenceCache) -> Floats:
        m, n, eps = self.config.model, len(h), self.config.latent_norm_eps
        name = f"model.layers.{layer}.self_attn"
        q_a = self._stage(layer, "q_a", h @ self._weight(f"{name}.q_a_proj.weight").T)
        kv_a = self._stage(layer, "kv_a", h @ self._weight(f"{name}.kv_a_proj_with_mqa.weight").T)
        q_a = self._norm(layer, "q_norm", q_a, f"{name}.q_a_layernorm.weight", eps)
        q = self._stage(layer, "q_b", (q_a @ self._weight(f"{name}.q_b_proj.weight").T).reshape(n, m.heads, -1))
        past = len(cache.latent[layer])
        q_nope, q_rope = q[..., : m.qk_nope_head_dim], q[..., m.qk_nope_head_dim :]
        q_rope = self._stage(layer, "rope_query", self._turn(q_rope, past))
        latent = self._norm(layer, "latent", kv_a[:, : m.kv_lora_rank], f"{name}.kv_a_layernorm.weight", eps)
        rope_key = self._stage(layer, "rope_key", self._turn(kv_a[:, None, m.kv_lora_rank :], past)[:, 0])
        cache.latent[layer] = latents = np.concatenate([cache.latent[layer], latent])
        cache.rope_key[layer] = rope_keys = np.concatenate([cache.rope_key[layer], rope_key])
        kv_b = self._weight(f"{name}.kv_b_proj.weight").reshape(m.heads, m.qk_nope_head_dim + m.v_head_dim, m.kv_lora_rank)
        to_key, to_value = kv_b[:, : m.qk_nope_head_dim], kv_b[:, m.qk_nope_head_dim :]
        by_position = np.einsum("nhr,pr->hnp", q_rope, rope_keys)
        if self.latent_attention:
            query = self._stage(layer, "query_latent", np.einsum("nhd,hdc->nhc", q_nope, to_key))
            weights = self._softmax(np.einsum("nhc,pc->hnp", query, latents) + by_position, past)
            mean = self._stage(layer, "attention_latent", np.einsum("hnp,pc->nhc", weights, latents))
            attention = np.einsum("nhc,hvc->nhv", mean, to_value)
        else:
            keys, values = np.einsum("pc,hdc->hpd", latents, to_key), np.einsum("pc,hvc->hpv", latents, to_value)
            weights = self._softmax(np.einsum("nhd,hpd->hnp", q_nope, keys) + by_position, past)
            attention = np.einsum("hnp,hpv->nhv", weights, values)
        attention = self._stage(layer, "attention", attention)
        return self._stage(layer, "o", attention.reshape(n, -1) @ self._weight(f"{name}.o_proj.weight").T)

    def _softmax(self, products: Floats, past: int) -> Floats:
        """Weights [heads, n, past + n] of the products of queries and keys; a row sees the positions up to its own."""
        scores = products * softmax_scale(self.config.model.rope, self.config.q_head_dim)
        n, keys = scores.shape[1:]
        scores = np.where(np.arange(keys) <= past + np.arange(n)[:, None], scores, -np.inf)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights: Floats = powers / powers.sum(axis=-1, keepdims=True)
        return weights

    def _turn(self, values: Floats, first: int) -> Floats:
        """Values [n, heads, rope] at positions `first` …, turned, in halves."""
        n, half = len(values), values.shape[-1] // 2
        if first + n > len(self._angles[0]):
            self._angles = self._table(2 * (first + n))
        cos, sin = (table[first : first + n, None] for table in self._angles)
        pairs = (values[..., 0::2], values[..., 1::2]) if self.config.rope_interleave else (values[..., :half], values[..., half:])
        return np.concatenate([pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin], axis=-1)

    def _table(self, positions: int) -> tuple[Floats, Floats]:
        cos, sin = rope_table(self.config.model.rope, self.config.model.qk_rope_head_dim, positions)
        return cos.astype(np.float64), sin.astype(np.float64)

    def _experts(self, layer: int, h: Floats) -> Floats:
        m, n = self.config.model, len(h)
        ids, weights = self._route(layer, h)
        middle = np.empty((n, m.experts_per_token, m.moe_intermediate))
        results = np.empty((n, m.experts_per_token, m.hidden))
        where = {int(expert): np.nonzero(ids == expert) for expert in np.unique(ids)}
        for expert, (rows, slots) in where.items():
            gate, up = (h[rows] @ self._expert(layer, expert, matrix).T for matrix in ("gate_proj", "up_proj"))
            middle[rows, slots] = _silu(gate) * up
        middle = self._stage(layer, "gate_up", middle)
        for expert, (rows, slots) in where.items():
            results[rows, slots] = middle[rows, slots] @ self._expert(layer, expert, "down_proj").T
        results = self._stage(layer, "experts", results)
        mixed = np.zeros((n, m.hidden))
        for slot in range(m.experts_per_token):
            mixed += weights[:, slot, None] * results[:, slot]
        if m.shared_experts:
            name = f"model.layers.{layer}.mlp.shared_experts"
            mixed += self._stage(layer, "shared", self._mlp(layer, "shared_gate_up", h, name))
        return self._stage(layer, "moe", mixed)

    def _route(self, layer: int, h: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
        """Chosen experts [n, k], best first, and their weights."""
        config, m = self.config, self.config.model
        name = f"model.layers.{layer}.mlp.gate"
        logits = self._stage(layer, "router_logits", logits_of({"x": h, "w_gate": self.checkpoint.tensor(f"{name}.weight")}))
        if config.scoring == "sigmoid":
            with np.errstate(over="ignore"):  # to infinity, whose score is the right zero
                scores = 1 / (1 + np.exp(-logits))
        else:
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores = powers / powers.sum(axis=1, keepdims=True)
        choices = scores + self.checkpoint.tensor(f"{name}.e_score_correction_bias").astype(np.float64)
        ids = np.stack([self._chosen(choice) for choice in choices]).astype(np.int32)
        weights = np.take_along_axis(scores, ids.astype(np.intp), axis=1)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(axis=1, keepdims=True) + ROUTER_EPSILON)
        if self.on_stage is not None:
            self.on_stage(layer, "router_ids", ids)
        return ids, self._stage(layer, "router_weights", weights * m.routed_scaling)

    def _chosen(self, choice: Floats) -> npt.NDArray[np.intp]:
        """The experts that one row chooses, best first."""
        config, every = self.config, np.ones(len(choice), np.bool_)
        allowed = every.reshape(config.n_group, -1).copy()
        if config.n_group > 1:
            groups = choice.reshape(config.n_group, -1)
            worths = np.array([group[order(group, every[: len(group)])[:2]].sum() for group in groups])
            allowed[order(worths, every[: len(groups)])[config.topk_group :]] = False
        return order(choice, allowed.reshape(-1))[: config.model.experts_per_token]

    def _mlp(self, layer: int, stage: str, h: Floats, name: str) -> Floats:
        gate, up = (h @ self._weight(f"{name}.{matrix}.weight").T for matrix in ("gate_proj", "up_proj"))
        return self._stage(layer, stage, _silu(gate) * up) @ self._weight(f"{name}.down_proj.weight").T

    def _head(self, h: Floats) -> Floats:
        vocab, name = self.config.model.vocab, "lm_head.weight"
        parts = []
        for start in range(0, vocab, _HEAD_ROWS):
            stop = min(start + _HEAD_ROWS, vocab)
            part = self._wide.get(f"{name}:{start}", functools.partial(self.checkpoint.rows, name, start, stop))
            parts.append(h @ part.T)
        return self._stage(None, "logits", np.concatenate(parts, axis=1))

    def _norm(self, layer: int | None, stage: str, x: Floats, name: str, eps: float) -> Floats:
        normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
        if self.rounding == "bf16":
            normed = round_to(normed, "bf16")
        return self._stage(layer, stage, normed * self._weight(name))

    def _weight(self, name: str) -> Floats:
        return self._wide.get(name, lambda: self.checkpoint.tensor(name))

    def _expert(self, layer: int, expert: int, matrix: str) -> Floats:
        def load() -> npt.NDArray[Any]:
            weight = self.checkpoint.expert(layer, expert, matrix)
            return weight.dequantize(self.int4) if isinstance(weight, Int4Weight) else weight

        return self._wide.get(expert_name(layer, expert, matrix), load)

    def _stage(self, layer: int | None, stage: str, values: Floats) -> Floats:
        """The values, rounded as an engine stores them, and shown to the hook."""
        if self.rounding != "none":
            values = round_to(values, "f32" if stage in _FLOAT32_STAGES else self.rounding)
        if self.on_stage is not None:
            self.on_stage(layer, stage, values)
        return values


def round_to(values: Floats, dtype: Literal["f32", "bf16"]) -> Floats:
    """Values rounded to float32, and from there to bf16 if asked for, as sums in float32 are; still float64."""
    narrow = values.astype(np.float32)
    return (narrow if dtype == "f32" else narrow.astype(numpy_dtype("bf16"))).astype(np.float64)


def _silu(values: Floats) -> Floats:
    # exp overflows to infinity for very negative values, and the quotient is then the right zero.
    with np.errstate(over="ignore"):
        return np.asarray(values / (1 + np.exp(-values)))
