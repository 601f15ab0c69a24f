"""A model on a device that decodes: prompts in chunks, then rounds until every sequence has ended.

engine = Engine.open(load_spec("specs/engines/tiny.yaml"), checkpoint, open_device("host"))
(result,) = engine.generate([Request([1, 2, 3], max_tokens=20)], mode="tree", drafter=Ngram()).results
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.engine.checkpoint import Checkpoint
from kdgen.engine.config import ModelConfig
from kdgen.engine.draft import Drafter, Oracle
from kdgen.engine.forward import FORWARD_KERNELS, Forward, Rows, Stage
from kdgen.engine.pages import PagePool
from kdgen.engine.round import Round
from kdgen.engine.state import Request, State
from kdgen.engine.weights import ModelWeights, load_weights
from kdgen.errors import SpecError, UsageError
from kdgen.expressions import ceil_div
from kdgen.kernels.attention_plan import CONTIGUOUS
from kdgen.kernels.tree_build import path_bytes
from kdgen.runtime import Kernel, load
from kdgen.runtime.array import Array
from kdgen.runtime.device import Device
from kdgen.spec.model import EngineSpec
from kdgen.spec.spec import Spec

Mode = Literal["ar", "chain", "tree"]
Loop = Literal["host", "device"]
MODES: tuple[Mode, ...] = ("ar", "chain", "tree")

#: Largest chunk of a prompt, as far as the kernels take so many rows.
CHUNK = 512
#: Forwards for chunks that are kept: each has arrays of its own.
KEPT_CHUNKS = 2


@dataclass(frozen=True)
class Result:
    """One decoded sequence.

    Attributes:
        tokens: new ones, the stop token included.
        logits: f32 `[len(tokens), vocab]`: of the position before each token; None unless recorded.
        accepted: nodes accepted by each verification, the root included; in ascending order when the device ran the loop.
    """

    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32] | None
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """A decoded batch.

    Attributes:
        results: one per request.
        forwards: target forwards after the prompts'.
        prompt_forwards: forwards over chunks of prompts.
        prompt_seconds, decode_seconds: wall time of either.
    """

    results: tuple[Result, ...]
    forwards: int
    prompt_forwards: int
    prompt_seconds: float
    decode_seconds: float

    @property
    def acceptance_length(self) -> float:
        """Nodes accepted per verification, over all sequences; 0 without any. The last ones may lie behind a stop token."""
        accepted = [count for result in self.results for count in result.accepted]
        return float(np.mean(accepted)) if accepted else 0.0


class Engine:
    """Kernels, weights and cache of a model; made by `Engine.open`.

    Attributes:
        kit: kernels of the engine spec by name.
        spec: its engine part.
        config: the model's.
        weights: on the device.
        cache: `[layers, pages, page_size, width]`.
        pool: its free pages.
        context: positions that a sequence may have.
        observer: called after every kernel of a forward when set; the forward then runs kernel by kernel, without a graph.
    """

    def __init__(
        self,
        kit: Mapping[str, Kernel],
        spec: EngineSpec,
        config: ModelConfig,
        weights: ModelWeights,
        cache: Array,
        pool: PagePool,
        context: int,
    ):
        self.kit, self.spec, self.config, self.weights, self.cache, self.pool, self.context = (
            kit,
            spec,
            config,
            weights,
            cache,
            pool,
            context,
        )
        self.observer: Callable[[Stage], None] | None = None
        self._chunks: dict[int, tuple[Forward, Rows]] = {}

    @classmethod
    def open(
        cls,
        spec: Spec,
        checkpoint: Checkpoint,
        device: Device,
        *,
        out: Path = Path("generated"),
        context: int | None = None,
        pages: int | None = None,
        page_rng: np.random.Generator | None = None,
    ) -> Engine:
        """Build what is not built, load weights, make the cache.

        Args:
            spec: an engine spec whose model is the checkpoint's.
            checkpoint: an open one; it is not needed afterwards.
            device: where to run.
            out: the directory of built kernels.
            context: positions that a sequence may have; by default as many as the model has.
            pages: of the cache; by default enough for as many sequences of that length as the spec allows.
            page_rng: hands pages out in random order.

        Raises:
            SpecError: the spec is not of this model.
            ArtifactError: the weights cannot be what the spec wants.
        """
        from kdgen.build import build_spec
        from kdgen.targets import get_target
        from kdgen.verify.artifacts import is_current

        engine = checked(spec, checkpoint.config)
        target = get_target(device.target_names[0])
        directory = out / spec.name / target.name
        if not is_current(directory, spec, target):
            build_spec(spec, [target], out)
        kit = load(directory, device)
        for name, value in (("context", context), ("pages", pages)):
            if value is not None and value < 1:
                raise UsageError(f"{name} {value}: allowed are 1 or more")
        model, positions = engine.model, min(context or engine.model.max_position, engine.model.max_position)
        weights = load_weights(checkpoint, engine.types, device, positions)
        pages = pages or engine.cache.max_sequences * ceil_div(positions, engine.cache.page_size)
        width = model.kv_lora_rank + model.qk_rope_head_dim
        cache = device.empty((model.layers, pages, engine.cache.page_size, width), numpy_dtype(engine.cache.dtype))
        return cls(kit, engine, checkpoint.config, weights, cache, PagePool(pages, page_rng), positions)

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self.cache.device

    def generate(
        self,
        requests: Sequence[Request],
        *,
        mode: Mode = "tree",
        budget: int | None = None,
        drafter: Drafter | None = None,
        stop_tokens: Sequence[int] = (),
        record: bool = False,
        loop: Loop = "host",
        on_tokens: Callable[[int, Sequence[int]], None] | None = None,
    ) -> Generation:
        """Decode a batch greedily.

        Args:
            requests: sequences, decoded together.
            mode: one token a round, the drafter's best chain, or its tree; the tokens and every bit of the logits are the same.
            budget: nodes beside the root, of a tree or of a chain; by default what the spec says.
            drafter: what proposes tokens; not used by mode `ar`.
            stop_tokens: a sequence ends after any of these, which is kept.
            record: keep the logits; not with a device loop, which nobody stops between rounds.
            loop: `host`: the host launches every round, and looks at what it has decided; `device`: a GPU runs all rounds by itself, as
                one graph launch. The results are the same.
            on_tokens: called with the number of a sequence and its next tokens, as they come.

        Raises:
            UsageError: a request or option that cannot be served; nothing was done.
            CacheFullError: the cache has too few free pages; no page was taken.
        """
        nodes = self._check(requests, mode, budget, drafter, stop_tokens)
        if loop not in ("host", "device") or (loop == "device" and (record or self.observer)):
            raise UsageError(f"loop '{loop}': allowed are host, and device without recorded logits and observers")
        if isinstance(drafter, Oracle) and not drafter.truth and mode != "ar":
            plain = self.generate(requests, mode="ar", stop_tokens=stop_tokens)
            truth = tuple((*request.prompt, *result.tokens) for request, result in zip(requests, plain.results, strict=True))
            drafter = replace(drafter, truth=truth)
        held: list[list[int]] = []
        try:
            for request in requests:
                last = min(len(request.prompt) + request.max_tokens + nodes, self.context)
                held.append(self.pool.take(ceil_div(last, self.spec.cache.page_size)))
            return self._decode(requests, held, mode, nodes, drafter if mode != "ar" else None, stop_tokens, record, loop, on_tokens)
        finally:
            for pages in held:
                self.pool.give(pages)

    def _decode(
        self,
        requests: Sequence[Request],
        held: list[list[int]],
        mode: Mode,
        nodes: int,
        drafter: Drafter | None,
        stop_tokens: Sequence[int],
        record: bool,
        loop: Loop,
        on_tokens: Callable[[int, Sequence[int]], None] | None,
    ) -> Generation:
        state, began = self._state(len(requests)), time.perf_counter()
        tables = np.zeros(state.page_tables.shape, np.int32)
        for table, pages in zip(tables, held, strict=True):
            table[: len(pages)] = pages
        firsts = [self.read_prompt(request.prompt, pages) for request, pages in zip(requests, held, strict=True)]
        self._begin(state, requests, tables, [token for token, _, _ in firsts], nodes, stop_tokens)
        decode_began = time.perf_counter()
        builder = "tree_build" if mode == "tree" else "chain_build"
        step = Round(self.kit, self.spec, self.weights, self.cache, state, nodes, builder, drafter)
        logits = [[first] for _, first, _ in firsts]
        accepted: list[list[int]] = [[] for _ in requests]
        if loop == "device" and self.device.name != "host":
            forwards = self._run_alone(state, step, on_tokens)
            for counts, row in zip(accepted, state.acceptance.numpy(), strict=True):
                counts.extend(int(length) for length in np.repeat(np.arange(1, len(row) + 1), row))
        else:
            forwards = self._rounds(state, step, logits, accepted, record, on_tokens)
        tokens = [tuple(int(t) for t in row[:count]) for row, count in zip(state.new_tokens.numpy(), state.new_counts.numpy(), strict=True)]
        results = tuple(
            Result(new, np.stack(rows)[: len(new)] if record else None, tuple(counts))
            for new, rows, counts in zip(tokens, logits, accepted, strict=True)
        )
        ended = time.perf_counter()
        return Generation(results, forwards, sum(chunks for _, _, chunks in firsts), decode_began - began, ended - decode_began)

    def _rounds(
        self,
        state: State,
        step: Round,
        logits: list[list[Any]],
        accepted: list[list[int]],
        record: bool,
        on_tokens: Callable[[int, Sequence[int]], None] | None,
    ) -> int:
        """Rounds until no sequence is active; returns how many."""
        stream = self.device.stream()
        graph = None
        if self.observer is None and self.device.name != "host":
            with self.device.capture(stream) as graph:
                step.launch(stream)
        count, active, told = 0, state.active.numpy().copy(), [0] * state.sequences
        while active.any():
            if graph is not None:
                graph.launch(stream)
            else:
                self._launch(step, stream)
            counts = step.accepted["accepted_counts"].numpy(stream)
            for s in np.flatnonzero(active):
                accepted[s].append(int(counts[s]))
            if record:
                paths, rows = step.accepted["accepted"].numpy(stream), step.forward.logits.numpy(stream)
                for s in np.flatnonzero(active):
                    logits[s].extend(rows[s * step.nodes + node].copy() for node in paths[s, : counts[s]])
            active = state.active.numpy(stream).copy()
            count += 1
            if on_tokens is not None:
                self._tell(state, told, on_tokens, stream)
        if on_tokens is not None:
            self._tell(state, told, on_tokens, stream)
        return count

    def _run_alone(self, state: State, step: Round, on_tokens: Callable[[int, Sequence[int]], None] | None) -> int:
        """All rounds as one graph launch, with a loop that the device ends; returns how many rounds the longest sequence took."""
        told, reader = [0] * state.sequences, self.device.stream()
        if state.active.numpy().any():
            stream = self.device.stream()
            condition = self.kit["loop_condition"]
            with self.device.capture(stream) as captured:
                graph: Any = captured
                with graph.loop() as (body, handle):
                    step.launch(body)
                    condition.bind(**condition.complete(running=state.running, handle=handle)).launch(body)
            graph.launch(stream)
            done = stream.record()
            try:
                while on_tokens is not None and not done.done:
                    self._tell(state, told, on_tokens, reader)
                stream.synchronize()
            except BaseException:
                # Nobody is active any more: the loop ends after the round that it is at, and nothing writes to the pages afterwards.
                state.active.copy_from(np.zeros(state.sequences, np.int32), reader)
                stream.synchronize()
                raise
        if on_tokens is not None:
            self._tell(state, told, on_tokens, reader)
        return int(state.rounds.numpy().max())

    @staticmethod
    def _tell(state: State, told: list[int], on_tokens: Callable[[int, Sequence[int]], None], stream: Any) -> None:
        """Pass on the tokens that are new since the last time; `stream` waits for nothing, so the device may be at work."""
        counts = state.new_counts.numpy(stream)
        if any(count > before for count, before in zip(counts, told, strict=True)):
            tokens = state.new_tokens.numpy(stream)
            for s, count in enumerate(counts):
                # A token that is counted and not to be seen yet is −1; it comes the next time.
                new = [int(token) for token in itertools.takewhile(lambda token: token >= 0, tokens[s, told[s] : count])]
                if new:
                    on_tokens(s, new)
                    told[s] += len(new)

    def _launch(self, step: Round, stream: Any) -> None:
        if self.observer is None:
            step.launch(stream)
            return
        for _, call in step.before:
            call.launch(stream)
        self._observe(step.forward, stream)
        for _, call in step.after:
            call.launch(stream)

    def _observe(self, forward: Forward, stream: Any) -> None:
        assert self.observer is not None
        for stage in forward.stages:
            stage.call.launch(stream)
            self.observer(stage)

    def _state(self, sequences: int) -> State:
        commit = self.kit["tree_commit"].contract
        return State(
            self.device,
            sequences,
            positions=commit.extent("history", 1),
            max_pages=self._table_width,
            max_new=commit.extent("new_tokens", 1),
            depth=self.spec.tree.depth,
            stops=commit.extent("stop_tokens", 0),
        )

    def _begin(
        self,
        state: State,
        requests: Sequence[Request],
        tables: npt.NDArray[np.int32],
        roots: list[int],
        nodes: int,
        stop_tokens: Sequence[int],
    ) -> None:
        """The state after the prompts: each sequence's first new token is its root."""
        S = state.sequences
        starts = np.array([len(request.prompt) for request in requests])
        ended = [root in stop_tokens or request.max_tokens == 1 for root, request in zip(roots, requests, strict=True)]
        active = np.array([not done and start < self.context for done, start in zip(ended, starts, strict=True)])
        history, new = np.full(state.history.shape, -1, np.int32), np.full(state.new_tokens.shape, -1, np.int32)
        stops = np.full(state.stop_tokens.shape, -1, np.int32)
        for s, request in enumerate(requests):
            history[s, : starts[s]] = request.prompt
            if starts[s] < history.shape[1]:
                history[s, starts[s]] = roots[s]
            new[s, 0] = roots[s]
        stops[: len(stop_tokens)] = stop_tokens
        state.set(
            root_tokens=roots, starts=starts, active=active, new_counts=np.ones(S), new_tokens=new, history=history, stop_tokens=stops,
            wanted_budgets=np.full(S, nodes - 1), budgets=np.where(active, np.clip(self.context - starts - 1, 0, nodes - 1), 0),
            position_limit=np.full(S, self.context), max_new_tokens=[request.max_tokens for request in requests], page_tables=tables,
            running=[active.sum()],
        )  # fmt: skip

    @property
    def chunk_rows(self) -> int:
        """Tokens of a prompt's chunk."""
        return min(CHUNK, self.rows)

    @property
    def rows(self) -> int:
        """Rows that every kernel of a forward takes."""
        return min(int(self.kit[name].contract.capacities["T"].maximum) for name in FORWARD_KERNELS if name in self.kit)

    def read_prompt(self, prompt: Sequence[int], pages: Sequence[int]) -> tuple[int, npt.NDArray[np.float32], int]:
        """A prompt into these pages, chunk by chunk.

        Returns:
            The most probable next token, the logits `[vocab]`, and how many forwards it took.
        """
        table = np.zeros(self._table_width, np.int32)
        table[: len(pages)] = pages
        forward, count = None, 0
        for start in range(0, len(prompt), self.chunk_rows):
            tokens = np.asarray(prompt[start : start + self.chunk_rows], np.int32)
            forward, rows = self._chunk(len(tokens))
            self._fill(rows, tokens, start, table)
            if self.observer is None:
                forward.launch()
            else:
                self._observe(forward, None)
            count += 1
        assert forward is not None
        return int(forward.choices.numpy()[0]), forward.logits.numpy()[0].copy(), count

    def _chunk(self, tokens: int) -> tuple[Forward, Rows]:
        """The forward for a chunk: of the next larger power of two rows."""
        size = min(self.chunk_rows, 1 << (tokens - 1).bit_length())
        if size not in self._chunks:
            device = self.device
            integers = {name: device.array(np.zeros(size, np.int32)) for name in ("ids", "positions", "slots", "sequences", "depths")}
            rows = Rows(
                **integers,
                paths=device.array(np.zeros((size, path_bytes(self.spec.tree.depth)), np.uint8)),
                starts=device.array(np.zeros(1, np.int32)),
                page_tables=device.array(np.zeros((1, self._table_width), np.int32)),
            )
            while len(self._chunks) >= KEPT_CHUNKS:
                self._chunks.pop(next(iter(self._chunks)))
            self._chunks[size] = Forward(self.kit, self.spec, self.weights, self.cache, rows, last_only=True), rows
        return self._chunks[size]

    @property
    def _table_width(self) -> int:
        """Columns of a page table."""
        return self.kit["mla_prepare"].contract.extent("page_tables", 1)

    @staticmethod
    def _fill(rows: Rows, tokens: npt.NDArray[np.int32], start: int, table: npt.NDArray[np.int32]) -> None:
        """A chunk's rows, padding first so that the last row is the last token."""
        padding, count = rows.count - len(tokens), len(tokens)
        offsets = np.arange(count, dtype=np.int32)
        for array, values, nothing in (
            (rows.ids, tokens, 0), (rows.positions, start + offsets, 0), (rows.slots, start + offsets, -1),
            (rows.sequences, np.zeros(count, np.int32), -1), (rows.depths, offsets, 0),
        ):  # fmt: skip
            array.copy_from(np.concatenate([np.full(padding, nothing, np.int32), values.astype(np.int32)]))
        paths = np.zeros(rows.paths.shape, np.uint8)
        paths[padding:, 0] = CONTIGUOUS
        rows.paths.copy_from(paths)
        rows.starts.copy_from(np.array([start], np.int32))
        rows.page_tables.copy_from(table[None])

    def _check(
        self, requests: Sequence[Request], mode: str, budget: int | None, drafter: Drafter | None, stop_tokens: Sequence[int]
    ) -> int:
        """Rows per sequence; UsageError for what cannot be served."""
        spec, vocab = self.spec, self.config.model.vocab
        if mode not in MODES:
            raise UsageError(f"mode '{mode}': allowed are {', '.join(MODES)}")
        if not 1 <= len(requests) <= spec.cache.max_sequences:
            raise UsageError(f"{len(requests)} sequences: the engine spec allows 1 … {spec.cache.max_sequences} (cache.max_sequences)")
        if mode != "ar" and drafter is None:
            raise UsageError(f"mode {mode} needs a drafter")
        if budget is not None and not 0 <= budget <= spec.tree.budget:
            raise UsageError(f"budget {budget}: the engine spec allows 0 … {spec.tree.budget} (tree.budget)")
        most = spec.tree.budget if budget is None else budget
        nodes = 1 + {"ar": 0, "chain": min(spec.tree.depth, most), "tree": most}[mode]
        rows = self.rows
        if nodes * len(requests) > rows:
            raise UsageError(
                f"{len(requests)} sequences of {nodes} rows: the engine spec's kernels take {rows} rows: fewer sequences, or less budget"
            )
        commit = self.kit["tree_commit"].contract
        most_new, stops = commit.extent("new_tokens", 1), commit.extent("stop_tokens", 0)
        if wrong := [token for token in stop_tokens if not 0 <= token < vocab]:
            raise UsageError(f"stop token {wrong[0]} is outside the vocabulary of {vocab}")
        if len(stop_tokens) > stops:
            raise UsageError(f"{len(stop_tokens)} stop tokens: the engine spec's tree_commit takes {stops}")
        for number, request in enumerate(requests):
            where = f"sequence {number}"
            if not len(request.prompt):
                raise UsageError(f"{where}: the prompt is empty; it needs at least one token")
            if wrong := [token for token in request.prompt if not 0 <= token < vocab]:
                raise UsageError(f"{where}: token {wrong[0]} of the prompt is outside the vocabulary of {vocab}")
            if len(request.prompt) > self.context:
                raise UsageError(f"{where}: a prompt of {len(request.prompt)} tokens is longer than the context of {self.context}")
            if not 1 <= request.max_tokens <= most_new:
                raise UsageError(f"{where}: max_tokens {request.max_tokens}: allowed are 1 … {most_new}")
        return nodes


def checked(spec: Spec, config: ModelConfig) -> EngineSpec:
    """The engine part of a spec that is for this model.

    Raises:
        UsageError: it is a kernel spec.
        SpecError: it is for another model; every value that differs is named.
    """
    from kdgen.errors import Fault

    if spec.engine is None:
        raise UsageError(f"{spec.path}: a kernel spec; the engine needs an engine spec")
    wanted, found = spec.engine.model.model_dump(), config.model.model_dump()
    faults = [
        Fault(spec.path, 0, f"model.{name}", f"value {wanted[name]}, but the checkpoint has {found[name]}")
        for name in wanted
        if wanted[name] != found[name]
    ]
    if spec.engine.ranks != 1:
        faults.append(Fault(spec.path, 0, "ranks", f"value {spec.engine.ranks}, allowed 1: several ranks cannot decode together yet"))
    for kernel in spec.kernels:
        if kernel.name == "moe_route":
            pairs = {
                "n_group": config.n_group,
                "topk_group": config.topk_group,
                "normalise": config.norm_topk_prob,
                "scoring": config.scoring,
            }
            faults += [
                Fault(
                    spec.path,
                    0,
                    f"kernels.moe_route.params.{name}",
                    f"value {getattr(kernel.params, name)}, but the checkpoint has {value}",
                )
                for name, value in pairs.items()
                if getattr(kernel.params, name) != value
            ]
        if kernel.name in ("q_norm", "mla_prepare") and kernel.params.model_dump()["eps"] != config.latent_norm_eps:
            eps = kernel.params.model_dump()["eps"]
            faults.append(
                Fault(spec.path, 0, f"kernels.{kernel.name}.params.eps", f"value {eps}, but the checkpoint has {config.latent_norm_eps}")
            )
        if kernel.name == "moe_gate_up" and kernel.params.model_dump()["early"] and not config.model.shared_experts:
            faults.append(Fault(spec.path, 0, "kernels.moe_gate_up.params.early", "value true, allowed only with a shared expert"))
    if faults:
        raise SpecError(faults)
    return spec.engine
