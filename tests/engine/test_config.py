from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kdgen.engine.config import ModelConfig
from kdgen.errors import ArtifactError, SpecError
from kdgen.spec import load_spec
from tests.engine.models import CONFIGS, INT4, PLAIN, YARN, config

#: What the publisher of Kimi K2.6 ships, as far as the text model goes.
KIMI_TEXT: dict[str, Any] = {
    "_name_or_path": "", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "chunk_size_feed_forward": 0, "eos_token_id": 163585, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 262144, "model_type": "kimi_k2",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "pad_token_id": 163839, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 163840,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "input_activations": None, "output_activations": None,
                "weights": {
                    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
                    "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
                },
            }
        },
    },
}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "bos_token_id": 163584, "eos_token_id": 163585,
    "pad_token_id": 163839, "dtype": "bfloat16", "ignore_index": -100, "media_placeholder_token_id": 163605,
    "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": {"hidden_size": 1152},
    "quantization_config": KIMI_TEXT["quantization_config"], "text_config": KIMI_TEXT,
}  # fmt: skip


def read(values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_mapping(values, "config.json")


def changed(change: Callable[[dict[str, Any]], object], base: dict[str, Any] | None = None) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(KIMI if base is None else base))
    change(values)
    return values


def text_is_a_list(values: dict[str, Any]) -> None:
    values["text_config"] = []


def text(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["text_config"].update(values)


def rope(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda config: config["text_config"]["rope_scaling"].update(values)


def quantization(**values: Any) -> Callable[[dict[str, Any]], object]:
    def change(config: dict[str, Any]) -> None:
        del config["quantization_config"]
        config["text_config"]["quantization_config"].update(values)

    return change


def weights(**values: Any) -> Callable[[dict[str, Any]], object]:
    def change(config: dict[str, Any]) -> None:
        del config["quantization_config"]
        config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

    return change


def test_kimi_is_the_engine_specs_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 163586, "max_length": 262144}))
    found = ModelConfig.from_hf(tmp_path)
    assert found == ModelConfig.from_hf(tmp_path / "config.json")
    spec = load_spec(Path(__file__).parents[2] / "specs" / "engines" / "kimi-k2.6.yaml")
    assert found.model == spec.engine.model
    assert found.stop_token_ids == (163585, 163586)
    assert (found.bos_token_id, found.prefix, found.dtype) == (163584, "language_model.", "bf16")
    assert (found.latent_norm_eps, found.q_head_dim, found.shared_intermediate) == (1e-6, 192, 2048)
    assert ModelConfig.from_hf(tmp_path, latent_norm_eps=1e-5).latent_norm_eps == 1e-5


@pytest.mark.parametrize(
    "model",
    [
        *CONFIGS.values(),
        config(quantization=INT4, dtype="bf16", prefix="language_model."),
        config(latent_norm_eps=1e-5, stop_token_ids=(), bos_token_id=None, scoring="softmax", predict_layers=1),
        config(stop_token_ids=(1, 95), shared_experts=0, rope=YARN.model_copy(update={"factor": 1.0})),
        config(rope=PLAIN, dense_layers=3),
    ],
)
def test_to_hf_is_the_inverse(model: ModelConfig) -> None:
    assert read(json.loads(json.dumps(model.to_hf()))) == model


def test_other_ways_of_saying_the_same() -> None:
    model = CONFIGS["yarn"]
    values = model.to_hf()
    parameters = {**values.pop("rope_scaling"), "rope_theta": values.pop("rope_theta"), "rope_type": "yarn"}
    assert read({**values, "rope_parameters": parameters}) == model
    del parameters["type"]
    assert read({**values, "rope_parameters": {**parameters, "factor": 4}, "torch_dtype": "float32", "dtype": None}) == model
    assert read({**values, "rope_parameters": parameters, "model_type": "kimi_k2", "topk_method": "noaux_tc"}) == model
    plain = CONFIGS["no yarn, halves"].to_hf()
    theta = plain.pop("rope_theta")
    assert plain.pop("rope_scaling") is None
    assert read({**plain, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}) == CONFIGS["no yarn, halves"]
    assert read(changed(text(n_shared_experts=None))).model.shared_experts == 0
    assert read(changed(lambda values: values["text_config"].pop("quantization_config"))) == read(KIMI)
    assert read(changed(lambda values: values.pop("quantization_config"))) == read(KIMI)


def test_quantization_as_the_library_writes_it() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    model = config(quantization=INT4, dtype="bf16")
    values = model.to_hf()
    library = QuantizationConfig.model_validate(values["quantization_config"])
    assert read({**values, "quantization_config": json.loads(json.dumps(library.to_dict()))}) == model
    weights = library.config_groups["group_0"].weights.model_dump(mode="json")  # with every default
    values["quantization_config"]["config_groups"]["group_0"]["weights"] = weights
    assert read(values) == model


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "model type": (lambda v: v.update(model_type="llama"), 'model_type: is "llama"; allowed: "deepseek_v3" or "kimi_k2" or "kimi_k25"'),
    "inner model type": (text(model_type="llama"), 'text_config.model_type: is "llama"'),
    "text is a list": (text_is_a_list, "text_config: must be an object"),
    "no text": (lambda v: v.pop("text_config"), "text_config: is missing"),
    "unknown key": (text(attention_sinks=4), "text_config.attention_sinks: unknown key"),
    "unknown outer key": (lambda v: v.update(window=4), "config.json: window: unknown key"),
    "missing key": (lambda v: v["text_config"].pop("kv_lora_rank"), "text_config.kv_lora_rank: is missing"),
    "wrong type": (text(hidden_size="7168"), 'text_config.hidden_size: is "7168"; allowed: an integer'),
    "a flag as a number": (text(num_hidden_layers=True), "text_config.num_hidden_layers: is true; allowed: an integer"),
    "out of range": (text(hidden_size=0), "text_config.hidden_size: is 0; allowed: greater than or equal to 1"),
    "kv heads": (text(num_key_value_heads=8), "text_config.num_key_value_heads: is 8, num_attention_heads is 64; they must be equal"),
    "full-rank queries": (text(q_lora_rank=None), "text_config.q_lora_rank: is null; queries without a low rank"),
    "attention bias": (text(attention_bias=True), "text_config.attention_bias: is true; allowed: false"),
    "activation": (text(hidden_act="gelu"), 'text_config.hidden_act: is "gelu"; allowed: "silu"'),
    "sparse every other layer": (text(moe_layer_freq=2), "text_config.moe_layer_freq: is 2; allowed: 1"),
    "choice": (text(topk_method="greedy"), 'text_config.topk_method: is "greedy"; allowed: "noaux_tc"'),
    "scoring": (text(scoring_func="tanh"), 'text_config.scoring_func: is "tanh"; allowed: "sigmoid" or "softmax"'),
    "router dtype": (text(moe_router_dtype="bfloat16"), "text_config.moe_router_dtype"),
    "too many experts": (text(n_routed_experts=7), "num_experts_per_tok: 8 of 7 experts cannot be chosen"),
    "too many dense layers": (text(first_k_dense_replace=62), "first_k_dense_replace: 62 of 61 layers cannot be dense"),
    "odd rope": (text(qk_rope_head_dim=63), "text_config.qk_rope_head_dim: is 63; allowed: a multiple of 2"),
    "groups": (text(n_group=7), "text_config.n_group: 7 groups do not divide 384 experts"),
    "no groups": (text(n_group=0), "text_config.n_group: is 0; allowed: 1 … 1024"),
    "groups of one": (text(n_group=384), "text_config.n_group: 384 groups leave 1 expert each"),
    "chosen groups": (text(n_group=4, topk_group=5), "text_config.topk_group: 5 of 4 groups cannot be chosen"),
    "small groups": (text(n_group=96), "text_config.num_experts_per_tok: 8 experts cannot come from 1 groups of 4"),
    "stop token": (text(eos_token_id=[1, 163840]), "text_config.eos_token_id: token 163840 is outside the vocabulary of 163840"),
    "no stop token": (text(eos_token_id="</s>"), 'text_config.eos_token_id: is "</s>"; allowed: a token'),
    "first token": (text(bos_token_id=-1), "text_config.bos_token_id: is -1"),
    "outer first token": (
        lambda v: (v["text_config"].pop("bos_token_id"), v.update(bos_token_id="x")),
        'json: bos_token_id: is "x"; allowed',
    ),
    "predicting layers": (text(num_nextn_predict_layers=17), "text_config.num_nextn_predict_layers: is 17; allowed: 0 … 16"),
    "predicting layers, named anew": (
        lambda v: (v["text_config"].pop("num_nextn_predict_layers"), v["text_config"].update(num_mtp_layers="x")),
        'text_config.num_mtp_layers: is "x"; allowed: an integer',
    ),
    "not a number": (text(rms_norm_eps=float("nan")), "text_config.rms_norm_eps: is nan"),
    "dtype": (lambda v: v.update(dtype="float16"), 'config.json: dtype: is "float16"; allowed: bfloat16 or float32'),
    "no dtype": (lambda v: v.pop("dtype"), "text_config.dtype: is missing"),
    "two dtypes": (text(dtype="float32"), "text_config.dtype: is given as float32 and bfloat16"),
    "mscale": (rope(mscale=0.7), "rope_scaling.mscale: is 0.7, mscale_all_dim is 1.0; they must be equal"),
    "no mscale": (rope(mscale=0, mscale_all_dim=0), "rope_scaling.mscale: is 0"),
    "rope type": (rope(type="linear"), 'rope_scaling.type: is "linear"; allowed: "yarn" or "default"'),
    "rope key": (rope(short_factor=[1]), "rope_scaling.short_factor: unknown key"),
    "rope range": (rope(factor=0.5), "rope_scaling.factor: is 0.5; allowed: greater than or equal to 1"),
    "attention factor": (rope(attention_factor=1.2), "rope_scaling.attention_factor: is 1.2; allowed: null"),
    "truncate": (rope(truncate=False), "rope_scaling.truncate: is false; allowed: true"),
    "two ropes": (text(rope_parameters={"rope_type": "default"}), "rope_parameters: stands beside rope_scaling"),
    "two thetas": (rope(rope_theta=10000.0), "rope_scaling.rope_theta: is 10000.0, rope_theta outside is 50000.0"),
    "no theta": (lambda v: v["text_config"].pop("rope_theta"), "text_config.rope_theta: is missing"),
    "eps": (text(latent_norm_eps=0.5), "text_config.latent_norm_eps: is 0.5"),
    "fp8": (quantization(quant_method="fp8"), 'quantization_config.quant_method: is "fp8"; allowed: "compressed-tensors"'),
    "format": (quantization(format="marlin-24"), "quantization_config.format"),
    "cache scheme": (quantization(kv_cache_scheme={"num_bits": 8}), "quantization_config.kv_cache_scheme"),
    "bits": (weights(num_bits=8), "config_groups.group_0.weights.num_bits: is 8; allowed: 4"),
    "group": (weights(group_size=128), "config_groups.group_0.weights.group_size: is 128; allowed: 32"),
    "asymmetric": (weights(symmetric=False), "weights.symmetric: is false; allowed: true"),
    "reordered": (weights(actorder="group"), "weights.actorder"),
    "unknown weights key": (weights(zebra=1), "weights.zebra: unknown key"),
    "dense layers quantized": (
        quantization(ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]),
        "quantization_config.ignore: leaves model.layers.0.mlp.gate_proj quantized (and 2 more)",
    ),
    "experts not quantized": (
        quantization(ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.*"]),
        "quantization_config.ignore: leaves model.layers.1.mlp.experts.0.gate_proj unquantized (and 359 more)",
    ),
    "a bad pattern": (quantization(ignore=["re:("]), "quantization_config.ignore: 're:(' is no regular expression"),
    "two quantizations": (lambda v: v["quantization_config"].update(format="dense"), "differs from text_config.quantization_config"),
    "quantized columns": (text(hidden_size=7180), "text_config.hidden_size: 7180 is no multiple of 32"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    change, message = FAULTS[name]
    with pytest.raises(SpecError) as caught:
        read(changed(change))
    assert message in str(caught.value)
    assert len(caught.value.faults) == 1, caught.value
    assert str(caught.value).startswith("config.json: ")


def test_all_faults_are_reported_together() -> None:
    def change(values: dict[str, Any]) -> None:
        values["text_config"].update(hidden_act="gelu", q_lora_rank=None, zebra=1, num_experts_per_tok=1000, max_position_embeddings=0)
        values["text_config"]["rope_scaling"].update(mscale=2.0)
        del values["text_config"]["vocab_size"]

    with pytest.raises(SpecError) as caught:
        read(changed(change))
    keys = {fault.key.removeprefix("text_config.") for fault in caught.value.faults}
    want = {"hidden_act", "q_lora_rank", "zebra", "num_experts_per_tok", "max_position_embeddings", "rope_scaling.mscale", "vocab_size"}
    assert keys == want | {"quantization_config"} or keys == want


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json: cannot be read: No such file"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"config\.json: is not JSON"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"config\.json: is a list"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(changed(text(hidden_act="gelu"))))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "no"}))
    with pytest.raises(SpecError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert [Path(fault.file).name for fault in caught.value.faults] == ["generation_config.json", "config.json"]


def test_contradictions_in_a_configuration_made_by_hand() -> None:
    with pytest.raises(ValidationError, match="experts_per_token: 17 of 16 experts cannot be chosen"):
        config(experts_per_token=17)
    with pytest.raises(ValidationError, match="stop_token_ids: token 96 is outside the vocabulary of 96"):
        config(stop_token_ids=(96,))
    with pytest.raises(ValidationError, match="moe_intermediate: 48 is no multiple of 32"):
        config(moe_intermediate=48, quantization=INT4)
