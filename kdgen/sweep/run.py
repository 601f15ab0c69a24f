"""A sweep: asks a strategy for points, takes each as far as it comes, records every step, tells the strategy the score."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kdgen.errors import DeviceError, Fault, KdgenError, LaunchError, ResourceError, SpecError
from kdgen.expressions import ExpressionError
from kdgen.spec import KernelSpec
from kdgen.sweep.choose import by_configuration, score_of_rows
from kdgen.sweep.compiling import Compiled, Compiler, publish, stage_of
from kdgen.sweep.load import SweepSpec
from kdgen.sweep.search import GRID_LIMIT, PATIENCE, Strategy, Trial, rung_shapes
from kdgen.sweep.space import configuration_id
from kdgen.sweep.stages import WHOLE, Row, Stage
from kdgen.sweep.static_model import VERSION, estimate, occupancy_of
from kdgen.sweep.store import Place, Store
from kdgen.sweep.worker import Answer, Job, Worker
from kdgen.sweep.workloads import Shape, WorkloadSource

#: Stages at which nothing was compiled yet: they cost nothing and count for no budget.
_CHEAP = (Stage.CONSTRAINT, Stage.PARAMETERS, Stage.NO_FIT)
#: What another attempt may change.
_RETRIED = (Stage.NO_COMPILE, Stage.LAUNCH_FAILED, Stage.TIMED_OUT)
#: Failures in a row after which the base spec must show that the GPU still works.
_SUSPICIOUS = 3


@dataclass
class Budget:
    """When a search ends by itself.

    Attributes:
        configurations: so many that were compiled; None for no limit.
        seconds: of time; None for no limit.
    """

    configurations: int | None = None
    seconds: float | None = None
    started: float = field(default_factory=time.monotonic)

    def left(self, used: int, most: int) -> int:
        """How many more may be asked for at once, up to `most`; 0 when it is used up."""
        if self.seconds is not None and time.monotonic() - self.started >= self.seconds:
            return 0
        return most if self.configurations is None else min(most, self.configurations - used)


@dataclass(frozen=True)
class Outcome:
    """What became of one trial.

    Attributes:
        configuration, values: which one it is.
        stage, reason: how far it came, and why not further.
        score: by the objective; None when it cannot be chosen.
        known: nothing had to be done for it.
    """

    configuration: str
    values: dict[str, Any]
    stage: Stage
    reason: str
    score: float | None
    known: bool


@dataclass
class _Candidate:
    trial: Trial
    name: str
    values: dict[str, Any]
    kernel: KernelSpec | None = None
    compiled: Compiled | None = None
    known: bool = True


class Sweep:
    """One sweep over one store.

    Args:
        spec: what is swept.
        shapes: that are served, the weightiest first.
        store, place: where rows go.
        compiler: entered.
        worker: times configurations; None to stop at the static model.
        prune: configurations predicted to take more than so many times the best prediction are not timed; 0 for none.
        seed: of workloads.
        retry: forget what did not compile, did not launch or took too long before, and try it again.
        listen: told of every outcome.
    """

    def __init__(
        self,
        spec: SweepSpec,
        shapes: Sequence[Shape],
        store: Store,
        place: Place,
        compiler: Compiler,
        *,
        worker: Worker | None = None,
        prune: float = 0.0,
        seed: int = 0,
        retry: bool = False,
        listen: Callable[[Outcome], None] = lambda outcome: None,
    ):
        self.spec, self.store, self.place = spec, store, place
        self.shapes = sorted(shapes, key=lambda shape: -shape.weight)
        self._compiler, self._worker, self._prune, self._listen = compiler, worker, prune, listen
        self._source = WorkloadSource(seed, light=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="kdgen-sweep-")
        self._rows = by_configuration(store.rows(place))
        for name in [name for name, rows in self._rows.items() if retry and WHOLE in rows and rows[WHOLE].stage in _RETRIED]:
            store.remove(place, name)
            del self._rows[name]
        self._templates = templates_state()
        self._published: set[str] = set()
        self._seen: set[str] = set()
        self._failures = 0
        self._best_prediction: float | None = None
        self.stages: Counter[str] = Counter()

    def close(self) -> None:
        """Remove what was built for timing."""
        self._scratch.cleanup()

    @property
    def measures(self) -> bool:
        """Configurations are timed."""
        return self._worker is not None

    def run(self, strategy: Strategy, budget: Budget, batch: int) -> None:
        """Search until the strategy or the budget ends.

        Args:
            strategy: what to try.
            budget: how much.
            batch: trials asked for at once; they are compiled together.

        Raises:
            SpecError: no point satisfies the constraints, or none that was tried.
            DeviceError: the GPU does not even run the base spec.
            KdgenError: the store or the cache cannot be written, or the templates have changed meanwhile.
        """
        self._base()
        tried = allowed = used = dry = 0
        counted: set[str] = set()
        while (count := budget.left(used, batch)) > 0:
            trials = strategy.ask(count)
            if not trials:
                break
            for trial, outcome in zip(trials, self._batch(trials), strict=True):
                strategy.tell(trial, outcome.score)
                tried += 1
                allowed += outcome.stage is not Stage.CONSTRAINT
                dry += 1
                if outcome.stage not in _CHEAP and outcome.configuration not in counted:
                    counted.add(outcome.configuration)
                    used += 1
                    dry = 0
            # A space that nobody lists may hold hardly anything that is allowed.
            if dry >= PATIENCE and self.spec.space.size > GRID_LIMIT:
                break
        if not allowed and tried:
            raise self._contradiction(tried)
        self._close_halving(counted)

    def _close_halving(self, tried: set[str]) -> None:
        """Say of configurations that were timed on some shapes only that they went no further."""
        for name in tried if self.measures else ():
            rows = self._rows[name]
            timed = sum(row.stage is Stage.MEASURED for shape, row in rows.items() if shape)
            if rows[WHOLE].stage is Stage.COMPILED and 0 < timed < len(self.shapes):
                reason = f"halving: not among the best third after {timed} of {len(self.shapes)} shapes"
                self._put(name, [Row(name, WHOLE, Stage.PRUNED, reason, rows[WHOLE].values, details=rows[WHOLE].details)])

    def _contradiction(self, tried: int) -> SpecError:
        reasons = Counter(rows[WHOLE].reason for rows in self._rows.values() if WHOLE in rows and rows[WHOLE].stage is Stage.CONSTRAINT)
        worst = "; ".join(f"'{reason}' turned down {count:,}" for reason, count in reasons.most_common(3))
        line = self.spec.document.line_of(("constraints",))
        every = "none of the space's points" if tried >= self.spec.space.size else f"none of {tried:,} random points"
        return SpecError([Fault(self.spec.path, line, "constraints", f"{every} satisfies the constraints: {worst}")])

    def _base(self) -> None:
        """The incumbent comes first: everything is compared with it."""
        values = self.spec.incumbent
        candidate = _Candidate(Trial(-1), self.spec.incumbent_id, values, self.spec.kernel)
        self._carry([candidate])
        rows = self._rows[candidate.name]
        if self.measures and rows[WHOLE].stage is not Stage.MEASURED and rows[WHOLE].stage not in (*_CHEAP, Stage.SPILLS, Stage.NO_COMPILE):
            raise DeviceError(
                f"the base spec's own configuration cannot be measured: {rows[WHOLE].stage}: {rows[WHOLE].reason}; "
                "nothing can be compared with it"
            )
        self._tell(candidate)

    def _batch(self, trials: Sequence[Trial]) -> list[Outcome]:
        candidates = [self._candidate(trial) for trial in trials]
        self._carry([item for item in candidates if item.kernel is not None or item.name not in self._rows])
        return [self._tell(item) for item in candidates]

    def _candidate(self, trial: Trial) -> _Candidate:
        """The cheap stages: constraints and parameters."""
        space = self.spec.space
        try:
            values = space.values(trial.point)
        except ExpressionError as error:
            values = {axis.path: axis.values[choice] for axis, choice in zip(space.axes, space.choices(trial.point), strict=True)}
            return self._turn_down(_Candidate(trial, configuration_id(values), values), Stage.CONSTRAINT, str(error))
        candidate = _Candidate(trial, configuration_id(values), values)
        if broken := space.broken_rule(values):
            return self._turn_down(candidate, Stage.CONSTRAINT, broken)
        whole = self._rows.get(candidate.name, {}).get(WHOLE)
        if whole is not None and whole.stage.is_rejection and whole.stage is not Stage.CONSTRAINT:
            return candidate
        try:
            candidate.kernel = self.spec.kernel_of(values)
        except SpecError as error:
            return self._turn_down(candidate, Stage.PARAMETERS, "; ".join(fault.message for fault in error.faults))
        return candidate

    def _turn_down(self, candidate: _Candidate, stage: Stage, reason: str) -> _Candidate:
        whole = self._rows.get(candidate.name, {}).get(WHOLE)
        if whole is None or (whole.stage, whole.reason) != (stage, reason):
            candidate.known = False
            self._put(candidate.name, [Row(candidate.name, WHOLE, stage, reason, candidate.values)])
        candidate.kernel = None
        return candidate

    def _put(self, name: str, rows: list[Row]) -> None:
        self.store.put(self.place, rows)
        for row in rows:
            self._rows.setdefault(name, {})[row.shape] = row

    def _carry(self, candidates: list[_Candidate]) -> None:
        """Compile and predict what lacks it, then time."""
        waiting: dict[str, _Candidate] = {}
        for item in candidates:
            rows = self._rows.get(item.name, {})
            whole = rows.get(WHOLE)
            if whole is not None and (whole.stage.is_rejection or self._is_predicted(rows)):
                continue
            if item.kernel is not None and self._fits(item):
                waiting.setdefault(item.name, item)
        kernels = {name: item.kernel for name, item in waiting.items() if item.kernel is not None}
        for name, result in self._compiler.compile(kernels, self.spec.target):
            if templates_state() != self._templates:
                raise KdgenError("the templates have changed while the sweep ran, so its rows would be about two kernels; start it again")
            waiting[name].known = False
            self._record_compiled(waiting[name], result)
        if self._worker is not None:
            self._note_best(candidates)
            for item in candidates:
                self._time(item)

    def _note_best(self, candidates: list[_Candidate]) -> None:
        """The best prediction so far, with those that are about to be timed."""
        names = tuple(shape.name for shape in self.shapes)
        scores = [score for item in candidates if (score := self._score(item.name, names, measured=False)) is not None]
        self._best_prediction = min([*scores, *([self._best_prediction] if self._best_prediction is not None else [])], default=None)

    def _is_predicted(self, rows: Mapping[str, Row]) -> bool:
        """All shapes have predictions, of this version of the model."""
        return rows[WHOLE].details.get("model") == VERSION and all(shape.name in rows for shape in self.shapes)

    def _fits(self, item: _Candidate) -> bool:
        """Whether the family and the target have room; says so otherwise."""
        assert item.kernel is not None
        target = self.spec.target
        try:
            contract = item.kernel.family.contract(item.kernel.params, target)
            shared = item.kernel.family.shared(item.kernel.params, target).total
        except (ValueError, ArithmeticError) as error:
            self._turn_down(item, Stage.NO_FIT, str(error))
            return False
        needed = max([shared, *(launch.shared_bytes for launch in contract.launches)])
        threads = max(launch.block for launch in contract.launches)
        if needed > target.shared_limit:
            self._turn_down(item, Stage.NO_FIT, f"needs {needed:,} bytes of shared memory, {target.name} has {target.shared_limit:,}")
            return False
        if threads > 1024:
            self._turn_down(item, Stage.NO_FIT, f"blocks of {threads} threads, at most 1,024 are possible")
            return False
        return True

    def _record_compiled(self, item: _Candidate, result: Compiled | KdgenError) -> None:
        if isinstance(result, KdgenError):
            stage = Stage.NO_FIT if isinstance(result, ResourceError) else Stage.NO_COMPILE
            self._turn_down(item, stage, _first_line(str(result)))
            return
        assert item.kernel is not None
        kind, reason = stage_of(item.kernel, self.spec.target, result)
        if kind:
            self._turn_down(item, Stage.SPILLS if kind == "spill" else Stage.NO_FIT, reason)
            return
        known = self._rows.get(item.name, {})
        whole = known.get(WHOLE, Row(item.name, WHOLE, Stage.COMPILED, "", item.values))
        rows = [replace(whole, details={**whole.details, **_resources(result, self.spec)})]
        try:
            workloads = self._source.get(item.kernel, tuple(shape.name for shape in self.shapes))
            for shape in self.shapes:
                if shape.name not in workloads:
                    raise LaunchError(f"it does not serve '{shape.name}'")
                found = estimate(item.kernel, self.spec.target, result.contract, result.resources, result.code, workloads[shape.name])
                predicted = round(found.microseconds, 4)
                row = known.get(shape.name, Row(item.name, shape.name, Stage.COMPILED, "", item.values))
                rows.append(replace(row, predicted=predicted, limiter=found.limiter, details={**row.details, **found.to_json()}))
        except (LaunchError, ValueError) as error:
            self._turn_down(item, Stage.PARAMETERS, str(error))
            return
        self._put(item.name, rows)

    def _time(self, item: _Candidate) -> None:
        """Check and time a configuration on the shapes of its trial."""
        worker, rows = self._worker, self._rows.get(item.name, {})
        whole = rows.get(WHOLE)
        if worker is None or whole is None or item.kernel is None or whole.stage.is_rejection:
            return
        wanted = rung_shapes([shape.name for shape in self.shapes], item.trial.share)
        missing = [name for name in wanted if rows[name].stage is not Stage.MEASURED]
        if not missing:
            return
        is_base = item.name == self.spec.incumbent_id
        if not is_base and whole.stage is not Stage.MEASURED and (reason := self._prunes(item)):
            if whole.stage is not Stage.PRUNED:
                item.known = False
                self._put(item.name, [Row(item.name, WHOLE, Stage.PRUNED, reason, item.values, details=whole.details)])
            return
        item.known = False
        job = self._job(item.name, item.kernel)
        if not whole.details.get("checked"):
            answer = worker.ask("check", job)
            if answer.status != "ok" or answer.value:
                self._failed(item, answer, Stage.WRONG)
                return
            whole = Row(item.name, WHOLE, Stage.COMPILED, "", item.values, details={**whole.details, "checked": True})
            self._put(item.name, [whole])
        base_rows = self._rows.get(self.spec.incumbent_id, {})
        has_base = is_base or (WHOLE in base_rows and not base_rows[WHOLE].stage.is_rejection)
        base = self._job(self.spec.incumbent_id, self.spec.kernel) if has_base else job
        for name in missing:
            answer = worker.ask("time", job, base, name)
            if answer.status != "ok":
                self._failed(item, answer, Stage.LAUNCH_FAILED)
                return
            self._put(item.name, [_measured(rows[name], answer.value)])
        self._failures = 0
        if item.trial.share >= 1.0:
            self._put(item.name, [Row(item.name, WHOLE, Stage.MEASURED, "", item.values, details=whole.details)])

    def _prunes(self, item: _Candidate) -> str:
        score = self._score(item.name, tuple(shape.name for shape in self.shapes), measured=False)
        if score is None or not self._prune or self._best_prediction is None:
            return ""
        if score <= self._prune * self._best_prediction:
            return ""
        return f"predicted to take {score / self._best_prediction:.2f} times as long as the best, the limit is {self._prune:g}"

    def _failed(self, item: _Candidate, answer: Answer, wrong: Stage) -> None:
        stage = {"ok": wrong, "failed": Stage.LAUNCH_FAILED, "timeout": Stage.TIMED_OUT}[answer.status]
        reason = str(answer.value) if answer.status == "ok" else answer.reason
        self._put(item.name, [Row(item.name, WHOLE, stage, _first_line(reason), item.values)])
        self._failures += stage is not Stage.WRONG
        if self._failures >= _SUSPICIOUS and item.name != self.spec.incumbent_id and self._worker is not None:
            self._failures = 0
            base = self._job(self.spec.incumbent_id, self.spec.kernel)
            again = self._worker.ask("time", base, base, self.shapes[0].name)
            if again.status != "ok":
                raise DeviceError(
                    f"{_SUSPICIOUS} configurations in a row failed, and now the base spec does, too ({again.reason}): the GPU or "
                    "its driver is in trouble. What was recorded before is kept"
                )

    def _job(self, name: str, kernel: KernelSpec) -> Job:
        if name not in self._published:
            publish([(name, kernel)], self.spec.target, Path(self._scratch.name))
            self._published.add(name)
        directory = Path(self._scratch.name) / name / self.spec.target.name
        return Job(name, kernel.family.name, kernel.params.model_dump(mode="json"), kernel.name, str(directory))

    def _score(self, name: str, shapes: tuple[str, ...], measured: bool) -> float | None:
        wanted = [shape for shape in self.shapes if shape.name in shapes]
        base = self._rows.get(self.spec.incumbent_id, {})
        return score_of_rows(self._rows.get(name, {}), base, wanted, self.spec.objective, measured)

    def _tell(self, item: _Candidate) -> Outcome:
        whole = self._rows[item.name][WHOLE]
        shapes = rung_shapes([shape.name for shape in self.shapes], item.trial.share)
        score = self._score(item.name, shapes, self.measures)
        outcome = Outcome(item.name, item.values, whole.stage, whole.reason, score, item.known)
        if item.name not in self._seen:
            self._seen.add(item.name)
            self._listen(outcome)
        return outcome

    def count_stages(self) -> Counter[str]:
        """How many configurations of the store ended at each stage, in the order of stages."""
        found = Counter(str(rows[WHOLE].stage) for rows in self._rows.values() if WHOLE in rows)
        return Counter({str(stage): found[str(stage)] for stage in Stage if found[str(stage)]})


def templates_state() -> tuple[tuple[str, int, int], ...]:
    """Name, time of change and size of every template: what the spec hash of a running sweep rests on."""
    from kdgen.render.data import templates_dir

    found = [(path, path.stat()) for path in sorted(templates_dir().rglob("*")) if path.is_file()]
    return tuple((str(path), facts.st_mtime_ns, facts.st_size) for path, facts in found)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " · ".join(lines[:2])[:500]


def _measured(row: Row, value: dict[str, Any]) -> Row:
    notes = {key: item for key, item in value.items() if key not in ("median", "low", "high", "incumbent")}
    return Row(
        row.configuration, row.shape, Stage.MEASURED, "", row.values, row.predicted, row.limiter, value["median"], value["low"],
        value["high"], value["incumbent"], {**row.details, "timing": notes},
    )  # fmt: skip


def _resources(compiled: Compiled, spec: SweepSpec) -> dict[str, Any]:
    """What the whole configuration's row says about its code."""
    found = {}
    for launch in compiled.contract.launches:
        need = compiled.resources[launch.entry]
        code = compiled.code.get(launch.entry, {}).get("whole", {})
        full = occupancy_of(spec.target, launch, need)
        found[launch.entry] = {
            "registers": need.registers,
            "shared_bytes": need.static_shared_bytes + launch.shared_bytes,
            "blocks_per_sm": full.blocks_per_sm,
            "occupancy": round(full.fraction, 4),
            "limiter": full.limiter,
            "instructions": {key: code[key] for key in ("instructions", "mma", "integer", "float", "load", "shared") if key in code},
        }
    return {"entries": found, "model": VERSION}
