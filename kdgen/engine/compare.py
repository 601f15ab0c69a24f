"""A prompt's forward beside the numpy engine's, stage by stage: where a difference begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.engine.checkpoint import Checkpoint
from kdgen.engine.engine import Engine
from kdgen.engine.forward import Stage
from kdgen.engine.reference import Reference
from kdgen.expressions import ceil_div

Values = npt.NDArray[Any]

#: Largest difference of a stage, relative to its largest value, by type of the activations.
BOUNDS = {"f32": 2e-5, "bf16": 3e-2}


@dataclass
class Comparison:
    """What was found.

    Attributes:
        lines: one per compared stage, in order.
        departs: layer and stage of the first difference beyond the bound, or None.
    """

    lines: list[str] = field(default_factory=list)
    departs: tuple[int | None, str] | None = None


def compare_stages(engine: Engine, checkpoint: Checkpoint, prompt: Sequence[int]) -> Comparison:
    """Run the last chunk of a prompt on both and compare every stage that both have.

    Args:
        engine: its observer is replaced for the time of the run.
        checkpoint: the same model's.
        prompt: token ids; what lies before its last chunk is run, not compared.
    """
    wide = engine.spec.types.activations == "f32"
    want: dict[tuple[int | None, str], Values] = {}
    reference = Reference(
        checkpoint,
        rounding="none" if wide else "bf16",
        latent_attention=True,
        on_stage=lambda layer, stage, values: want.__setitem__((layer, stage), np.array(values)),
    )
    cache = reference.new_cache()
    most = engine.chunk_rows
    for start in range(0, len(prompt), most):
        want.clear()
        reference.forward(prompt[start : start + most], cache)
    rows = len(prompt) - (len(prompt) - 1) // most * most
    got: dict[tuple[int | None, str], Values] = {}

    def observe(stage: Stage) -> None:
        for name, take in VIEWS.get(stage.name, {}).items():
            layer = stage.layer
            if name == "output":  # of the layer before, known once the next norm has added it
                layer = engine.config.model.layers - 1 if layer is None else layer - 1
            if layer is None or layer >= 0:
                values = np.array(take(engine, stage))  # the host gives its memory itself, which later stages overwrite
                got[layer, name] = values[-rows:] if len(values) >= rows else values

    held, before = engine.pool.take(ceil_div(len(prompt), engine.spec.cache.page_size)), engine.observer
    try:
        engine.observer = observe
        engine.read_prompt(prompt, held)
    finally:
        engine.observer = before
        engine.pool.give(held)
    return _compared(want, got, BOUNDS["f32" if wide else "bf16"])


def _compared(want: dict[tuple[int | None, str], Values], got: dict[tuple[int | None, str], Values], bound: float) -> Comparison:
    found = Comparison()
    for (layer, name), expected in want.items():
        if (layer, name) not in got:
            continue
        have = got[layer, name].astype(np.float64)
        wanted = expected[-len(have) :].reshape(have.shape)
        if name == "router_ids":
            error, limit = float((have != wanted).sum()), 0.0
        else:
            error, limit = float(np.abs(have - wanted).max() / max(1e-30, float(np.abs(wanted).max()))), bound
        beyond = not error <= limit
        if beyond and found.departs is None:
            found.departs = (layer, name)
        where = "" if layer is None else f"layer {layer} "
        found.lines.append(f"{'DEPARTS' if beyond else 'equal  '} {where}{name}: {error:.1e}, bound {limit:.0e}")
    return found


def _result(name: str = "out") -> Callable[[Engine, Stage], Values]:
    return lambda engine, stage: stage.results[name].numpy()


def _columns(first: str | int, last: str | int) -> Callable[[Engine, Stage], Values]:
    """Some columns of `out`; bounds are numbers or names of the model's dimensions."""

    def take(engine: Engine, stage: Stage) -> Values:
        low, high = (getattr(engine.config.model, item) if isinstance(item, str) else item for item in (first, last))
        return stage.results["out"].numpy()[..., low:high]

    return take


def _head_part(engine: Engine, stage: Stage) -> Values:
    model = engine.config.model
    return stage.results["q"].numpy()[..., model.kv_lora_rank :]


#: Stage of a forward to the stages of the numpy engine that it computes, and how they are read from what it wrote.
VIEWS: dict[str, dict[str, Callable[[Engine, Stage], Values]]] = {
    "embed": {"embed": _result()},
    "input_norm": {"input_norm": _result(), "output": lambda engine, stage: stage.results["residual" if stage.layer else "out"].numpy()},
    "qkv_a": {"q_a": _columns(0, "q_lora_rank")},
    "q_norm": {"q_norm": _result()},
    "absorb": {"query_latent": _columns(0, "kv_lora_rank")},
    "mla_prepare": {"rope_query": _head_part},
    "tree_attention": {"attention_latent": _result()},
    "value_up": {"attention": _result()},
    "o": {"residual": _result()},
    "post_norm": {"post_norm": _result()},
    "dense_gate_up": {"dense_gate_up": _result()},
    "dense_down": {"dense": _result()},
    "moe_route": {"router_ids": _result("topk_ids"), "router_weights": _result("topk_weights")},
    "moe_gate_up": {"gate_up": _result()},
    "moe_down": {"experts": _result()},
    "shared_gate_up": {"shared_gate_up": _result()},
    "shared_down": {"shared": _result()},
    "moe_combine": {"moe": _result()},
    "final_norm": {"final_norm": _result(), "output": _result("residual")},
    "head": {"logits": _result()},
}
