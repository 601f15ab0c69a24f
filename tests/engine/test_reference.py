"""The reference against transformers (where torch and transformers are), against results kept from it, and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.dtypes import numpy_dtype
from kdgen.engine.checkpoint import Checkpoint, open_checkpoint, open_tensors
from kdgen.engine.config import ModelConfig
from kdgen.engine.inventory import MATRICES, expert_name
from kdgen.engine.random_model import random_tensors, write_hf
from kdgen.engine.reference import STAGES, Reference, round_to
from kdgen.kdtr import Reader
from kdgen.kernels import moe_route, rmsnorm
from kdgen.rope import softmax_scale
from kdgen.weights.int4 import Int4Weight
from tests.engine import golden
from tests.engine.golden import GOLDEN, GOLDEN_CONFIGS, SEED
from tests.engine.models import CONFIGS, INT4, config, saved_by_transformers, tokens

Array = np.ndarray[Any, Any]


def random_checkpoint(model: ModelConfig, seed: int = SEED) -> Checkpoint:
    return open_tensors(model, dict(random_tensors(model, seed)))


def all_logits(reference: Reference, prompt: list[int]) -> Array:
    return reference.forward(prompt, reference.new_cache())


def difference(got: Array, want: Array) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_equals_what_transformers_computed(name: str) -> None:
    model = GOLDEN_CONFIGS[name]
    with Reader(GOLDEN) as kept:
        assert golden.weights_hash(model) == kept.attributes["weights_sha256"][name], "random_tensors makes other bytes"
        prompt, logits, greedy = (kept[f"{name}/{part}"] for part in ("prompt", "logits", "greedy"))
    reference = Reference(random_checkpoint(model))
    assert difference(all_logits(reference, prompt.tolist()), logits) < 1e-5
    found, rows = reference.generate(prompt.tolist(), len(greedy), stop=False)
    assert found == greedy.tolist()
    assert rows.shape == (len(greedy), model.model.vocab)
    # A model that repeats itself tests little; with a tied head it cannot help it.
    assert len(set(found)) > 10 or model.tie_word_embeddings


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_own_models(name: str, tmp_path: Path) -> None:
    """A model that transformers initialises and saves; with what it saves differently from release to release, such as fused experts."""
    other = saved_by_transformers(CONFIGS[name], tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.config == CONFIGS[name]
        reference = Reference(checkpoint)
        prompt = tokens(40, checkpoint.config.model.vocab, 1)
        assert difference(all_logits(reference, prompt), golden.transformers_logits(other, prompt)) < 1e-5
        assert reference.generate(prompt, 64, stop=False)[0] == golden.transformers_greedy(other, prompt, 64)


def test_an_int4_checkpoint_of_the_library(tmp_path: Path) -> None:
    """Experts packed by compressed-tensors; transformers runs with the weights that the library decompresses."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    from tests.weights.samples import library_results

    model = config(dtype="bf16", quantization=INT4)
    tensors = dict(random_tensors(model, 3))
    decompressed: dict[str, Array] = {}
    for layer in range(1, model.model.layers):
        for expert in range(model.model.experts):
            for matrix in MATRICES:
                name = expert_name(layer, expert, matrix)
                before = Int4Weight.from_tensors(
                    {part: tensors[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
                )
                results = library_results(np.flip(before.dequantize("bf16"), axis=0).copy(), 32)
                decompressed[f"{name}.weight"] = results.pop("bf16").astype(np.float32)
                tensors |= {f"{name}.{part}": array for part, array in results.items()}
    write_hf(tmp_path / "packed", model, tensors.items())
    plain = {name: array.astype(np.float32) for name, array in tensors.items() if ".experts." not in name}
    write_hf(tmp_path / "plain", golden.plain(model), (plain | decompressed).items())
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    prompt = tokens(40, model.model.vocab, 5)
    with open_checkpoint(tmp_path / "packed") as checkpoint:
        assert checkpoint.config == model
        reference = Reference(checkpoint, int4="bf16")
        logits = all_logits(reference, prompt)
        assert difference(logits, golden.transformers_logits(other, prompt)) < 1e-5
        assert reference.generate(prompt, 32, stop=False)[0] == golden.transformers_greedy(other, prompt, 32)
        # Not rounding the weights is another model, but a close one.
        assert 0 < difference(all_logits(Reference(checkpoint), prompt), logits) < 0.05


@pytest.mark.parametrize("name", ["yarn", "groups", "no yarn, halves"])
def test_parts_and_both_ways_of_attention_agree(name: str) -> None:
    checkpoint = random_checkpoint(CONFIGS[name])
    reference, prompt = Reference(checkpoint), tokens(30, 96, 2)
    whole, cache = all_logits(reference, prompt), reference.new_cache()
    parts = np.concatenate([reference.forward(prompt[start:end], cache) for start, end in ((0, 1), (1, 17), (17, 30))])
    assert difference(parts, whole) < 1e-12
    branch = cache.fork()
    branch.truncate(17)
    assert (cache.length, branch.length) == (30, 17)
    assert difference(reference.forward(prompt[17:20], branch), whole[17:20]) < 1e-12
    assert cache.length == 30
    assert difference(all_logits(Reference(checkpoint, latent_attention=True), prompt), whole) < 1e-12
    # Hardly any weight is kept.
    assert np.array_equal(all_logits(Reference(checkpoint, cache_bytes=1000), prompt), whole)


def test_rounding_is_where_the_docstring_says() -> None:
    model = config(quantization=INT4, dtype="bf16")
    checkpoint, prompt = random_checkpoint(model), tokens(20, 96, 4)
    exact = all_logits(Reference(checkpoint), prompt)
    for rounding, low, high in (("f32", 1e-9, 1e-5), ("bf16", 1e-4, 0.1)):
        seen: dict[tuple[int | None, str], Array] = {}
        reference = Reference(checkpoint, rounding=rounding, on_stage=lambda layer, stage, a, seen=seen: seen.update({(layer, stage): a}))  # type: ignore[arg-type, misc]
        logits = all_logits(reference, prompt)
        assert low < difference(logits, exact) < high
        assert {stage for _, stage in seen} == set(STAGES)
        wide = {"embed", "residual", "router_logits", "router_weights", "experts", "output", "logits"}
        for (_, stage), values in seen.items():
            if stage == "router_ids":
                continue
            dtype = numpy_dtype("f32" if stage in wide or rounding == "f32" else "bf16")
            assert np.array_equal(values.astype(np.float32).astype(dtype).astype(np.float64), values), stage
            if stage in wide - {"embed"}:
                assert not np.array_equal(values.astype(numpy_dtype("bf16")).astype(np.float64), values), stage
        assert np.array_equal(seen[None, "logits"], logits)


def test_bf16_norms_are_those_of_the_kernel() -> None:
    model = config(dtype="bf16", quantization=INT4)
    seen: dict[tuple[int | None, str], Array] = {}
    reference = Reference(random_checkpoint(model), rounding="bf16", on_stage=lambda layer, stage, a: seen.update({(layer, stage): a}))
    all_logits(reference, tokens(50, 96, 6))
    p = rmsnorm.Params(hidden=128, eps=1e-5, x="f32", threads=32)
    inputs = {
        "x": seen[1, "residual"].astype(np.float32),
        "weight": reference.checkpoint.tensor("model.layers.1.post_attention_layernorm.weight"),
    }
    want = rmsnorm.FAMILY.reference(p, inputs)["out"].astype(np.float64)
    # The kernel's sums are float32, so a value on the edge may fall to the other side.
    assert (want != seen[1, "post_norm"]).mean() < 0.01
    assert difference(seen[1, "post_norm"], want) < 2**-7


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)])
def test_routes_as_the_kernel(scoring: str, groups: tuple[int, int]) -> None:
    model = config(experts=32, experts_per_token=4, n_group=groups[0], topk_group=groups[1], scoring=scoring, norm_topk_prob=groups[0] < 8)
    seen: dict[tuple[int | None, str], Array] = {}
    tensors = dict(random_tensors(model, 5))
    for layer in (1, 2):  # ties: every expert twice
        for part in ("weight", "e_score_correction_bias"):
            tensors[f"model.layers.{layer}.mlp.gate.{part}"] = np.repeat(tensors[f"model.layers.{layer}.mlp.gate.{part}"][::2], 2, axis=0)
    reference = Reference(open_tensors(model, tensors), on_stage=lambda layer, stage, a: seen.update({(layer, stage): a}))
    all_logits(reference, tokens(40, 96, 7))
    p = moe_route.Params(
        experts=32, hidden=128, top_k=4, x_dtype="f32", gate_dtype="f32", scoring=scoring, n_group=groups[0], topk_group=groups[1],
        normalise=model.norm_topk_prob, scaling=model.model.routed_scaling, slices=1, warps=1, row_tile=16,
    )  # fmt: skip
    for layer in (1, 2):
        gate = f"model.layers.{layer}.mlp.gate"
        inputs = {"x": seen[layer, "post_norm"], "w_gate": tensors[f"{gate}.weight"], "bias": tensors[f"{gate}.e_score_correction_bias"]}
        want = moe_route.FAMILY.reference(p, inputs)
        assert np.array_equal(seen[layer, "router_ids"], want["topk_ids"])
        assert np.array_equal(seen[layer, "router_weights"], want["topk_weights"])
        assert len(np.unique(seen[layer, "router_ids"])) > 12, "routing is not spread"


def test_stages_come_in_order_with_their_shapes() -> None:
    model, seen = config(), []
    reference = Reference(
        random_checkpoint(model), latent_attention=True, on_stage=lambda layer, stage, a: seen.append((layer, stage, a.shape))
    )
    all_logits(reference, tokens(5, 96, 8))
    m = model.model
    shapes = {
        "embed": (128,), "input_norm": (128,), "q_a": (32,), "kv_a": (48,), "q_norm": (32,), "q_b": (8, 32), "rope_query": (8, 16),
        "latent": (32,), "rope_key": (16,), "query_latent": (8, 32), "attention_latent": (8, 32), "attention": (8, 16), "o": (128,),
        "residual": (128,), "post_norm": (128,), "dense_gate_up": (96,), "dense": (128,), "router_logits": (16,), "router_ids": (2,),
        "router_weights": (2,), "gate_up": (2, 64), "experts": (2, 128), "shared_gate_up": (64,), "shared": (128,), "moe": (128,),
        "output": (128,), "final_norm": (128,), "logits": (96,),
    }  # fmt: skip
    assert list(shapes) == list(STAGES)
    dense = [stage for stage in STAGES[1:-2] if stage not in STAGES[17:25]]
    mixed = [stage for stage in STAGES[1:-2] if not stage.startswith("dense")]
    want = [(None, "embed"), *((0, s) for s in dense), *((layer, s) for layer in range(1, m.layers) for s in mixed)]
    want += [(None, "final_norm"), (None, "logits")]
    assert [(layer, stage) for layer, stage, _ in seen] == want
    assert all(shape == (5, *shapes[stage]) for _, stage, shape in seen)


def test_generate_stops_and_takes_the_lowest_of_equals() -> None:
    model = config()
    reference = Reference(random_checkpoint(model))
    free, _ = reference.generate([5, 6], 12, stop=False)
    stopping = Reference(random_checkpoint(config(stop_token_ids=(free[7], 95))))
    found, rows = stopping.generate([5, 6], 12)
    assert found == free[: free.index(free[7]) + 1]
    assert len(rows) == len(found)
    cache = reference.new_cache()
    first, _ = reference.generate([5, 6], 4, stop=False, cache=cache)
    assert cache.length == 2 + 3
    assert first + reference.generate(first[-1:], 8, stop=False, cache=cache)[0] == free
    tied = dict(random_tensors(model, SEED))
    tied["lm_head.weight"] = np.repeat(tied["lm_head.weight"][::2], 2, axis=0)
    assert all(token % 2 == 0 for token in Reference(open_tensors(model, tied)).generate([5, 6], 12, stop=False)[0])


def test_wrong_arguments() -> None:
    reference = Reference(random_checkpoint(config()))
    cache = reference.new_cache()
    faults = {
        "at least one": [],
        "token 96 is outside the vocabulary of 96": [96],
        "token -1": [-1],
        "256 positions": [0] * 257,
        "integer": [0.5],
    }
    for message, ids in faults.items():
        with pytest.raises(ValueError, match=message):
            reference.forward(ids, cache)  # type: ignore[arg-type]
    assert cache.length == 0
    with pytest.raises(ValueError, match="max_tokens is 0"):
        reference.generate([1], 0)
    with pytest.raises(ValueError, match="cannot be cut"):
        cache.truncate(1)
    with pytest.raises(ValueError, match="rounding is 'f16'"):
        Reference(reference.checkpoint, rounding="f16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int4 is 'f64'"):
        Reference(reference.checkpoint, int4="f64")  # type: ignore[arg-type]


def test_the_scale_of_unscaled_positions() -> None:
    assert softmax_scale(CONFIGS["no yarn, halves"].model.rope, 32) == pytest.approx(32**-0.5, rel=1e-15)


def test_round_to() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 / 3])
    assert round_to(values, "bf16").tolist() == [1, 1 + 2**-6, 1 + 2**-7, 0.333984375]
    assert round_to(values, "f32").tolist() == [*values[:3].tolist(), float(np.float32(1 / 3))]
