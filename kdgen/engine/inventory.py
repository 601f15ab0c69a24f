"""The tensors that a configuration calls for, under Hugging Face's names without a wrapper's prefix, and what differs from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kdgen.engine.config import ModelConfig

MATRICES = ("gate_proj", "up_proj", "down_proj")

#: Of a multimodal wrapper, not read.
_VISION = ("vision_tower.", "mm_projector.")


class TensorType(NamedTuple):
    """What a header says about a tensor: its kdgen dtype name and its extents."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Expected(NamedTuple):
    """What a tensor must be: one of some dtypes, and one shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Name of an expert's matrix, without `.weight` or `.weight_packed`."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"


def fused_name(layer: int, matrix: str) -> str:
    """Name of the tensor that holds a layer's matrices of all experts, where they are stored so."""
    return f"model.layers.{layer}.mlp.experts.{'down_proj' if matrix == 'down_proj' else 'gate_up_proj'}"


def expected(config: ModelConfig) -> dict[str, Expected]:
    """Everything but the routed experts, in the order of the computation."""
    m, plain = config.model, (config.dtype,)
    wanted = {"model.embed_tokens.weight": Expected(plain, (m.vocab, m.hidden))}
    attention = {
        "q_a_proj": (m.q_lora_rank, m.hidden),
        "q_a_layernorm": (m.q_lora_rank,),
        "q_b_proj": (m.heads * config.q_head_dim, m.q_lora_rank),
        "kv_a_proj_with_mqa": (m.kv_lora_rank + m.qk_rope_head_dim, m.hidden),
        "kv_a_layernorm": (m.kv_lora_rank,),
        "kv_b_proj": (m.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
        "o_proj": (m.hidden, m.heads * m.v_head_dim),
    }
    for layer in range(m.layers):
        name = f"model.layers.{layer}"
        wanted[f"{name}.input_layernorm.weight"] = Expected(plain, (m.hidden,))
        for part, shape in attention.items():
            wanted[f"{name}.self_attn.{part}.weight"] = Expected(plain, shape)
        wanted[f"{name}.post_attention_layernorm.weight"] = Expected(plain, (m.hidden,))
        if layer < m.dense_layers:
            wanted |= _mlp(f"{name}.mlp", m.hidden, m.dense_intermediate, plain)
            continue
        # Publishers store the router in the model's type or in f32, whatever the rest is.
        router = tuple(dict.fromkeys((config.dtype, "f32")))
        wanted[f"{name}.mlp.gate.weight"] = Expected(router, (m.experts, m.hidden))
        wanted[f"{name}.mlp.gate.e_score_correction_bias"] = Expected(router, (m.experts,))
        if m.shared_experts:
            wanted |= _mlp(f"{name}.mlp.shared_experts", m.hidden, config.shared_intermediate, plain)
    wanted["model.norm.weight"] = Expected(plain, (m.hidden,))
    if not config.tie_word_embeddings:
        wanted["lm_head.weight"] = Expected(plain, (m.vocab, m.hidden))
    return wanted


def _mlp(name: str, hidden: int, width: int, dtypes: tuple[str, ...]) -> dict[str, Expected]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{name}.{matrix}.weight": Expected(dtypes, shape) for matrix, shape in shapes.items()}


def expected_experts(config: ModelConfig, layer: int) -> dict[str, Expected]:
    """The routed experts of one layer, each on its own; three tensors per matrix when they are quantized."""
    m, wanted = config.model, {}
    shapes = {"gate_proj": (m.moe_intermediate, m.hidden), "up_proj": (m.moe_intermediate, m.hidden)}
    shapes["down_proj"] = (m.hidden, m.moe_intermediate)
    for expert in range(m.experts):
        for matrix, (rows, columns) in shapes.items():
            name = expert_name(layer, expert, matrix)
            if m.quantization is None:
                wanted[f"{name}.weight"] = Expected((config.dtype,), (rows, columns))
                continue
            wanted[f"{name}.weight_packed"] = Expected(("i32",), (rows, columns * m.quantization.bits // 32))
            wanted[f"{name}.weight_scale"] = Expected(("bf16",), (rows, columns // m.quantization.group))
            wanted[f"{name}.weight_shape"] = Expected(("i32", "i64"), (2,))
    return wanted


def expected_fused(config: ModelConfig, layer: int) -> dict[str, Expected]:
    """The routed experts of one layer as two tensors: gate rows before up rows, then down."""
    m = config.model
    return {
        fused_name(layer, "gate_proj"): Expected((config.dtype,), (m.experts, 2 * m.moe_intermediate, m.hidden)),
        fused_name(layer, "down_proj"): Expected((config.dtype,), (m.experts, m.hidden, m.moe_intermediate)),
    }


def skipped(config: ModelConfig, name: str) -> bool:
    """Whether a tensor may be there without being used; `name` has no prefix."""
    m = config.model
    if (config.prefix and name.startswith(_VISION)) or name.startswith("golden."):  # of `kdgen.engine.bundle`
        return True
    if name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
        return True
    return any(name.startswith(f"model.layers.{m.layers + i}.") for i in range(config.predict_layers))


def wanted_tensors(config: ModelConfig, found: Mapping[str, TensorType]) -> dict[str, Expected]:
    """Everything that must be there; a layer's experts in the form in which `found` has them."""
    wanted = expected(config)
    for layer in range(config.model.dense_layers, config.model.layers):
        fused = expected_fused(config, layer)
        is_fused = config.model.quantization is None and any(name in found for name in fused)
        wanted |= fused if is_fused else expected_experts(config, layer)
    return wanted


def faults(config: ModelConfig, found: Mapping[str, TensorType]) -> Iterator[str]:
    """What is missing, unexpected, or of another dtype or shape; `found` is without prefix and without what is skipped."""
    wanted = wanted_tensors(config, found)
    for name, want in wanted.items():
        if (have := found.get(name)) is None:
            yield f"tensor '{name}' is missing; it must be {want}"
        elif have.dtype not in want.dtypes or have.shape != want.shape:
            yield f"tensor '{name}' is {have}; it must be {want}"
    for name, have in found.items():
        if name not in wanted:
            yield f"tensor '{name}' ({have}) is unexpected: the configuration has no such tensor"


def summary(where: str, messages: list[str], shown: int = 20) -> str:
    """One message of several faults of a file."""
    if len(messages) == 1:
        return f"{where}: {messages[0]}"
    rest = [f"and {len(messages) - shown} more"] if len(messages) > shown else []
    return "\n  ".join([f"{where}: {len(messages)} faults:", *messages[:shown], *rest])
