"""Writes tests/golden/engine/*.kdtr, with transformers and torch installed: `python -m tests.engine.golden [FILE…]`.

For each model, with the weights of `random_tensors(config, SEED)`: a prompt, the logits that transformers computes in float32, the tokens
with which it continues greedily, and a hash of the weights.

    transformers.kdtr   `GOLDEN_CONFIGS`, for the numpy engine: logits at the prompt's positions
    decoded.kdtr        `ENGINE_CONFIGS`, which the kernels can be cut for: logits of the position before each greedy token
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.engine.checkpoint import open_tensors
from kdgen.engine.config import ModelConfig
from kdgen.engine.inventory import MATRICES, expected, expert_name
from kdgen.engine.random_model import random_tensors, write_hf
from kdgen.kdtr import save
from kdgen.weights.int4 import Int4Weight
from tests.engine.models import CONFIGS, INT4, PLAIN, config, tokens

Array = npt.NDArray[Any]

GOLDEN = Path(__file__).parents[1] / "golden" / "engine" / "transformers.kdtr"
GOLDEN_CONFIGS: dict[str, ModelConfig] = {**CONFIGS, "int4": config(quantization=INT4, dtype="bf16", prefix="language_model.")}
SEED = 7
PROMPT, STEPS = 24, 32

#: What the kernels need: experts in whole warps, and two steps of an expert's product in flight.
_CUT: dict[str, Any] = {"experts": 32, "moe_intermediate": 128}
DECODED = GOLDEN.with_name("decoded.kdtr")
DECODED_STEPS = 64
ENGINE_CONFIGS: dict[str, ModelConfig] = {
    "yarn": config(**_CUT),
    "no yarn, halves": config(**_CUT, rope=PLAIN, rope_interleave=False, q_lora_rank=64, v_head_dim=24, rms_norm_eps=0.05),
    "groups": config(**_CUT, experts_per_token=4, n_group=4, topk_group=2, layers=2, dense_layers=0),
    "not normalised": config(
        **{**_CUT, "experts": 64}, hidden=192, norm_topk_prob=False, routed_scaling=1.5, shared_experts=2, experts_per_token=3
    ),
    "tied, all dense but one": config(
        **_CUT, tie_word_embeddings=True, dense_layers=2, qk_nope_head_dim=24, qk_rope_head_dim=8, experts_per_token=4
    ),
    "int4": config(**_CUT, quantization=INT4, dtype="bf16", prefix="language_model."),
}


def weights_hash(model: ModelConfig) -> str:
    """Of the names and bytes of all tensors."""
    found = hashlib.sha256()
    for name, array in random_tensors(model, SEED):
        found.update(name.encode() + str(array.dtype).encode() + array.tobytes())
    return found.hexdigest()


def plain(model: ModelConfig) -> ModelConfig:
    """The same model in float32, not quantized, without a wrapper."""
    changed = model.model.model_copy(update={"quantization": None})
    return model.model_copy(update={"model": changed, "dtype": "f32", "prefix": "", "stop_token_ids": ()})


def plain_tensors(model: ModelConfig, seed: int) -> Iterator[tuple[str, Array]]:
    """The tensors of `plain(model)`: those of the model, widened exactly."""
    checkpoint, m = open_tensors(model, dict(random_tensors(model, seed))), model.model
    for name in expected(model):
        yield name, checkpoint.tensor(name).astype(np.float32)
    for layer in range(m.dense_layers, m.layers):
        for e in range(m.experts):
            for matrix in MATRICES:
                weight = checkpoint.expert(layer, e, matrix)
                wide = weight.dequantize() if isinstance(weight, Int4Weight) else weight.astype(np.float32)
                yield f"{expert_name(layer, e, matrix)}.weight", wide


def transformers_model(model: ModelConfig, seed: int, directory: Path) -> Any:
    """`DeepseekV3ForCausalLM` in float32 with the weights of `random_tensors`."""
    from transformers import AutoModelForCausalLM

    write_hf(directory, plain(model), plain_tensors(model, seed), shard_bytes=400_000)
    found, report = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return found.eval()


def transformers_logits(model: Any, prompt: list[int]) -> npt.NDArray[np.float32]:
    """[n, vocab]."""
    import torch

    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model(torch.tensor([prompt])).logits[0].numpy()
    return logits


def transformers_greedy(model: Any, prompt: list[int], steps: int) -> list[int]:
    """Tokens with which the model continues, whatever its stop tokens are."""
    import torch

    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=steps, do_sample=False)
    return [int(token) for token in found[0, len(prompt) :]]


def decoded(model: Any, prompt: list[int], steps: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Greedy tokens and the logits `[steps, vocab]` of the position before each."""
    found = transformers_greedy(model, prompt, steps)
    return found, transformers_logits(model, [*prompt, *found[:-1]])[len(prompt) - 1 :]


def write(path: Path, configs: dict[str, ModelConfig], steps: int, every_position: bool) -> None:
    """One of the files; with the logits of the prompt's positions, or of those before the greedy tokens."""
    tensors: dict[str, Array] = {}
    hashes = {}
    for number, (name, model) in enumerate(configs.items()):
        prompt = tokens(PROMPT, model.model.vocab, number)
        with tempfile.TemporaryDirectory() as directory:
            other = transformers_model(model, SEED, Path(directory) / "model")
        greedy, logits = decoded(other, prompt, steps)
        tensors[f"{name}/prompt"] = np.array(prompt, np.int32)
        tensors[f"{name}/logits"] = transformers_logits(other, prompt) if every_position else logits
        tensors[f"{name}/greedy"] = np.array(greedy, np.int32)
        hashes[name] = weights_hash(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, tensors, {"weights_sha256": hashes, "made_with": {name: version(name) for name in ("transformers", "torch")}})


def main(names: list[str]) -> None:
    """Write these files, or all."""
    for path, configs, steps in ((GOLDEN, GOLDEN_CONFIGS, STEPS), (DECODED, ENGINE_CONFIGS, DECODED_STEPS)):
        if not names or path.name in names:
            write(path, configs, steps, path == GOLDEN)


if __name__ == "__main__":
    main(sys.argv[1:])
