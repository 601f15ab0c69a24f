"""Small models for the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.engine.config import ModelConfig, unscaled_rope
from kdgen.spec.model import Model, Quantization, Rope

YARN = Rope(theta=10000.0, factor=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
PLAIN = unscaled_rope(50000.0, 256)

_MODEL: dict[str, Any] = {
    "hidden": 128, "layers": 3, "heads": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "experts": 16, "experts_per_token": 2, "moe_intermediate": 64, "shared_experts": 1, "dense_intermediate": 96,
    "dense_layers": 1, "vocab": 96, "max_position": 256, "rms_norm_eps": 1e-5, "routed_scaling": 2.0, "rope": YARN,
}  # fmt: skip
_CONFIG: dict[str, Any] = {"dtype": "f32", "stop_token_ids": (3,), "bos_token_id": 1}
INT4 = Quantization(bits=4, group=32)


def config(**changes: Any) -> ModelConfig:
    """A model of three layers; `changes` by the names of `Model` and `ModelConfig`."""
    model = Model(**{**_MODEL, **{name: value for name, value in changes.items() if name in Model.model_fields}})
    rest = {name: value for name, value in changes.items() if name not in Model.model_fields}
    return ModelConfig(model=model, **{**_CONFIG, **rest})


#: Configurations that transformers knows too, each for something the others have not.
CONFIGS: dict[str, ModelConfig] = {
    "yarn": config(),
    "no yarn, halves": config(rope=PLAIN, rope_interleave=False, q_lora_rank=64, v_head_dim=24, rms_norm_eps=0.05),
    "groups": config(experts=32, experts_per_token=4, n_group=4, topk_group=2, layers=2, dense_layers=0),
    "not normalised": config(norm_topk_prob=False, routed_scaling=1.5, shared_experts=2, experts=24, experts_per_token=3),
    "tied, all dense but one": config(
        tie_word_embeddings=True, dense_layers=2, qk_nope_head_dim=24, qk_rope_head_dim=8, experts_per_token=4
    ),
}


def tokens(count: int, vocab: int, seed: int) -> list[int]:
    """Tokens that depend on the arguments alone."""
    words = np.random.Philox(key=seed).random_raw(count)
    return [int(word) for word in words % np.uint64(vocab)]


def saved_by_transformers(config: ModelConfig, directory: Path) -> Any:
    """A model that transformers initialises and has saved in a directory; the test is skipped where torch or transformers is missing."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    values = config.to_hf()
    yarn = values.pop("rope_scaling") or {"rope_type": "default"}
    parameters = {**yarn, "rope_type": yarn.pop("type", "default"), "rope_theta": values.pop("rope_theta")}
    other = transformers.DeepseekV3ForCausalLM._from_config(
        transformers.DeepseekV3Config(**values, rope_parameters=parameters), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
            if key in ("lm_head.weight", "model.embed_tokens.weight"):
                parameter.mul_(3)
        for key, buffer in other.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    other.save_pretrained(directory)
    return other
