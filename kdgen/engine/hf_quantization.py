"""The key `quantization_config` of `compressed-tensors`: 4-bit integers in groups of 32, of exactly the routed experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kdgen.engine.hf_section import REQUIRED, Section
from kdgen.spec.model import Quantization

#: Linear layers that stay as they are in a quantized checkpoint.
IGNORE = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")


def check_quantization(section: Section, dimensions: Mapping[str, Any], prefix: str) -> None:
    """Record what is wrong with a `quantization_config`.

    Args:
        section: the object.
        dimensions: those of `Model` that are known.
        prefix: of the names of modules, which rules may have or leave out.
    """
    if section.get("quant_method", REQUIRED) != "compressed-tensors":
        section.only("quant_method", "compressed-tensors")
        return  # the other keys mean something else
    section.only("format", "pack-quantized")
    section.only("kv_cache_scheme", None, default=None)
    for key in ("sparsity_config", "moe_sparsity_config", "transform_config"):
        section.only(key, None, {}, default=None)
    for key in ("quantization_status", "global_compression_ratio", "version"):
        section.get(key)
    ignore = section.get("ignore", [])
    if not isinstance(ignore, list) or not all(isinstance(one, str) for one in ignore):
        section.fault("ignore", "must be a list of names and `re:` patterns")
        ignore = None
    groups = section.get("config_groups", REQUIRED)
    section.finish()
    if not isinstance(groups, Mapping) or len(groups) != 1:
        if groups is not None:
            section.fault("config_groups", "must have exactly one group")
        return
    name = next(iter(groups))
    group = Section(groups[name], section.where, f"{section.path}.config_groups.{name}", section.faults)
    group.only("format", None, "pack-quantized", default=None)
    group.only("input_activations", None, default=None)
    group.only("output_activations", None, default=None)
    targets = group.get("targets", REQUIRED)
    if targets is not None and (not isinstance(targets, list) or not all(isinstance(one, str) for one in targets)):
        group.fault("targets", "must be a list of names and `re:` patterns")
        targets = None
    weights = Section(group.get("weights", REQUIRED) or {}, section.where, f"{group.path}.weights", section.faults)
    group.finish()
    weights.only("num_bits", 4)
    weights.only("type", "int")
    weights.only("strategy", "group")
    weights.only("group_size", 32)
    weights.only("symmetric", True)
    weights.only("dynamic", False, default=False)
    weights.only("actorder", None, default=None)
    weights.only("block_structure", None, default=None)
    weights.only("zp_dtype", None, default=None)
    weights.only("scale_dtype", None, "bfloat16", "torch.bfloat16", default=None)
    for key in ("observer", "observer_kwargs"):
        weights.get(key)
    weights.finish()
    if ignore is not None and targets is not None:
        _quantized_are_experts(section, dimensions, prefix, targets, ignore)


def _quantized_are_experts(section: Section, dimensions: Mapping[str, Any], prefix: str, targets: list[str], ignore: list[str]) -> None:
    """The rules must choose all routed experts' matrices and no others. Of the experts, the first and the last stand for all."""
    if not {"layers", "dense_layers", "experts", "shared_experts"} <= dimensions.keys():
        return

    patterns: dict[str, re.Pattern[str]] = {}
    for rule in {*targets, *ignore}:
        try:
            if rule.startswith("re:"):
                patterns[rule] = re.compile(rule[3:])
        except re.error as error:
            section.fault("ignore" if rule in ignore else "config_groups", f"'{rule}' is no regular expression: {error}")
            return

    def chosen(rules: list[str], name: str) -> bool:
        for rule in rules:
            for candidate in {name, prefix + name}:
                if rule == "Linear" or (patterns[rule].match(candidate) if rule in patterns else rule == candidate):
                    return True
        return False

    def wrong(names: Iterable[str], wanted: bool) -> list[str]:
        return [name for name in names if (chosen(targets, name) and not chosen(ignore, name)) != wanted]

    plain, routed = ["lm_head"], []
    matrices = ("gate_proj", "up_proj", "down_proj")
    for layer in range(min(dimensions["layers"], 1024)):
        name = f"model.layers.{layer}"
        plain += [f"{name}.self_attn.{part}" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
        if layer < dimensions["dense_layers"]:
            plain += [f"{name}.mlp.{part}" for part in matrices]
            continue
        if dimensions["shared_experts"]:
            plain += [f"{name}.mlp.shared_experts.{part}" for part in matrices]
        routed += [f"{name}.mlp.experts.{e}.{part}" for e in (0, dimensions["experts"] - 1) for part in matrices]
    if found := wrong(plain, False):
        section.fault("ignore", f"leaves {found[0]} quantized (and {len(found) - 1} more); allowed: only the routed experts")
    if found := wrong(routed, True):
        section.fault("ignore", f"leaves {found[0]} unquantized (and {len(found) - 1} more); all routed experts must be quantized")


def written_quantization(quantization: Quantization) -> dict[str, Any]:
    """The object for a config.json."""
    weights = {
        "num_bits": quantization.bits, "type": "int", "strategy": "group", "group_size": quantization.group, "symmetric": True,
        "dynamic": False, "actorder": None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(IGNORE),
    }
