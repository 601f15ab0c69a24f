"""What `kdgen decode` is pointed at: a bundle, a KDTR model, or a directory of Hugging Face; and the engine spec that fits it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdgen.engine.bundle import Golden, check_types, is_bundle, open_bundle
from kdgen.engine.checkpoint import Checkpoint, open_checkpoint
from kdgen.engine.config import ModelConfig
from kdgen.engine.engine import checked
from kdgen.errors import ArtifactError, Fault, KdgenError, SpecError, UsageError
from kdgen.expressions import ceil_div
from kdgen.render.data import data_dir
from kdgen.spec import Spec, load_spec

#: What other models' specs are derived from.
TEMPLATE = "tiny"
#: Values that an expert's product takes at a time, and most steps of a part: longer sums are cut into parts.
EXPERT_STEP, EXPERT_STEPS = 64, 16


@dataclass(frozen=True)
class Opened:
    """A model to decode with.

    Attributes:
        checkpoint: open; close it after use.
        golden: of a bundle, what must come out.
        spec: of a bundle, the name of the engine spec it was made from.
        activations: of a bundle, the type for which the golden results are.
    """

    checkpoint: Checkpoint
    golden: Golden | None = None
    spec: str = ""
    activations: str = ""


def open_model(path: str | Path) -> Opened:
    """A model's checkpoint, and of a bundle what must come out.

    Raises:
        ArtifactError: there is no such file, or it is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise ArtifactError(f"{path}: no such file or directory; give a bundle, a KDTR model, or a directory with config.json")
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(f"{path}: a spec, not a model; make a model of it with: kdgen bundle {path} -o FILE, or give it with --spec")
    if is_bundle(path):
        bundle = open_bundle(path)
        return Opened(bundle.checkpoint, bundle.golden, bundle.spec, bundle.activations)
    return Opened(open_checkpoint(path))


def spec_for(
    config: ModelConfig, given: Path | None = None, overrides: tuple[str, ...] = (), *, name: str = "", activations: str = ""
) -> Spec:
    """The engine spec for a model: the given one, one of kdgen's that is for exactly this model, or the template's with its dimensions.

    Args:
        config: the model's.
        given: a spec that the caller wants.
        overrides: of any of them, `--set` by `--set`.
        name: of the spec to prefer among those that fit.
        activations: type that the spec must have; by default the weights'.

    Raises:
        SpecError: the given one is for another model, or the kernels cannot be cut for these dimensions: everything that is wrong.
    """
    activations = activations or config.dtype
    if given is not None:
        spec = load_spec(given, overrides)
        checked(spec, config)
        check_types(spec)
        return spec
    directory = data_dir() / "specs" / "engines"
    for path in sorted(directory.glob("*.yaml"), key=lambda path: (path.stem != name, path.stem)):
        try:
            spec = load_spec(path, overrides)
            engine = checked(spec, config)
            check_types(spec)
        except KdgenError:
            continue
        if engine.types.weights == config.dtype and engine.types.activations == activations and engine.ranks == 1:
            return spec
    return derived_spec(config, directory / f"{TEMPLATE}.yaml", overrides, activations=activations)


def derived_spec(config: ModelConfig, template: Path, overrides: tuple[str, ...] = (), *, activations: str = "") -> Spec:
    """The template with a model's dimensions, named after them; arguments and errors as of `spec_for`."""
    values: dict[str, Any] = {
        f"model.{name}": value for name, value in config.model.model_dump().items() if name not in ("rope", "quantization")
    }
    values |= {f"model.rope.{name}": value for name, value in config.model.rope.model_dump().items()}
    experts = "int4" if config.model.quantization else config.dtype
    values |= {"types.activations": activations or config.dtype, "types.weights": config.dtype, "types.experts": experts}
    values |= {
        "moe_route.n_group": config.n_group, "moe_route.topk_group": config.topk_group, "moe_route.normalise": config.norm_topk_prob,
        "moe_route.scoring": config.scoring, "q_norm.eps": config.latent_norm_eps, "mla_prepare.eps": config.latent_norm_eps,
        "draft.mask_token": config.model.vocab - 1, "draft.target_layers": [0],
    }  # fmt: skip
    for kernel, length in (("moe_gate_up", config.model.hidden), ("moe_down", config.model.moe_intermediate)):
        steps = ceil_div(length, EXPERT_STEP)
        values[f"{kernel}.parts"] = next(parts for parts in range(1, steps + 1) if steps % parts == 0 and steps // parts <= EXPERT_STEPS)
    if config.model.quantization is None:
        values["model.quantization"] = None
    else:
        values |= {f"model.quantization.{name}": value for name, value in config.model.quantization.model_dump().items()}
    texts = tuple(f"{name}={_yaml(value)}" for name, value in values.items())
    try:
        spec = load_spec(template, (*texts, *overrides))
    except SpecError as error:
        message = "no engine spec is for this model, and the kernels of this one cannot be cut for it; give another with --spec:"
        raise SpecError([Fault(str(template), 0, "", message), *error.faults]) from error
    check_types(spec)
    mark = hashlib.sha256("\n".join((*texts, *overrides)).encode()).hexdigest()[:10]
    return replace(spec, name=f"{spec.name}-{mark}")


def _yaml(value: Any) -> str:
    """A scalar or list as YAML 1.1 reads it: 1e-05 would be text there."""
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
