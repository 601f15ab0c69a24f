import numpy as np
import pytest

from kdgen.kernels.gemm_probe import FAMILY
from kdgen.kernels.kv_compact import FAMILY as KV_COMPACT
from kdgen.spec import KernelSpec
from kdgen.targets import get_target
from kdgen.verify.kernel import verify_kernel
from kdgen.verify.rows import differing_row, regroupings, row_count, take_rows
from kdgen.verify.schedules import host_schedules
from tests.verify.fakes import FakeKernel

SPEC = KernelSpec("probe", FAMILY, FAMILY.params.model_validate({"n": 32, "k": 64, "rows": 16, "tile": {"n": 32, "t": 8, "k": 32}}))
CONTRACT = FAMILY.contract(SPEC.params, get_target("host"))


def verdict_of(hurt, regroup=4):
    builds = {schedule: FakeKernel(SPEC, hurt) for schedule in host_schedules(2, 0)}
    return verify_kernel(SPEC, builds, 0, lambda *launch: None, regroup)


def test_rows_that_do_not_influence_each_other_pass():
    verdict = verdict_of(lambda results: None)
    assert verdict.passed
    assert verdict.regroupings == 4 * (verdict.cases - 1)  # one case has a single row


def test_a_row_whose_last_bit_depends_on_its_neighbours_fails():
    def hurt(results):
        out = results["out"]
        results["out"] = np.nextafter(out.astype(np.float32), np.float32(len(out) * 1e9))
        if len(out) == 1:
            results["out"] = out

    verdict = verdict_of(hurt)
    assert not verdict.passed
    assert "not row-exact: out[" in verdict.failures[0]
    assert "alone" in verdict.failures[0]
    assert verdict_of(hurt, regroup=0).passed  # within tolerance: nothing but the regrouping sees it


def test_a_row_whose_bits_depend_on_its_place_fails():
    def hurt(results):
        results["out"] = results["out"].astype(np.float32)
        results["out"][0] = np.nextafter(results["out"][0], np.float32(np.inf))

    assert "shuffled" in next(f for f in verdict_of(hurt).failures if "row-exact" in f)


def test_families_without_rows_are_left_alone():
    params = KV_COMPACT.params.model_validate({"layers": 1, "width": 64, "depth": 2, "page_size": 8, "max_pages": 6, "sequences": 2})
    spec = KernelSpec("move", KV_COMPACT, params)
    verdict = verify_kernel(spec, {schedule: FakeKernel(spec) for schedule in host_schedules(1, 0)}, 0, lambda *launch: None)
    assert (verdict.passed, verdict.regroupings) == (True, 0)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_regroupings(count):
    made = list(regroupings(count, np.random.default_rng(0), 6))
    assert len(made) == (6 if count > 1 else 0)
    for name, rows in made:
        assert len(set(rows.tolist())) == len(rows)
        assert ("alone" in name) == (len(rows) == 1 and "of" not in name)
        assert set(rows.tolist()) <= set(range(count))


def test_only_arrays_over_the_rows_are_taken():
    inputs = {"x": np.arange(12).reshape(4, 3), "w": np.arange(4)}
    assert row_count(CONTRACT, "T", inputs) == 4
    part = take_rows(CONTRACT, "T", inputs, np.array([2, 0]))
    assert part["x"].tolist() == [[6, 7, 8], [0, 1, 2]]
    assert part["w"] is inputs["w"]


def test_the_place_named_is_that_among_all_rows():
    whole = {"out": np.zeros((4, 2), np.float32)}
    part = {"out": np.array([[0, 0], [0, -0.0]], np.float32)}
    assert differing_row(CONTRACT, "T", whole, part, np.array([3, 1])) == "out[1, 1] is 0.0 among all rows but -0.0"
    assert not differing_row(CONTRACT, "T", whole, {"out": np.zeros((2, 2), np.float32)}, np.array([3, 1]))
