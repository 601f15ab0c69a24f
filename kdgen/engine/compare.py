"""A prompt's forward beside the numpy engine's, stage by stage: where a difference begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
#: Scores of experts that are no further apart may come in another order.
TIES = {"f32": 2e-5, "bf16": 2e-2}


@dataclass(frozen=True)
class StageDifference:
    """How far a stage is from the numpy engine's.

    Attributes:
        layer: None before the first and behind the last.
        stage: name of the numpy engine's stage.
        error: largest difference, relative to the largest value; of the router's choices how many differ. NaN where one side has NaN.
        bound: largest error that roundoff explains.
        until: of the router's choices, the first row that chose another expert of nearly the same score. It and all rows behind it, which
            may attend to it, are not compared further. None without such a row.
    """

    layer: int | None
    stage: str
    error: float
    bound: float
    until: int | None = None

    @property
    def departs(self) -> bool:
        """Whether it is beyond the bound."""
        return not self.error <= self.bound

    @property
    def where(self) -> str:
        """Layer and stage."""
        return self.stage if self.layer is None else f"layer {self.layer} {self.stage}"

    def __str__(self) -> str:
        line = f"{'DEPARTS' if self.departs else 'equal  '} {self.where}: {self.error:.1e}, bound {self.bound:.0e}"
        if self.until is None:
            return line
        return (
            f"{line}; row {self.until} chose another expert of nearly the same score, and is compared no further, nor are those behind it"
        )


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        stages: that both engines have, in order.
    """

    stages: tuple[StageDifference, ...]

    @property
    def departs(self) -> StageDifference | None:
        """The first one beyond its bound."""
        return next((stage for stage in self.stages if stage.departs), None)


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
    return _compared(want, got, checkpoint, "f32" if wide else "bf16")


def _compared(
    want: dict[tuple[int | None, str], Values], got: dict[tuple[int | None, str], Values], checkpoint: Checkpoint, dtype: str
) -> Comparison:
    found = []
    compared = rows = len(want[None, "embed"])
    for (layer, name), expected in want.items():
        if (layer, name) not in got:
            continue
        have = got[layer, name].astype(np.float64)
        wanted = expected[-len(have) :].reshape(have.shape)
        keep = max(0, len(have) - (rows - compared))  # of the logits there is the last row alone
        if not keep:
            continue
        have, wanted = have[:keep], wanted[:keep]
        if name == "router_ids" and layer is not None:
            wrong, until = _choices(have, wanted, _scores(want[layer, "router_logits"][:keep], checkpoint, layer), TIES[dtype])
            found.append(StageDifference(layer, name, float(wrong), 0.0, until))
            compared = compared if until is None else until
            continue
        if name in _PER_CHOICE:
            have, wanted = (
                np.take_along_axis(values, _order(source[layer, "router_ids"][:keep], values.ndim), axis=1)
                for values, source in ((have, got), (wanted, want))
            )
        error = float(np.abs(have - wanted).max() / max(1e-30, float(np.abs(wanted).max())))
        found.append(StageDifference(layer, name, error, BOUNDS[dtype]))
    return Comparison(tuple(found))


#: Stages `[rows, choices, …]`, which are compared expert by expert: choices of nearly the same score may come in another order.
_PER_CHOICE = ("router_weights", "gate_up", "experts")


def _order(ids: Values, dimensions: int) -> Values:
    order: Values = np.argsort(ids, axis=1)
    return order.reshape(*order.shape, *[1] * (dimensions - 2))


def _scores(logits: Values, checkpoint: Checkpoint, layer: int) -> Values:
    """What the router chooses by: scores with the bias."""
    if checkpoint.config.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = powers / powers.sum(axis=1, keepdims=True)
    biased: Values = scores + checkpoint.tensor(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").astype(np.float64)
    return biased


def _choices(have: Values, wanted: Values, scores: Values, tie: float) -> tuple[int, int | None]:
    """How many rows chose other experts without need, and the first row that did so in a near tie."""
    wrong, until = 0, None
    for row, (mine, theirs) in enumerate(zip(have.astype(int), wanted.astype(int), strict=True)):
        if other := sorted(set(mine.tolist()) ^ set(theirs.tolist())):
            if float(np.ptp(scores[row, other])) > tie:
                wrong += 1
            elif until is None:
                until = row
    return wrong, until


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
