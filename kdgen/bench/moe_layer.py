"""The routed experts of one layer as one chain of launches: gate-up, down, combine; also the whole layer: router, plan, shared expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdgen.dtypes import numpy_dtype
from kdgen.kernels import gemm, moe_combine, moe_gemm, moe_plan, moe_route
from kdgen.runtime import Kernel
from kdgen.runtime.device import Device
from kdgen.spec import KernelSpec, Spec

#: Kernels of the shared expert by name. They stand between the plan and the experts, whose kernels may read the plan early.
SHARED = ("shared_gate_up", "shared_down")

#: Launch sizes, as far as the kernels take them.
ROWS = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Chain:
    """Calls to be launched one after another.

    Attributes:
        name: what the chain is.
        workload: its size.
        turns: one list of calls per routing; they share weights, results and workspaces.
        moved_bytes, flops: of a turn, in the mean.
    """

    name: str
    workload: str
    turns: list[Turn]
    moved_bytes: int
    flops: int


class Turn:
    """Several bound calls that are launched as if they were one."""

    def __init__(self, *calls: Any):
        self.calls = calls

    def launch(self, stream: Any) -> None:
        """Launch all of them on `stream`."""
        for call in self.calls:
            call.launch(stream)


class MoeLayer:
    """The kernels of a spec that make up the layer.

    Attributes:
        parts: role (`gate_up`, `down`, `combine`, `plan`, `route`, `shared_gate_up`, `shared_down`) to the spec's kernel.
    """

    def __init__(self, parts: Mapping[str, KernelSpec]):
        self.parts = parts
        self._shared: dict[str, Any] = {}
        self._gate: dict[str, Any] = {}

    @classmethod
    def of(cls, spec: Spec) -> MoeLayer | None:
        """The layer of a spec, or None when it has no such kernels; the first of each role counts."""
        parts: dict[str, KernelSpec] = {}
        families = {"moe_combine": "combine", "moe_plan": "plan", "moe_route": "route"}
        for kernel in spec.kernels:
            role = kernel.params.role if isinstance(kernel.params, moe_gemm.Params) else families.get(kernel.family.name)
            if kernel.name in SHARED:
                role = kernel.name
            if role:
                parts.setdefault(role, kernel)
        if len(set(SHARED) & set(parts)) == 1:
            parts = {role: kernel for role, kernel in parts.items() if role not in SHARED}
        return cls(parts) if {"gate_up", "down", "combine"} <= set(parts) else None

    @property
    def whole(self) -> str:
        """Name of the chain with what comes before the experts."""
        others = [name for name, part in (("route", "route"), ("plan", "plan"), ("shared expert", SHARED[0])) if part in self.parts]
        return f"moe layer with {', '.join(others)}"

    @property
    def chain_names(self) -> tuple[str, ...]:
        """Names of the chains that are made: the whole one only where the plan may precede the experts as it does in it."""
        up = self.parts["gate_up"].params
        assert isinstance(up, moe_gemm.Params)
        made = "plan" in self.parts and (SHARED[0] in self.parts or not up.early)
        return ("moe layer", self.whole) if made else ("moe layer",)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Launch sizes that every kernel takes."""
        most = min(kernel.params.model_dump()["rows"] for kernel in self.parts.values())
        return tuple(rows for rows in ROWS if rows <= most)

    def names(self) -> list[tuple[str, str]]:
        """Name and workload of every chain."""
        return [(name, f"T = {rows}") for name in self.chain_names for rows in self.sizes]

    def chains(self, kit: Mapping[str, Kernel], device: Device, rng: np.random.Generator) -> Iterator[Chain]:
        """The layer without and with routing and plan, for every launch size. Rows are routed evenly, anew for every turn."""
        up, down, combine = (self.parts[role].params for role in ("gate_up", "down", "combine"))
        assert isinstance(up, moe_gemm.Params)
        assert isinstance(down, moe_gemm.Params)
        assert isinstance(combine, moe_combine.Params)
        weights = {}
        for role, p in (("gate_up", up), ("down", down)):
            few = moe_gemm.random_weights(p, rng, min(p.experts, 8))
            weights[role] = device.array(np.concatenate([few] * -(-p.experts // len(few)))[: p.experts])
        for rows in self.sizes:
            x = device.array(rng.normal(size=(rows, up.k)).astype(numpy_dtype(up.x_dtype)))
            middle = device.array(np.zeros((rows, up.top_k, up.n), numpy_dtype(up.out_dtype)))
            results = device.array(np.zeros((rows, down.top_k, down.n), numpy_dtype(down.out_dtype)))
            added = moe_combine.random_inputs(combine, rng, rows)
            extras: dict[str, Any] = {name: device.array(added[name]) for name in combine.extras}
            out: dict[str, Any] = dict(kit[self.parts["combine"].name].allocate(T=rows))
            plain, whole, active = [], [], 0
            for _ in range(moe_gemm.TURNS):
                ids = moe_gemm.random_choices(up, rng, rows, up.experts)
                active += len(np.unique(ids))
                plan: dict[str, Any] = {name: device.array(value) for name, value in moe_gemm.planned(up, ids, up.experts).items()}
                topk: dict[str, Any] = {"topk_ids": device.array(ids), "topk_weights": device.array(added["topk_weights"])}
                calls = (
                    kit[self.parts["gate_up"].name].bind(x=x, w=weights["gate_up"], out=middle, **plan),
                    kit[self.parts["down"].name].bind(x=middle, w=weights["down"], out=results, **plan),
                    kit[self.parts["combine"].name].bind(y=results, **topk, **extras, **out),
                )
                plain.append(Turn(*calls))
                whole.append(Turn(*self._before(kit, device, rng, rows, x, topk, plan), *calls))
            a_turn = active // moe_gemm.TURNS
            moved = a_turn * int(weights["gate_up"].nbytes + weights["down"].nbytes) // up.experts
            flops = 2 * rows * up.top_k * (up.weight_rows * up.k + down.weight_rows * down.k)
            yield Chain("moe layer", f"T = {rows}", plain, moved, flops)
            if self.whole in self.chain_names:
                yield Chain(self.whole, f"T = {rows}", whole, moved, flops)

    def _before(
        self, kit: Mapping[str, Kernel], device: Device, rng: np.random.Generator, rows: int, x: Any, topk: Any, plan: Any
    ) -> list[Any]:
        """Router and plan. The router's choices are not used: the experts' weights would decide them, which are random here."""
        calls: list[Any] = []
        if "route" in self.parts:
            p, kernel = self.parts["route"].params, kit[self.parts["route"].name]
            assert isinstance(p, moe_route.Params)
            if not self._gate:
                self._gate = {"w_gate": device.array(rng.normal(size=(p.experts, p.hidden)).astype(numpy_dtype(p.gate_dtype)))}
                if p.bias:
                    self._gate["bias"] = device.array(np.zeros(p.experts, np.float32))
            outputs: dict[str, Any] = dict(kernel.allocate(T=rows))
            calls.append(kernel.bind(x=x, **self._gate, **outputs))
        if "plan" in self.parts:
            p, kernel = self.parts["plan"].params, kit[self.parts["plan"].name]
            assert isinstance(p, moe_plan.Params)
            rest: dict[str, Any] = {name: value for name, value in kernel.allocate(T=rows).items() if name not in plan}
            calls.append(kernel.bind(topk_ids=topk["topk_ids"], **plan, **rest))
        middle = x
        for name in SHARED if SHARED[0] in self.parts else ():
            if name not in self._shared:
                gemm_params = self.parts[name].params
                assert isinstance(gemm_params, gemm.Params)
                self._shared[name] = device.array(gemm.random_weights(gemm_params, rng))
            complete = kit[self.parts[name].name].complete(x=middle, w=self._shared[name])
            calls.append(kit[self.parts[name].name].bind(**complete))
            middle = complete["out"]
        return calls
