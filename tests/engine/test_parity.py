"""The engine decodes what transformers computes: its own random models, an INT4 checkpoint, and results kept from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.engine.checkpoint import Checkpoint, open_checkpoint, open_tensors
from kdgen.engine.draft import Oracle
from kdgen.engine.engine import Engine, Result
from kdgen.engine.inventory import MATRICES, expert_name
from kdgen.engine.model_file import spec_for
from kdgen.engine.random_model import random_tensors, write_hf
from kdgen.kdtr import Reader
from kdgen.runtime import open_device
from kdgen.weights.int4 import Int4Weight
from tests.engine import golden
from tests.engine.golden import DECODED, ENGINE_CONFIGS, SEED
from tests.engine.models import INT4, config, saved_by_transformers, tokens

#: Largest difference of a logit, relative to the largest one, of float32 activations.
BOUND = 1e-4
STEPS = golden.DECODED_STEPS


def difference(got: Any, want: Any) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def decode(checkpoint: Checkpoint, device: str, out: Path, prompt: list[int], *, mode: str = "ar", widen: bool = False) -> Result:
    """Decoded by the kernels; `widen`: float32 activations whatever the checkpoint has."""
    from kdgen.engine.state import Request

    overrides = ("types.activations=f32", "types.weights=f32") if widen else ()
    spec = spec_for(checkpoint.config, None, overrides)
    engine = Engine.open(spec, checkpoint, open_device(device), out=out, context=len(prompt) + STEPS + spec.engine.tree.budget + 1)
    (result,) = engine.generate([Request(prompt, STEPS)], mode=mode, drafter=Oracle((0.8,), seed=1), record=True).results
    return result


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", ENGINE_CONFIGS)
def test_decodes_what_transformers_computed(name: str, device: str, out: Path) -> None:
    """Against the kept results, without torch."""
    model = ENGINE_CONFIGS[name]
    with Reader(DECODED) as kept:
        assert golden.weights_hash(model) == kept.attributes["weights_sha256"][name], "random_tensors makes other bytes"
        prompt, logits, greedy = (kept[f"{name}/{part}"] for part in ("prompt", "logits", "greedy"))
    checkpoint = open_tensors(model, dict(random_tensors(model, SEED)))
    plain = decode(checkpoint, device, out, prompt.tolist(), widen=True)
    assert list(plain.tokens) == greedy.tolist()
    assert difference(plain.logits, logits) < BOUND
    tree = decode(checkpoint, device, out, prompt.tolist(), mode="tree", widen=True)
    assert tree.tokens == plain.tokens
    assert tree.logits.tobytes() == plain.logits.tobytes()


def test_the_kept_results_are_small() -> None:
    assert DECODED.stat().st_size <= 300_000


@pytest.mark.parametrize("name", [name for name in ENGINE_CONFIGS if name != "int4"])
def test_transformers_own_models(name: str, tmp_path: Path, out: Path) -> None:
    """A model that transformers initialises and saves, read from its directory."""
    other = saved_by_transformers(ENGINE_CONFIGS[name], tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.config == ENGINE_CONFIGS[name]
        prompt = tokens(40, checkpoint.config.model.vocab, 1)
        greedy, logits = golden.decoded(other, prompt, STEPS)
        result = decode(checkpoint, "host", out, prompt, mode="tree")
    assert list(result.tokens) == greedy
    assert difference(result.logits, logits) < BOUND


def test_an_int4_checkpoint_of_the_library(tmp_path: Path, out: Path) -> None:
    """Experts packed by compressed-tensors. The engine's products are those of the unrounded weights, nibble times scale, with which
    transformers runs here; with the library's own decompressed weights, which are rounded to bf16, it is another model, but a close one."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    from tests.weights.samples import library_results

    model = config(experts=32, moe_intermediate=128, dtype="bf16", quantization=INT4)
    tensors = dict(random_tensors(model, 3))
    exact: dict[str, Any] = {}
    rounded: dict[str, Any] = {}
    for layer in range(model.model.dense_layers, model.model.layers):
        for expert in range(model.model.experts):
            for matrix in MATRICES:
                name = expert_name(layer, expert, matrix)
                parts = {part: tensors[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
                before = Int4Weight.from_tensors(parts)
                results = library_results(np.flip(before.dequantize("bf16"), axis=0).copy(), 32)
                rounded[f"{name}.weight"] = results.pop("bf16").astype(np.float32)
                exact[f"{name}.weight"] = Int4Weight.from_tensors(results).dequantize()
                tensors |= {f"{name}.{part}": array for part, array in results.items()}
    write_hf(tmp_path / "packed", model, tensors.items())
    plain = {name: array.astype(np.float32) for name, array in tensors.items() if ".experts." not in name}
    prompt = tokens(40, model.model.vocab, 5)
    with open_checkpoint(tmp_path / "packed") as checkpoint:
        assert checkpoint.config == model
        result = decode(checkpoint, "host", out, prompt, mode="tree", widen=True)
    for directory, experts, bound in (("exact", exact, BOUND), ("rounded", rounded, 0.05)):
        write_hf(tmp_path / directory, golden.plain(model), (plain | experts).items())
        other = AutoModelForCausalLM.from_pretrained(tmp_path / directory, attn_implementation="eager").eval()
        logits = golden.transformers_logits(other, [*prompt, *result.tokens[:-1]])[len(prompt) - 1 :]
        assert difference(result.logits, logits) < bound
        if directory == "exact":
            assert list(result.tokens) == golden.transformers_greedy(other, prompt, STEPS)
