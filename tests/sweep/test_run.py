from collections import Counter

import pytest

from kdgen.errors import DeviceError, KdgenError, SpecError
from kdgen.sweep.choose import by_configuration, choose
from kdgen.sweep.recorded import document_of, read_recorded
from kdgen.sweep.replay import replay
from kdgen.sweep.run import Budget, Sweep
from kdgen.sweep.search import make_strategy
from kdgen.sweep.stages import WHOLE, Stage
from kdgen.sweep.store import Store
from kdgen.sweep.worker import Worker
from tests.sweep.fakes import PLACE, FakeCompiler, FakeMeasurer, comparable, load_small

WIDE = "  few_rows: [0, 1, 2, 4, 8]\n  stages: [4, 6, 8]\n  slices: [2, 4, 8]\n"


class Direct:
    """A worker without a process."""

    def __init__(self, measurer=None):
        self.measurer = measurer or FakeMeasurer()
        self.asked = []

    def ask(self, request, *arguments, limit=None):
        from kdgen.sweep.worker import Answer

        self.asked.append((request, arguments[0].name, *arguments[2:]))
        try:
            return Answer("ok", getattr(self.measurer, request)(*arguments))
        except DeviceError as error:
            return Answer("failed", reason=str(error))


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch):
    monkeypatch.setattr("kdgen.sweep.run.publish", lambda kernels, target, out: None)


def sweep_with(store, spec, shapes, *, compiler=None, worker=None, strategy="grid", seed=0, budget=None, batch=4, **settings):
    heard = []
    compiler = compiler or FakeCompiler()
    sweep = Sweep(spec, shapes, store, PLACE, compiler, worker=worker, listen=heard.append, **settings)
    store.describe(PLACE, spec.name, spec.target.name, document_of(spec, shapes, {}, {}))
    try:
        sweep.run(make_strategy(strategy, spec.space, seed, budget), Budget(None if strategy == "halving" else budget), batch)
    finally:
        sweep.close()
    return heard


def stages_of(store):
    return Counter(str(own[WHOLE].stage) for own in by_configuration(store.rows(PLACE)).values())


def test_every_configuration_ends_at_a_stage_with_a_reason(tmp_path):
    space = "  stages: {from: 2, to: 8}\n  tile.n: [16, 24, 64, 256]\n"
    spec, shapes = load_small(tmp_path, space, constraints="  - {need: 'stages != 4 or tile.n < 100', why: for the test}\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, compiler=FakeCompiler(spills=6, fails=5))
        rows = by_configuration(store.rows(PLACE))
    found = {(own[WHOLE].values["stages"], own[WHOLE].values["tile.n"]): own[WHOLE] for own in rows.values()}
    assert len(found) == 28
    assert found[4, 256].stage is Stage.CONSTRAINT
    assert found[4, 256].reason == "stages != 4 or tile.n < 100 (for the test)"
    assert found[8, 24].stage is Stage.PARAMETERS
    assert "a multiple of 16" in found[8, 24].reason
    assert found[2, 16].stage is Stage.PARAMETERS
    assert "must be 16, 32 or 64 columns for each of warps.n = 4 warps" in found[2, 16].reason
    assert found[5, 64].stage is Stage.NO_COMPILE
    assert found[5, 64].reason == "small.cu: refused · templates/gemm.cu.j2:1: error: no"
    assert found[6, 64].stage is Stage.SPILLS
    assert "spills registers: 64 bytes of stores" in found[6, 64].reason
    assert found[8, 64].stage is Stage.COMPILED
    entry = next(iter(found[8, 64].details["entries"].values()))
    assert entry["registers"] == 100
    assert entry["blocks_per_sm"] > 0
    own = rows[found[8, 64].configuration]
    assert set(own) == {"", *(shape.name for shape in shapes)}
    assert all(row.predicted > 0 and row.limiter for shape, row in own.items() if shape)


def test_what_does_not_fit_the_target(tmp_path):
    spec, shapes = load_small(tmp_path, "  tile.k: [64, 256]\n  tile.n: [64, 256]\n  warps.k: [2, 4]\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes)
        reasons = [own[WHOLE].reason for own in by_configuration(store.rows(PLACE)).values() if own[WHOLE].stage is Stage.NO_FIT]
    assert reasons
    assert any("bytes of shared memory" in reason for reason in reasons)


def test_measured_configurations_are_right_first_and_compared_with_the_base(tmp_path):
    spec, shapes = load_small(tmp_path)
    worker = Direct()
    with Store(tmp_path / "out") as store:
        heard = sweep_with(store, spec, shapes, worker=worker)
        rows = by_configuration(store.rows(PLACE))
        recorded = read_recorded(store)
    assert stages_of_rows(rows) == {"measured": 12}
    checks = [item for item in worker.asked if item[0] == "check"]
    assert len(checks) == 12, "the base is one of the points, and is not checked twice"
    assert [item[0] for item in worker.asked[:5]] == ["check", "time", "time", "time", "time"]
    assert worker.asked[0][1] == spec.incumbent_id
    best = rows[choose(rows, spec.incumbent_id, shapes, spec.objective)[0].configuration][WHOLE].values
    assert best == {"few_rows": 8, "stages": 8, "slices": 4}
    assert all(outcome.score is not None for outcome in heard)
    assert recorded.measured


def stages_of_rows(rows):
    return dict(Counter(str(own[WHOLE].stage) for own in rows.values()))


def test_wrong_hanging_and_dying_kernels_cost_one_configuration_each(tmp_path):
    spec, shapes = load_small(tmp_path, "  stages: {from: 2, to: 8}\n")
    with Store(tmp_path / "out") as store, Worker("tests.sweep.fakes:make", {}, 3.0) as worker:
        sweep_with(store, spec, shapes[:1], worker=worker, batch=64)
        found = {own[WHOLE].values["stages"]: own[WHOLE] for own in by_configuration(store.rows(PLACE)).values()}
    assert {stages: str(row.stage) for stages, row in found.items()} == {
        2: "launch failed", 3: "timed out", 4: "measured", 5: "launch failed", 6: "measured", 7: "wrong", 8: "measured",
    }  # fmt: skip
    assert found[2].reason == "an illegal memory access"
    assert found[3].reason == "no result within 3 seconds"
    assert found[5].reason == "the process that ran it ended (exit code 9)"
    assert found[7].reason == "case T = 1: out[0, 0] is 1.0, want 2.0"


def test_a_gpu_that_runs_nothing_any_more_ends_the_sweep(tmp_path):
    class Dying(FakeMeasurer):
        alive = 6

        def check(self, job):
            self.alive -= 1
            if self.alive < 0:
                raise DeviceError("lost")
            return ""

        def time(self, job, incumbent, shape):
            if self.alive < 0:
                raise DeviceError("lost")
            return super().time(job, incumbent, shape)

    spec, shapes = load_small(tmp_path)
    with Store(tmp_path / "out") as store:
        with pytest.raises(DeviceError, match="3 configurations in a row failed, and now the base spec does, too"):
            sweep_with(store, spec, shapes, worker=Direct(Dying()))
        assert stages_of(store)["measured"] == 6
    dead = Dying()
    dead.alive = 0
    with Store(tmp_path / "other") as store, pytest.raises(DeviceError, match=r"base spec's own configuration cannot be measured: .*lost"):
        sweep_with(store, spec, shapes, worker=Direct(dead))


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path):
    spec, shapes = load_small(tmp_path, WIDE)
    with Store(tmp_path / "whole") as store:
        sweep_with(store, spec, shapes, worker=Direct())
        whole = store.rows(PLACE)
    with Store(tmp_path / "parts") as store:
        first = FakeCompiler(most=14)
        with pytest.raises(KeyboardInterrupt):
            sweep_with(store, spec, shapes, compiler=first, worker=Direct())
        second, worker = FakeCompiler(), Direct()
        sweep_with(store, spec, shapes, compiler=second, worker=worker)
        assert not set(second.compiled) & set(first.compiled)
        assert store.rows(PLACE) == whole
        again, idle = FakeCompiler(), Direct()
        heard = sweep_with(store, spec, shapes, compiler=again, worker=idle)
        assert again.compiled == idle.asked == []
        assert all(outcome.known for outcome in heard)


@pytest.mark.parametrize("strategy", ["random", "optuna", "halving"])
def test_searches_that_are_stopped_and_go_on_end_with_the_same_rows(tmp_path, strategy):
    if strategy == "optuna":
        pytest.importorskip("optuna")
    spec, shapes = load_small(tmp_path, WIDE)
    settings = {"strategy": strategy, "seed": 5, "budget": 20, "batch": 8}
    with Store(tmp_path / "whole") as store:
        sweep_with(store, spec, shapes, worker=Direct(), **settings)
        whole = store.rows(PLACE)
    with Store(tmp_path / "parts") as store:
        with pytest.raises(KeyboardInterrupt):
            sweep_with(store, spec, shapes, compiler=FakeCompiler(most=11), worker=Direct(), **settings)
        sweep_with(store, spec, shapes, worker=Direct(), **settings)
        assert comparable(store.rows(PLACE)) == comparable(whole)


def test_halving_times_few_on_all_shapes_and_says_so(tmp_path):
    spec, shapes = load_small(tmp_path, WIDE)
    worker = Direct()
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, worker=worker, strategy="halving", budget=27)
        found = stages_of(store)
        reasons = [o[WHOLE].reason for o in by_configuration(store.rows(PLACE)).values() if o[WHOLE].stage is Stage.PRUNED]
    assert 4 <= found["measured"] <= 18, "the last rung, the base, and neighbours of the best"
    assert found["pruned"] >= 10
    assert all(reason.startswith("halving: not among the best third after ") for reason in reasons)


def test_the_static_model_keeps_hopeless_ones_from_the_gpu(tmp_path):
    spec, shapes = load_small(tmp_path, "  few_rows: [0, 8]\n  slices: [1, 2, 4, 8]\n  stages: [2, 8]\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, worker=Direct(), prune=1.0)
        found = by_configuration(store.rows(PLACE))
    pruned = [own[WHOLE] for own in found.values() if own[WHOLE].stage is Stage.PRUNED]
    assert pruned
    assert all("times as long as the best, the limit is 1" in row.reason for row in pruned)
    assert found[spec.incumbent_id][WHOLE].stage is Stage.MEASURED


def test_a_budget_counts_what_was_compiled(tmp_path):
    spec, shapes = load_small(tmp_path, WIDE, constraints="  - 'few_rows != 1'\n")
    with Store(tmp_path / "out") as store:
        compiler = FakeCompiler()
        sweep_with(store, spec, shapes, compiler=compiler, strategy="random", budget=7)
        assert len(set(compiler.compiled) - {spec.incumbent_id}) in (6, 7)
        late = Budget(None, 0.0)
        assert late.left(0, 8) == 0
        assert Budget(10).left(7, 8) == 3


def test_a_space_without_a_valid_point_is_refused_with_the_constraint(tmp_path):
    spec, shapes = load_small(tmp_path, constraints="  - 'stages > 8'\n  - 'slices > 2'\n")
    with Store(tmp_path / "out") as store:
        with pytest.raises(
            SpecError, match=r"sweep.yaml:\d+: constraints: none of the space's points satisfies the constraints: 'stages > 8'"
        ):
            sweep_with(store, spec, shapes)
        with pytest.raises(SpecError, match="none of the space's points satisfies"):
            sweep_with(store, spec, shapes, strategy="random", budget=5)


def test_two_sweeps_share_a_store(tmp_path):
    spec, shapes = load_small(tmp_path, WIDE)
    with Store(tmp_path / "out") as one, Store(tmp_path / "out") as two:
        sweep_with(one, spec, shapes, strategy="random", seed=1, budget=20)
        second = FakeCompiler()
        sweep_with(two, spec, shapes, compiler=second, strategy="random", seed=2, budget=20)
        assert len(second.compiled) < 20, "what the first has found is not done again"
        assert one.rows(PLACE) == two.rows(PLACE)


@pytest.mark.parametrize("strategy", ["halving", "optuna"])
def test_two_seeds_choose_configurations_of_nearly_the_same_time(tmp_path, strategy):
    if strategy == "optuna":
        pytest.importorskip("optuna")
    spec, shapes = load_small(tmp_path, "  few_rows: [0, 8]\n  stages: {from: 4, to: 8, step: 2}\n  slices: {from: 2, to: 8}\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, worker=Direct())
        recorded = read_recorded(store)
    found = [replay(recorded, strategy, seed, 30) for seed in (1, 2)]
    assert max(item.score for item in found) <= 1.02 * min(item.score for item in found)
    assert all(item.behind <= 0.02 for item in found)
    assert replay(recorded, strategy, 1, 30) == found[0]
    full = replay(recorded, "grid", 0, None)
    assert full.behind <= recorded.objective.noise
    assert full.chosen == choose(by_configuration(recorded.rows), spec.incumbent_id, shapes, spec.objective)[0].configuration
    assert full.unknown == 0


def test_failures_can_be_tried_again(tmp_path):
    spec, shapes = load_small(tmp_path, "  stages: [2, 4, 7, 8]\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, worker=Direct(), compiler=FakeCompiler(fails=4))
        assert stages_of(store) == {"does not compile": 1, "launch failed": 1, "wrong": 1, "measured": 1}
        second = Direct()
        second.measurer.time = lambda job, incumbent, shape: {"median": 1.0, "low": 1.0, "high": 1.0, "incumbent": 1.0}
        sweep_with(store, spec, shapes, worker=second, retry=True)
        assert stages_of(store) == {"wrong": 1, "measured": 3}
        assert [item[0] for item in second.asked].count("check") == 2


def test_predictions_of_an_older_model_are_made_anew_and_timings_are_kept(tmp_path, monkeypatch):
    spec, shapes = load_small(tmp_path)
    with Store(tmp_path / "out") as store:
        sweep_with(store, spec, shapes, worker=Direct())
        before = store.rows(PLACE)
        monkeypatch.setattr("kdgen.sweep.run.VERSION", 2)
        monkeypatch.setattr("kdgen.sweep.static_model._LEAK", 0.5)
        idle, compiler = Direct(), FakeCompiler()
        sweep_with(store, spec, shapes, compiler=compiler, worker=idle)
        after = store.rows(PLACE)
        assert len(compiler.compiled) == 12
        assert idle.asked == []
    assert [row.measured for row in after] == [row.measured for row in before]
    assert all(a.predicted > b.predicted for a, b in zip(after, before, strict=True) if a.shape)
    assert all(row.details["model"] == 2 and row.details["checked"] for row in after if not row.shape)


@pytest.mark.parametrize("strategy", ["random", "halving", "optuna"])
def test_a_huge_space_with_hardly_anything_allowed_ends(tmp_path, monkeypatch, strategy):
    if strategy == "optuna":
        pytest.importorskip("optuna")
    for place, patience in (("run.PATIENCE", 100), ("search.PATIENCE", 100), ("search._LEARNER_PATIENCE", 20)):
        monkeypatch.setattr(f"kdgen.sweep.{place}", patience)
    space = "  stages: {from: 2, to: 8}\n  slices: [1, 2, 4]\n  rows: {from: 64, to: 4000}\n  out_offset: {from: 0, to: 4000}\n"
    spec, shapes = load_small(tmp_path, space, constraints="  - 'rows < 64'\n")
    assert spec.space.size > 10**8
    with Store(tmp_path / "out") as store, pytest.raises(SpecError, match=r"none of \d+ random points satisfies the constraints"):
        sweep_with(store, spec, shapes, strategy=strategy, budget=20)
    some, shapes = load_small(tmp_path, space, constraints="  - 'rows < 4001'\n")
    with Store(tmp_path / "out") as store:
        sweep_with(store, some, shapes, strategy=strategy, budget=6)
        assert store.rows(PLACE)


def test_templates_that_change_end_a_sweep(tmp_path, monkeypatch):
    spec, shapes = load_small(tmp_path)
    states = iter([(("a", 1, 1),)] * 3 + [(("a", 2, 1),)] * 99)
    monkeypatch.setattr("kdgen.sweep.run.templates_state", lambda: next(states))
    with Store(tmp_path / "out") as store:
        with pytest.raises(KdgenError, match="the templates have changed while the sweep ran"):
            sweep_with(store, spec, shapes)
        assert len(by_configuration(store.rows(PLACE))) == 2
