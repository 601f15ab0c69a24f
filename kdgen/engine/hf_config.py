"""Hugging Face's config.json for models of the DeepSeek-V3 family, both ways.

Read are `deepseek_v3` and `kimi_k2`, and Kimi's multimodal wrapper `kimi_k25`, whose text model is used. Every key must be known: either
it is read, or it is on a list of keys that change nothing at inference. What is left could change the model, so it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kdgen.engine.config import LATENT_NORM_EPS, contradictions, unscaled_rope
from kdgen.engine.hf_quantization import check_quantization, written_quantization
from kdgen.engine.hf_section import REQUIRED, Section, complaint, read_json
from kdgen.errors import Fault, SpecError
from kdgen.spec.model import Model, Quantization, Rope

if TYPE_CHECKING:
    from kdgen.engine.config import ModelConfig

TEXT_TYPES = ("deepseek_v3", "kimi_k2")
WRAPPER_TYPE = "kimi_k25"
_PREDICT = "num_nextn_predict_layers"
DTYPES = {"bfloat16": "bf16", "float32": "f32"}

#: Our name of every plain integer, and config.json's.
INTEGERS = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim", "experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok",
    "moe_intermediate": "moe_intermediate_size", "dense_intermediate": "intermediate_size", "dense_layers": "first_k_dense_replace",
    "vocab": "vocab_size", "max_position": "max_position_embeddings",
}  # fmt: skip
FLOATS = {"rms_norm_eps": "rms_norm_eps", "routed_scaling": "routed_scaling_factor"}
ROPE = {
    "factor": "factor", "original_max_position": "original_max_position_embeddings", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
HF_NAMES = {**INTEGERS, **FLOATS, "shared_experts": "n_shared_experts", "stop_token_ids": "eos_token_id"}

#: Keys that change nothing here: training, the library's bookkeeping, options of its `generate`.
_HARMLESS = """
    _attn_implementation_autoset _commit_hash _from_model_config _name_or_path add_cross_attention architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    ep_size exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads qk_head_dim remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript transformers_version typical_p use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
#: The wrapper's own: images and video, which are not read.
_WRAPPER_HARMLESS = "ignore_index image_token_id media_placeholder_token_id use_unified_vision_chunk video_placeholder vision_config"
WRAPPER_HARMLESS = HARMLESS | frozenset(_WRAPPER_HARMLESS.split())


def read_directory(path: Path) -> dict[str, Any]:
    """The arguments of `ModelConfig` from a directory or a config.json; errors as in `ModelConfig.from_hf`."""
    file = path / "config.json" if path.is_dir() else path
    values = read_json(file)
    generation = file.with_name("generation_config.json")
    if not generation.exists():
        return read(values, str(file))
    faults: list[Fault] = []
    stop = tokens(Section(read_json(generation), str(generation), "", faults))
    return read(values, str(file), stop, faults)


def read(values: Mapping[str, Any], where: str, more_stop_tokens: Iterable[int] = (), faults: list[Fault] | None = None) -> dict[str, Any]:
    """The arguments of `ModelConfig` from the contents of a config.json; SpecError with all faults, those given included."""
    faults = [] if faults is None else faults
    before, outer = len(faults), Section(values, where, "", faults)
    kind = outer.only("model_type", *TEXT_TYPES, WRAPPER_TYPE)
    if kind == WRAPPER_TYPE and not isinstance(outer.get("text_config", {}), Mapping):
        outer.fault("text_config", "must be an object")
    elif kind == WRAPPER_TYPE:
        outer.get("text_config", REQUIRED)
    if len(faults) > before:
        raise SpecError(faults)  # of another model, every key would be wrong
    text = outer
    result: dict[str, Any] = {"prefix": ""}
    if kind == WRAPPER_TYPE:
        result["prefix"] = "language_model."
        text = Section(outer.get("text_config"), where, "text_config", faults)
        text.only("model_type", *TEXT_TYPES, default=TEXT_TYPES[0])
    result["stop_token_ids"] = tuple(dict.fromkeys((*tokens(text), *(tokens(outer) if text is not outer else ()), *more_stop_tokens)))
    result["dtype"] = _dtype(text, outer)
    outer.get("bos_token_id")
    begin = outer if text.get("bos_token_id") is None else text
    result["bos_token_id"] = None if begin.get("bos_token_id") is None else begin.integer("bos_token_id")
    result["n_group"] = text.integer("n_group")
    result["topk_group"] = text.integer("topk_group")
    result["norm_topk_prob"] = text.flag("norm_topk_prob", True)
    result["scoring"] = text.only("scoring_func", "sigmoid", "softmax", default="sigmoid")
    result["rope_interleave"] = text.flag("rope_interleave", True)
    result["tie_word_embeddings"] = text.flag("tie_word_embeddings", False)
    result["latent_norm_eps"] = text.number("latent_norm_eps", LATENT_NORM_EPS)
    text.get("num_mtp_layers")  # the same under a newer name
    result["predict_layers"] = text.integer(_PREDICT if _PREDICT in text.values else "num_mtp_layers", 0)
    if outer is not text:
        # The library keeps a value of its own here, which the text model does not look at.
        outer.get("tie_word_embeddings")
    dimensions = _dimensions(text)
    _unsupported(text, dimensions)
    dimensions["rope"] = _rope(text, dimensions)
    quantization = text.get("quantization_config")
    if outer is not text and (given := outer.get("quantization_config")) is not None:
        if quantization is not None and quantization != given:
            outer.fault("quantization_config", "differs from text_config.quantization_config")
        quantization = given if quantization is None else quantization
    if quantization is not None:
        check_quantization(Section(quantization, where, "quantization_config", faults), dimensions, result["prefix"])
        dimensions["quantization"] = Quantization(bits=4, group=32)
    text.finish(HARMLESS)
    if outer is not text:
        outer.finish(WRAPPER_HARMLESS)
    result["model"] = _checked_model(text, dimensions)
    _checked_rest(text, result)
    wrong = {fault.key.rpartition(".")[2] for fault in faults}
    for name, message in contradictions({**dimensions, **{name: value for name, value in result.items() if name != "model"}}):
        if HF_NAMES.get(name, name) not in wrong:
            text.fault(HF_NAMES.get(name, name), message)
    if faults:
        raise SpecError(faults)
    return result


def tokens(section: Section) -> tuple[int, ...]:
    """`eos_token_id`: one token, a list of them, or none."""
    value = section.get("eos_token_id")
    found = [value] if isinstance(value, int) else value or []
    if not isinstance(found, list) or any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in found):
        section.fault("eos_token_id", f"is {json.dumps(value)[:100]}; allowed: a token, a list of tokens, or null")
        return ()
    return tuple(found)


def _dtype(text: Section, outer: Section) -> str:
    found: dict[str, Any] = {}
    for section in (text, outer):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if value is None:
                continue
            if not isinstance(value, str) or value not in DTYPES:
                section.fault(key, f"is {json.dumps(value)[:100]}; allowed: {' or '.join(DTYPES)}")
                return "bf16"
            found.setdefault(value, key)
    if len(found) > 1:
        text.fault("dtype", f"is given as {' and '.join(found)}")
    if not found:
        text.fault("dtype", f"is missing; allowed: {' or '.join(DTYPES)}")
    return DTYPES[next(iter(found))] if found else "bf16"


def _dimensions(text: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, key in INTEGERS.items():
        if name == "q_lora_rank" and text.get(key, REQUIRED) is None and key in text.values:
            text.fault(key, "is null; queries without a low rank are not supported")
            continue
        values[name] = text.integer(key)
    for name, key in FLOATS.items():
        values[name] = text.number(key)
    values["shared_experts"] = 0 if text.get("n_shared_experts", 0) is None else text.integer("n_shared_experts", 0)
    return {name: value for name, value in values.items() if value is not None}


def _unsupported(text: Section, dimensions: Mapping[str, Any]) -> None:
    """What a model of the family may not have."""
    text.only("attention_bias", False, default=False)
    text.only("hidden_act", "silu", default="silu")
    text.only("moe_layer_freq", 1, default=1)
    text.only("topk_method", "noaux_tc", default="noaux_tc")
    text.only("moe_router_dtype", None, "float32", default=None)
    heads, kv_heads = dimensions.get("heads"), text.get("num_key_value_heads")
    if kv_heads is not None and heads is not None and kv_heads != heads:
        text.fault("num_key_value_heads", f"is {json.dumps(kv_heads)}, num_attention_heads is {heads}; they must be equal")


def _rope(text: Section, dimensions: Mapping[str, Any]) -> Rope | None:
    """The rotary embedding; None after a fault."""
    before = len(text.faults)
    scaling, parameters = text.get("rope_scaling"), text.get("rope_parameters")
    if scaling is not None and parameters is not None:
        text.fault("rope_parameters", "stands beside rope_scaling; allowed: one of them")
    key = "rope_scaling" if parameters is None else "rope_parameters"
    given = scaling if parameters is None else parameters
    path = f"{text.path}.{key}" if text.path else key
    section = Section({} if given is None else given, text.where, path, text.faults)
    theta = section.get("rope_theta")
    if theta is None or "rope_theta" in text.values:
        outside = text.number("rope_theta")
        if theta is not None and theta != outside:
            section.fault("rope_theta", f"is {json.dumps(theta)}, rope_theta outside is {json.dumps(outside)}")
        theta = outside
    else:
        theta = section.number("rope_theta")
    kinds = [name for name in ("rope_type", "type") if name in section.values]
    kind = [section.only(name, "yarn", "default") for name in kinds]
    if len(set(kind)) > 1:
        section.fault("type", f"is {kind[1]}, rope_type is {kind[0]}")
    values: dict[str, Any] = {}
    if given is not None and not kinds:
        section.fault("rope_type", "is missing; allowed: yarn or default")
    elif kind and kind[0] == "yarn":
        values = {
            "factor": section.number("factor"),
            "original_max_position": section.integer("original_max_position_embeddings"),
            "beta_fast": section.number("beta_fast", 32),
            "beta_slow": section.number("beta_slow", 1),
            "mscale": section.number("mscale"),
            "mscale_all_dim": section.number("mscale_all_dim"),
        }
        section.only("attention_factor", None, default=None)
        section.only("truncate", True, default=True)
        if values["mscale"] != values["mscale_all_dim"] and None not in values.values():
            section.fault("mscale", f"is {values['mscale']}, mscale_all_dim is {values['mscale_all_dim']}; they must be equal")
        elif values["mscale"] == 0:
            section.fault("mscale", "is 0, which readers understand in different ways; allowed: above 0")
    section.only("partial_rotary_factor", 1, 1.0, default=1)
    section.finish()
    if len(text.faults) > before or theta is None:
        return None
    try:
        return Rope(theta=theta, **values) if values else unscaled_rope(theta, dimensions.get("max_position", 1))
    except ValidationError as error:
        for one in error.errors():
            name = str(one["loc"][0])
            (text if name == "theta" else section).fault("rope_theta" if name == "theta" else ROPE[name], complaint(one))
        return None


def _checked_model(text: Section, dimensions: dict[str, Any]) -> Model | None:
    try:
        return Model(**dimensions)
    except ValidationError as error:
        for one in error.errors():
            # What is missing has been reported.
            if dimensions.get(str(one["loc"][0])) is not None:
                text.fault(HF_NAMES[str(one["loc"][0])], complaint(one))
        return None


def _checked_rest(text: Section, result: Mapping[str, Any]) -> None:
    """Ranges of what stands beside the model."""
    names = {"n_group": (1, 1024), "topk_group": (1, 1024), "predict_layers": (0, 16)}
    for name, (low, high) in names.items():
        value = result[name]
        if value is not None and not low <= value <= high:
            text.fault({"predict_layers": _PREDICT}.get(name, name), f"is {value}; allowed: {low} … {high}")
    if (bos := result["bos_token_id"]) is not None and bos < 0:
        text.fault("bos_token_id", f"is {bos}; allowed: 0 or more")
    if (eps := result["latent_norm_eps"]) is not None and not 0 < eps < 0.1:
        text.fault("latent_norm_eps", f"is {eps}; allowed: above 0, below 0.1")


def write(config: ModelConfig) -> dict[str, Any]:
    """The contents of a config.json; the wrapper's when the tensors have its prefix."""
    model, stop = config.model, config.stop_token_ids
    dtype = {ours: theirs for theirs, ours in DTYPES.items()}[config.dtype]
    text: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": dtype}
    text |= {key: getattr(model, name) for name, key in {**INTEGERS, **FLOATS}.items()}
    text |= {
        "n_shared_experts": model.shared_experts,
        "num_key_value_heads": model.heads,
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": config.scoring,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "norm_topk_prob": config.norm_topk_prob,
        "rope_interleave": config.rope_interleave,
        "rope_theta": model.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "num_nextn_predict_layers": config.predict_layers,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None if not stop else stop[0] if len(stop) == 1 else list(stop),
        "use_cache": True,
    }
    if model.rope != unscaled_rope(model.rope.theta, model.max_position):
        text["rope_scaling"] = {"type": "yarn", **{key: getattr(model.rope, name) for name, key in ROPE.items()}}
    if config.latent_norm_eps != LATENT_NORM_EPS:
        text["latent_norm_eps"] = config.latent_norm_eps
    if model.quantization is not None:
        text["quantization_config"] = written_quantization(model.quantization)
    if not config.prefix:
        return text
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": WRAPPER_TYPE, "dtype": dtype, "text_config": text}
