"""What `kdgen decode` is pointed at: a bundle, a KDTR model, or a directory of Hugging Face; and the engine spec that fits it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdgen.engine.bundle import Golden, is_bundle, open_bundle
from kdgen.engine.checkpoint import Checkpoint, open_checkpoint
from kdgen.engine.config import ModelConfig
from kdgen.engine.engine import checked
from kdgen.errors import ArtifactError, KdgenError
from kdgen.render.data import data_dir
from kdgen.spec import Spec, load_spec

#: What other models' specs are derived from.
TEMPLATE = "tiny"


def open_model(path: Path) -> tuple[Checkpoint, Golden | None]:
    """A model's checkpoint, and of a bundle what must come out.

    Raises:
        ArtifactError: there is no such file, or it is damaged.
    """
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or directory; give a bundle, a KDTR model, or a directory with config.json")
    if is_bundle(path):
        bundle = open_bundle(path)
        return bundle.checkpoint, bundle.golden
    return open_checkpoint(path), None


def spec_for(config: ModelConfig, given: Path | None = None, overrides: tuple[str, ...] = ()) -> Spec:
    """The engine spec for a model: the given one, one of kdgen's that is for exactly this model, or the template's with its dimensions.

    Raises:
        SpecError: the given one is for another model, or the kernels cannot be cut for these dimensions.
    """
    if given is not None:
        return load_spec(given, overrides)
    directory = data_dir() / "specs" / "engines"
    for path in sorted(directory.glob("*.yaml")):
        try:
            spec = load_spec(path, overrides)
            engine = checked(spec, config)
        except KdgenError:
            continue
        if engine.types.weights == config.dtype and engine.ranks == 1:
            return spec
    return derived_spec(config, directory / f"{TEMPLATE}.yaml", overrides)


def derived_spec(config: ModelConfig, template: Path, overrides: tuple[str, ...] = ()) -> Spec:
    """The template with a model's dimensions, named after them."""
    values: dict[str, Any] = {
        f"model.{name}": value for name, value in config.model.model_dump().items() if name not in ("rope", "quantization")
    }
    values |= {f"model.rope.{name}": value for name, value in config.model.rope.model_dump().items()}
    experts = "int4" if config.model.quantization else config.dtype
    values |= {"types.activations": config.dtype, "types.weights": config.dtype, "types.experts": experts}
    values |= {
        "moe_route.n_group": config.n_group, "moe_route.topk_group": config.topk_group, "moe_route.normalise": config.norm_topk_prob,
        "moe_route.scoring": config.scoring, "q_norm.eps": config.latent_norm_eps, "mla_prepare.eps": config.latent_norm_eps,
        "draft.mask_token": config.model.vocab - 1, "draft.target_layers": [0],
    }  # fmt: skip
    texts = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    if config.model.quantization is None:
        texts.append("model.quantization=null")
    spec = load_spec(template, (*texts, *overrides))
    mark = hashlib.sha256("\n".join((*texts, *overrides)).encode()).hexdigest()[:10]
    return replace(spec, name=f"{spec.name}-{mark}")
