"""A rank's slices: put together they are the whole, in every type."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.engine.checkpoint import open_tensors
from kdgen.engine.random_model import random_tensors
from kdgen.engine.weights import Slicer, load_weights
from kdgen.errors import ArtifactError
from kdgen.runtime import open_device
from kdgen.spec.model import Types
from kdgen.weights import prepack
from tests.engine.models import INT4, config

MODEL = config(experts=4, heads=8, moe_intermediate=256, dense_intermediate=96, vocab=96)
QUANTIZED = config(experts=4, heads=8, moe_intermediate=256, quantization=INT4)
F32 = Types(activations="f32", weights="f32", experts="f32")


def slicers(model, types, ranks):
    checkpoint = open_tensors(model, dict(random_tensors(model, 0)))
    return checkpoint, [Slicer(checkpoint, types, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_slices_of_all_ranks_are_the_whole(ranks):
    checkpoint, parts = slicers(MODEL, F32, ranks)
    dense, experts = ([dict(part.layer_arrays(layer)) for part in parts] for layer in (0, 1))
    attention = "model.layers.0.self_attn."
    heads, nope = 8 // ranks, MODEL.model.qk_nope_head_dim
    kv_b = checkpoint.tensor(attention + "kv_b_proj.weight").reshape(8, -1, MODEL.model.kv_lora_rank)
    for rank, part in enumerate(dense):
        mine = kv_b[rank * heads : (rank + 1) * heads]
        assert np.array_equal(part["absorb"], mine[:, :nope].transpose(0, 2, 1))
        assert np.array_equal(part["value_up"], mine[:, nope:])
        assert np.array_equal(part["qkv_a"], dense[0]["qkv_a"])
    assert np.array_equal(np.concatenate([part["o"] for part in dense], axis=1), checkpoint.tensor(attention + "o_proj.weight"))
    assert np.array_equal(
        np.concatenate([part["dense_down"] for part in dense], axis=1), checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    )
    width = 256 // ranks
    gate = np.concatenate([part["experts_gate_up"][2, :width] for part in experts])
    up = np.concatenate([part["experts_gate_up"][2, width:] for part in experts])
    assert np.array_equal(gate, checkpoint.expert(1, 2, "gate_proj"))
    assert np.array_equal(up, checkpoint.expert(1, 2, "up_proj"))
    assert np.array_equal(np.concatenate([part["experts_down"][3] for part in experts], axis=1), checkpoint.expert(1, 3, "down_proj"))
    table = np.concatenate([part.vocabulary("model.embed_tokens.weight") for part in parts])
    assert np.array_equal(table, checkpoint.tensor("model.embed_tokens.weight"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_slices_of_integers_are_the_whole(ranks):
    checkpoint, parts = slicers(QUANTIZED, Types(activations="f32", weights="f32", experts="int4"), ranks)
    layers = [dict(part.layer_arrays(1)) for part in parts]
    halves = [prepack.unprepack_gate_up(layer["experts_gate_up"][1]) for layer in layers]
    for number, name in enumerate(("gate_proj", "up_proj")):
        whole = checkpoint.expert(1, 1, name)
        assert np.array_equal(np.concatenate([half[number].dequantize() for half in halves]), whole.dequantize())
    downs = [prepack.unprepack(layer["experts_down"][1]).dequantize() for layer in layers]
    assert np.array_equal(np.concatenate(downs, axis=1), checkpoint.expert(1, 1, "down_proj").dequantize())


def test_rotary_pairs_become_halves():
    checkpoint, (slicer,) = slicers(MODEL, F32, 1)
    rows = checkpoint.tensor("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")[MODEL.model.kv_lora_rank :]
    found = dict(slicer.layer_arrays(0))["qkv_a"][-len(rows) :]
    assert np.array_equal(found, np.concatenate([rows[0::2], rows[1::2]]))


def test_a_tied_head_is_the_embedding():
    model = config(tie_word_embeddings=True, experts=4)
    weights = load_weights(open_tensors(model, dict(random_tensors(model, 0))), F32, open_device("host"), 64)
    assert weights.head is weights.embed


@pytest.mark.parametrize(
    ("model", "types", "ranks", "message"),
    [
        (MODEL, F32, 3, "heads = 8 cannot be sliced over 3 ranks"),
        (QUANTIZED, Types(activations="f32", weights="f32", experts="int4"), 16, "cannot be sliced|cuts groups"),
        (MODEL, Types(activations="f32", weights="f32", experts="int4"), 1, "its experts are f32, the engine spec's types.experts is int4"),
        (MODEL, Types(activations="bf16", weights="bf16", experts="bf16"), 1, "its values would be rounded"),
    ],
)
def test_what_cannot_be_sliced_or_would_be_rounded_is_refused(model, types, ranks, message):
    checkpoint = open_tensors(model, dict(random_tensors(model, 0)))
    with pytest.raises(ArtifactError, match=message):
        dict(Slicer(checkpoint, types, 0, ranks).layer_arrays(1))
