"""A rank's whole forward, with random weights and a random tree behind a context: its time, its bytes, and where the rest goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdgen.bench.measure import Timing, time_calls
from kdgen.dtypes import numpy_dtype
from kdgen.engine.forward import Forward, Rows, Stage
from kdgen.engine.weights import ModelWeights
from kdgen.errors import UsageError
from kdgen.expressions import ceil_div
from kdgen.kernels import attention_plan, moe_gemm, tree_attention
from kdgen.rope import rope_table
from kdgen.runtime import Kernel
from kdgen.runtime.array import Array
from kdgen.runtime.device import Device
from kdgen.spec import Spec
from kdgen.spec.model import EngineSpec

#: Kernel and argument of every weight of a layer.
PLACES = {
    "input_norm": ("norm", "weight"), "post_norm": ("norm", "weight"), "q_norm": ("q_norm", "weight"),
    "kv_norm": ("mla_prepare", "kv_norm"), "qkv_a": ("qkv_a", "w"), "q_b": ("q_b", "w"), "absorb": ("absorb", "w"),
    "value_up": ("value_up", "w"), "o": ("o", "w"),
}  # fmt: skip
DENSE = {"dense_gate_up": ("dense_gate_up", "w"), "dense_down": ("dense_down", "w")}
EXPERTS = {
    "gate": ("moe_route", "w_gate"), "gate_bias": ("moe_route", "bias"), "experts_gate_up": ("moe_gate_up", "w"),
    "experts_down": ("moe_down", "w"), "shared_gate_up": ("shared_gate_up", "w"), "shared_down": ("shared_down", "w"),
}  # fmt: skip


#: Largest tree of a step.
MOST_ROWS = 256


@dataclass(frozen=True)
class Step:
    """One measured launch size.

    Attributes:
        rows, context: T, and the tokens before the tree.
        timing: of the whole forward in one graph; microseconds.
        moved_bytes: that must be read: weights of all experts that some row chose, keys, and everything else once.
        experts: distinct experts of a layer, in the mean.
        parts: kernel to microseconds of all its launches in a graph of their own, with their caches as cold as in the step.
    """

    rows: int
    context: int
    timing: Timing
    moved_bytes: int
    experts: float
    parts: dict[str, float]


class StepBench:
    """A rank's forward at the shapes of an engine spec.

    Args:
        kit: the spec's kernels.
        spec: an engine spec.
        device: a GPU with room for a rank's weights.
        context: tokens before the tree.
        rng: of weights and trees.
    """

    def __init__(self, kit: Mapping[str, Kernel], spec: Spec, device: Device, context: int, rng: np.random.Generator):
        if spec.engine is None:
            raise UsageError(f"{spec.path}: a kernel spec; a step is of an engine spec")
        self.kit, self.spec, self.device, self.context, self.rng = kit, spec, device, context, rng
        self.engine: EngineSpec = spec.engine
        self.params = {kernel.name: kernel.params for kernel in spec.kernels}
        model, page = self.engine.model, self.engine.cache.page_size
        if context + MOST_ROWS > model.max_position:
            raise UsageError(f"context {context}: the model has {model.max_position} positions, of which a step needs up to {MOST_ROWS}")
        if missing := sorted({"attention_plan", "tree_attention", "moe_plan"} - set(self.params)):
            raise UsageError(f"{spec.path}: a step needs the kernels of a forward; {', '.join(missing)} is missing")
        self.weights = self._weights()
        self.pages = ceil_div(context + MOST_ROWS, page)
        values = rng.standard_normal((self.pages, page, model.kv_lora_rank + model.qk_rope_head_dim), np.float32)
        layer = device.array(values.astype(numpy_dtype(self.engine.cache.dtype)))
        self.cache = device.empty((model.layers, *values.shape), numpy_dtype(self.engine.cache.dtype))
        for number in range(model.layers):
            self.cache[number].copy_from(layer)

    def _shape(self, kernel: str, name: str) -> tuple[tuple[int, ...], str]:
        argument = self.kit[kernel].contract.argument(name)
        sizes = {"E": self.engine.model.experts, "V": self.engine.model.vocab // self.engine.ranks}
        return tuple(sizes[size] if isinstance(size, str) else size for size in argument.shape), argument.dtype

    def _random(self, kernel: str, name: str) -> Array:
        shape, dtype = self._shape(kernel, name)
        params = self.params[kernel]
        if isinstance(params, moe_gemm.Params):
            few = moe_gemm.random_weights(params, self.rng, min(params.experts, 8))
            return self.device.array(np.concatenate([few] * ceil_div(shape[0], len(few)))[: shape[0]])
        if len(shape) == 1:
            return self.device.array((np.ones(shape) if name != "bias" else self.rng.normal(size=shape) * 0.1).astype(numpy_dtype(dtype)))
        # A few thousand different rows do: memory does not know. Embeddings are large, so that rows stay as different as their tokens:
        # layers that are all alike would soon turn every row into the same one, which chooses the same experts.
        size = 1e3 if kernel == "embed" else 1 / np.sqrt(shape[-1])
        rows = self.rng.standard_normal((min(2048, int(np.prod(shape[:-1]))), shape[-1]), np.float32) * np.float32(size)
        whole = np.resize(rows.astype(numpy_dtype(dtype)), shape)
        return self.device.array(whole)

    def _weights(self) -> ModelWeights:
        model = self.engine.model
        cosines, sines = rope_table(model.rope, model.qk_rope_head_dim, self.context + 1024)
        weights = ModelWeights(
            self._random("embed", "table"), self._random("head", "w"), self._random("norm", "weight"),
            self.device.array(cosines), self.device.array(sines),
        )  # fmt: skip
        made: dict[str, Array] = {}
        for layer in range(model.layers):
            arrays: dict[str, Array] = {}
            places = {**PLACES, **(DENSE if layer < model.dense_layers else EXPERTS)}
            for name, place in places.items():
                if name.startswith("shared") and not model.shared_experts:
                    continue
                if name not in made or name == "gate":
                    made[name] = arrays[name] = self._random(*place)
                else:
                    arrays[name] = self.device.empty(made[name].shape, numpy_dtype(made[name].dtype))
                    arrays[name].copy_from(made[name])
            weights.layers.append(arrays)
        return weights

    def steps(self, sizes: tuple[int, ...], launches: int, replays: int) -> Iterator[Step]:
        """Time a forward of each size."""
        for rows in sizes:
            forward = self._forward(rows)
            distinct: list[int] = []
            for stage in forward.stages:
                stage.call.launch(None)
                if stage.name == "moe_plan":
                    distinct.append(int(stage.results["active_count"].numpy()[0]))
            timing = time_calls(self.device, [forward], launches, replays)
            yield Step(rows, self.context, timing, self._moved(rows, distinct), float(np.mean(distinct)), self._parts(forward, replays))

    def _forward(self, rows: int) -> Forward:
        plan_params, attention = self.params["attention_plan"], self.params["tree_attention"]
        assert isinstance(plan_params, attention_plan.Params)
        assert isinstance(attention, tree_attention.Params)
        inputs = attention_plan.random_rows(plan_params, self.rng, [(self.context, rows, False)])
        depths = inputs["row_depths"]
        width = self._table_width
        table = np.zeros((1, width), np.int32)
        table[0, : self.pages] = self.rng.permutation(self.pages)

        def placed(values: Any) -> Array:
            return self.device.array(np.ascontiguousarray(values))

        ids = self.rng.integers(0, self.engine.model.vocab // self.engine.ranks, rows)
        described = Rows(
            ids=placed(ids.astype(np.int32)),
            positions=placed((self.context + depths).astype(np.int32)),
            slots=placed((self.context + np.arange(rows)).astype(np.int32)),
            sequences=placed(inputs["row_sequences"]),
            depths=placed(depths),
            paths=placed(inputs["row_paths"]),
            starts=placed(inputs["starts"]),
            page_tables=placed(table),
        )
        return Forward(self.kit, self.engine, self.weights, self.cache, described)

    @property
    def _table_width(self) -> int:
        return self.kit["mla_prepare"].contract.extent("page_tables", 1)

    def _moved(self, rows: int, distinct: list[int]) -> int:
        """Bytes of a step: each layer's weights and keys, chosen experts only."""
        model, total = self.engine.model, self.weights.head.nbytes
        chosen = iter(distinct)
        for layer in self.weights.layers:
            experts = [layer[name] for name in ("experts_gate_up", "experts_down") if name in layer]
            total += sum(array.nbytes for array in layer.values()) - sum(array.nbytes for array in experts)
            if experts:
                total += next(chosen) * sum(array.nbytes for array in experts) // model.experts
        return total + model.layers * (self.context + rows) * self.cache.nbytes // (model.layers * self.pages * self.engine.cache.page_size)

    def _parts(self, forward: Forward, replays: int) -> dict[str, float]:
        """Microseconds of each kernel's launches in all layers, one kernel at a time."""
        groups: dict[str, list[Stage]] = {}
        for stage in forward.stages:
            groups.setdefault(stage.name, []).append(stage)
        return {name: time_calls(self.device, [_Group(stages)], 1, replays).median for name, stages in groups.items()}


class _Group:
    """Launches of one kernel as one."""

    def __init__(self, stages: list[Stage]):
        self.stages = stages

    def launch(self, stream: Any) -> None:
        """Launch all of them on `stream`."""
        for stage in self.stages:
            stage.call.launch(stream)
