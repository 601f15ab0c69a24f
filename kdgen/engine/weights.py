"""From a checkpoint's tensors to what the kernels read: one rank's slices, in the kernels' types and layouts, on a device.

Slices are exact: rows or columns of whole heads, experts' widths and the vocabulary. Rotary rows that stand in pairs are put into
halves, the key/value up-projection is cut into its two parts, and integers are brought into the layout of their kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import dtype_name, numpy_dtype
from kdgen.engine.checkpoint import Checkpoint
from kdgen.engine.config import ModelConfig
from kdgen.errors import ArtifactError
from kdgen.rope import rope_table
from kdgen.runtime.array import Array
from kdgen.runtime.device import Device
from kdgen.spec.model import Types
from kdgen.weights import prepack
from kdgen.weights.int4 import Int4Weight

Values = npt.NDArray[Any]


@dataclass
class ModelWeights:
    """Everything a rank's forward reads.

    Attributes:
        embed: `[vocab / ranks, hidden]`, the rank's slice; `first_token` is the id of its first row.
        head: `[vocab / ranks, hidden]`.
        norm: of the last layer's output, `[hidden]`.
        cosines, sines: `[positions, rope / 2]` f32.
        layers: name of a weight to its array, per layer; names as in `layer_arrays`.
        first_token: id of the first row of `embed` and of `head`.
    """

    embed: Array
    head: Array
    norm: Array
    cosines: Array
    sines: Array
    layers: list[dict[str, Array]] = field(default_factory=list)
    first_token: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        own = (self.embed, self.head, self.norm, self.cosines, self.sines)
        return sum(array.nbytes for array in (*own, *(array for layer in self.layers for array in layer.values())))


def load_weights(checkpoint: Checkpoint, types: Types, device: Device, positions: int, rank: int = 0, ranks: int = 1) -> ModelWeights:
    """Read, slice and place a rank's weights, layer by layer.

    Args:
        checkpoint: an open one.
        types: of the engine spec; a checkpoint may be widened to them, never rounded.
        device: where the weights go.
        positions: rows of the rotary tables.
        rank, ranks: which slice.

    Raises:
        ArtifactError: the checkpoint's types would have to be rounded, or its experts are of another kind than the spec's.
    """
    slicer = Slicer(checkpoint, types, rank, ranks)
    cosines, sines = rope_table(checkpoint.config.model.rope, checkpoint.config.model.qk_rope_head_dim, positions)
    embed = device.array(slicer.vocabulary("model.embed_tokens.weight"))
    weights = ModelWeights(
        embed=embed,
        head=embed if checkpoint.config.tie_word_embeddings else device.array(slicer.vocabulary("lm_head.weight")),
        norm=device.array(slicer.whole("model.norm.weight")),
        cosines=device.array(cosines),
        sines=device.array(sines),
        first_token=rank * (checkpoint.config.model.vocab // ranks),
    )
    for layer in range(checkpoint.config.model.layers):
        weights.layers.append({name: device.array(values) for name, values in slicer.layer_arrays(layer)})
    return weights


class Slicer:
    """A rank's part of a checkpoint, as numpy arrays.

    Attributes:
        config: of the checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, types: Types, rank: int = 0, ranks: int = 1):
        self.checkpoint, self.types, self.rank, self.ranks = checkpoint, types, rank, ranks
        self.config: ModelConfig = checkpoint.config
        model = self.config.model
        for name in ("heads", "moe_intermediate", "dense_intermediate", "vocab"):
            if getattr(model, name) % ranks:
                raise ArtifactError(f"{name} = {getattr(model, name)} cannot be sliced over {ranks} ranks")
        if model.quantization and model.moe_intermediate // ranks % model.quantization.group:
            raise ArtifactError(f"moe_intermediate = {model.moe_intermediate} over {ranks} ranks cuts groups of {model.quantization.group}")
        if (self.types.experts == "int4") != (model.quantization is not None):
            stored = "INT4" if model.quantization else self.config.dtype
            raise ArtifactError(f"{checkpoint!r}: its experts are {stored}, the engine spec's types.experts is {self.types.experts}")

    def layer_arrays(self, layer: int) -> Iterator[tuple[str, Values]]:
        """Name and values of every weight of a layer."""
        model, place = self.config.model, f"model.layers.{layer}."
        attention = place + "self_attn."
        yield "input_norm", self.whole(place + "input_layernorm.weight")
        yield "post_norm", self.whole(place + "post_attention_layernorm.weight")
        yield "q_norm", self.whole(attention + "q_a_layernorm.weight")
        yield "kv_norm", self.whole(attention + "kv_a_layernorm.weight")
        keys = self.whole(attention + "kv_a_proj_with_mqa.weight")
        keys = np.concatenate([keys[: model.kv_lora_rank], self._halves(keys[model.kv_lora_rank :])])
        yield "qkv_a", np.concatenate([self.whole(attention + "q_a_proj.weight"), keys])
        queries = self._heads(attention + "q_b_proj.weight")
        nope = model.qk_nope_head_dim
        turned = np.stack([self._halves(head[nope:]) for head in queries])
        yield "q_b", np.concatenate([queries[:, :nope], turned], axis=1).reshape(-1, model.q_lora_rank)
        keys_values = self._heads(attention + "kv_b_proj.weight")
        yield "absorb", np.ascontiguousarray(keys_values[:, :nope].transpose(0, 2, 1))
        yield "value_up", np.ascontiguousarray(keys_values[:, nope:])
        yield "o", self._columns(attention + "o_proj.weight")
        if layer < model.dense_layers:
            yield from self._mlp("dense", place + "mlp.")
            return
        yield "gate", self.whole(place + "mlp.gate.weight")
        bias = place + "mlp.gate.e_score_correction_bias"
        yield "gate_bias", self.checkpoint.tensor(bias).astype(np.float32)
        if model.shared_experts:
            yield from self._mlp("shared", place + "mlp.shared_experts.")
        yield "experts_gate_up", self._experts(layer, ("gate_proj", "up_proj"))
        yield "experts_down", self._experts(layer, ("down_proj",))

    def whole(self, name: str) -> Values:
        """A tensor that every rank has."""
        return self._typed(self.checkpoint.tensor(name), name)

    def vocabulary(self, name: str) -> Values:
        """The rank's rows of a tensor over the vocabulary."""
        return self._rows(name, self.config.model.vocab)

    def _rows(self, name: str, count: int) -> Values:
        each = count // self.ranks
        return self._typed(self.checkpoint.rows(name, self.rank * each, (self.rank + 1) * each), name)

    def _columns(self, name: str) -> Values:
        whole = self.checkpoint.tensor(name)
        each = whole.shape[1] // self.ranks
        return self._typed(whole[:, self.rank * each : (self.rank + 1) * each], name)

    def _heads(self, name: str) -> Values:
        """The rank's heads of a tensor whose rows are heads one after another: `[heads, rows of a head, columns]`."""
        rows = self.checkpoint.type_of(name).shape[0]
        found = self._rows(name, rows)
        return found.reshape(self.config.model.heads // self.ranks, -1, found.shape[1])

    def _halves(self, rows: Values) -> Values:
        """Rotary rows as the first halves of all pairs, then the second ones."""
        return np.concatenate([rows[0::2], rows[1::2]]) if self.config.rope_interleave else rows

    def _mlp(self, kind: str, place: str) -> Iterator[tuple[str, Values]]:
        gate, up = (
            self._rows(f"{place}{name}.weight", self.checkpoint.type_of(f"{place}{name}.weight").shape[0])
            for name in ("gate_proj", "up_proj")
        )
        yield f"{kind}_gate_up", np.concatenate([gate, up])
        yield f"{kind}_down", self._columns(f"{place}down_proj.weight")

    def _experts(self, layer: int, matrices: tuple[str, ...]) -> Values:
        """One kernel's matrices of all experts: gate and up, or down."""
        result: Values | None = None
        for expert in range(self.config.model.experts):
            parts = [self._expert_slice(layer, expert, name) for name in matrices]
            if self.types.experts == "int4":
                packed = prepack.prepack(*parts) if len(parts) == 1 else prepack.prepack_gate_up(*parts)
            else:
                packed = np.concatenate(parts)
            if result is None:
                result = np.empty((self.config.model.experts, *packed.shape), packed.dtype)
            result[expert] = packed
        assert result is not None
        return result

    def _expert_slice(self, layer: int, expert: int, matrix: str) -> Any:
        whole = self.checkpoint.expert(layer, expert, matrix)
        each = self.config.model.moe_intermediate // self.ranks
        part = slice(self.rank * each, (self.rank + 1) * each)
        if isinstance(whole, Int4Weight):
            if self.ranks == 1:
                return whole
            if matrix != "down_proj":
                return Int4Weight(whole.packed[part], whole.scale[part], whole.group)
            words, scales = slice(part.start // 8, part.stop // 8), slice(part.start // whole.group, part.stop // whole.group)
            return Int4Weight(whole.packed[:, words], whole.scale[:, scales], whole.group)
        values = whole[part] if matrix != "down_proj" else whole[:, part]
        return _widened(values, self.types.experts, f"experts of layer {layer}")

    def _typed(self, values: Values, name: str) -> Values:
        return _widened(values, self.types.weights, name)


def _widened(values: Values, dtype: str, name: str) -> Values:
    stored = dtype_name(values.dtype)
    if stored != dtype and (stored, dtype) not in (("bf16", "f32"), ("f16", "f32")):
        raise ArtifactError(f"{name}: it is {stored}; as {dtype}, which the engine spec asks for, its values would be rounded")
    return np.ascontiguousarray(values.astype(numpy_dtype(dtype), copy=False))
