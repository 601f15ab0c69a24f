"""The measurer, on the host instead of a GPU: its kernels are real, its clock is not."""

from types import SimpleNamespace

import numpy as np
import pytest

from kdgen.bench.measure import Timing
from kdgen.bench.run import COLD_BYTES
from kdgen.build import build_spec
from kdgen.errors import DeviceError
from kdgen.kernels.base import Workload
from kdgen.spec import Spec, load_spec
from kdgen.sweep.measure import CudaMeasurer, Placed, copies_of, kernel_spec
from kdgen.sweep.worker import Job
from kdgen.sweep.workloads import CaseSource
from kdgen.targets import get_target
from kdgen.verify.kernel import Verdict
from tests.sweep.fakes import ROOT

SMALL = {
    "n": 64, "k": 256, "rows": 64, "slices": 1, "few_rows": 0, "tile": {"n": 64, "k": 64}, "warps": {"n": 4, "k": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Two configurations of a product, built for the host."""
    out = tmp_path_factory.mktemp("built")
    kernel = load_spec(ROOT / "specs" / "kernels" / "gemm.yaml").kernels[0].with_params(**SMALL)
    found = {}
    for name, stages in (("a", 4), ("b", 2)):
        changed = kernel.with_params(stages=stages)
        build_spec(Spec.of(name, changed), [get_target("host")], out)
        found[name] = Job(name, "gemm", changed.params.model_dump(mode="json"), "gemm", str(out / name / "host"))
    return found


@pytest.fixture
def measurer(monkeypatch):
    found = CudaMeasurer("host", ("T = 1", "T = 8"), launches=4, replays=3, rounds=2)
    timed = []

    def time_calls(device, calls, launches, replays):
        timed.append((len(calls), launches, replays))
        calls[0].launch(None)
        return Timing(float(len(timed)), len(timed) - 0.1, len(timed) + 0.1, launches, replays)

    monkeypatch.setattr("kdgen.sweep.measure.time_calls", time_calls)
    monkeypatch.setattr("kdgen.sweep.measure.copies_of", lambda workload: 2)
    found.timed = timed
    return found


def test_right_kernels_pass_and_wrong_ones_are_named(built, measurer):
    assert measurer.check(built["a"]) == ""
    lying = Job("wrong", "gemm", {**built["a"].params, "x_offset": 0, "residual": True, "out": "f32"}, "gemm", built["a"].directory)
    assert measurer.check(lying).startswith("case ")
    other = Job("other", "gemm", {**built["a"].params, "slices": 1}, "gemm", built["a"].directory)
    measurer._cases = SimpleNamespace(wrap=sabotaged)
    assert measurer.check(other).startswith("case T = 1: out[")


def sabotaged(kernel):
    from dataclasses import replace

    def reference(params, inputs):
        return {name: value + 1 for name, value in kernel.family.reference(params, inputs).items()}

    return replace(kernel, family=replace(kernel.family, reference=reference))


def test_a_fault_during_the_check_is_no_wrong_result(built, measurer, monkeypatch):
    verdict = Verdict("gemm", "gemm", 1, 1, 0.0, 0.0, ("case T = 1, run 1: fault: an illegal memory access",))
    monkeypatch.setattr("kdgen.sweep.measure.verify_kernel", lambda *arguments: verdict)
    with pytest.raises(DeviceError, match="illegal memory access"):
        measurer.check(built["a"])


def test_configuration_and_base_take_turns(built, measurer):
    found = measurer.time(built["b"], built["a"], "T = 8")
    assert measurer.timed == [(2, 4, 3)] * 4
    assert (found["median"], found["incumbent"]) == (2.0, 3.0)
    assert (found["low"], found["high"]) == (0.9, 3.1)
    assert found["replays"] == 6
    measurer.timed.clear()
    alone = measurer.time(built["a"], built["a"], "T = 8")
    assert len(measurer.timed) == 2
    assert alone["median"] == alone["incumbent"]


def test_configurations_share_the_arrays_on_the_device(built, measurer):
    made = []
    real = measurer._device.array
    measurer._placed._device = SimpleNamespace(array=lambda values: made.append(values.nbytes) or real(values))
    measurer.time(built["b"], built["a"], "T = 8")
    count = len(made)
    assert count == 4, "x and w, two copies"
    measurer.time(built["b"], built["a"], "T = 8")
    assert len(made) == count


def test_placed_arrays_are_found_by_contents_and_let_go_when_they_are_too_many():
    made = []
    placed = Placed(SimpleNamespace(array=lambda values: made.append(1) or object()), limit=100)
    first = np.arange(10, dtype=np.int32)
    one = placed.get(first, 0, "")
    assert placed.get(first.copy(), 0, "") is one
    assert placed.get(first, 1, "") is not one
    assert placed.get(first, 0, "out") is not one, "what a kernel writes is nobody's input"
    assert placed.get(first, 0, "") is not one, "the limit was reached"
    assert len(made) == 4


def test_cold_workloads_get_copies_beyond_the_cache():
    inputs = {"x": np.zeros(1 << 20, np.float32)}
    assert copies_of(Workload("w", inputs)) == 1
    assert copies_of(Workload("w", inputs, cold=True)) == min(200, COLD_BYTES >> 22)


def test_cases_and_references_are_made_once(built):
    source = CaseSource()
    kernel = kernel_spec(built["a"])
    other = kernel_spec(built["b"])
    first = list(source.wrap(kernel).family.cases(kernel.params, np.random.default_rng(0)))
    second = list(source.wrap(other).family.cases(other.params, np.random.default_rng(0)))
    assert all(a is b for a, b in zip(first, second, strict=True)), "stages decide no case"
    want = source.wrap(kernel).family.reference(kernel.params, first[0].inputs)
    assert source.wrap(other).family.reference(other.params, first[0].inputs) is want
    np.testing.assert_array_equal(want["out"], kernel.family.reference(kernel.params, first[0].inputs)["out"])
