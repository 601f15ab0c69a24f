"""The router: choosing by the definition, bits that no cut of the rows changes, parameters that cannot be."""

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.dtypes import numpy_dtype
from kdgen.kernels.moe_route import FAMILY, Params, clear_rows, contract, reference, row_tiles
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target
from kdgen.verify import verify_spec
from kdgen.verify.artifacts import Artifacts, load_for
from kdgen.verify.kernel import run_case
from kdgen.verify.schedules import host_schedules

SMALL = {"experts": 64, "hidden": 128, "top_k": 4, "rows": 80, "slices": 2, "warps": 2}


def inputs_with(scores, bias, hidden=64):
    """One row whose logits are those of the given sigmoid scores."""
    x = np.zeros((1, hidden), np.float32)
    x[0, 0] = 1
    w = np.zeros((len(scores), hidden), np.float32)
    w[:, 0] = np.log(scores / (1 - scores))
    return {"x": x, "w_gate": w, "bias": np.asarray(bias, np.float32)}


def test_the_bias_decides_who_is_chosen_but_not_the_weight():
    p = Params(experts=32, hidden=64, top_k=2, slices=1, warps=1, x_dtype="f32", gate_dtype="f32", row_tile=8, scaling=2.0)
    scores, bias = np.full(32, 0.1), np.zeros(32)
    scores[5], scores[9], bias[20] = 0.8, 0.7, 0.95
    out = reference(p, inputs_with(scores, bias))
    assert out["topk_ids"].tolist() == [[20, 5]]
    assert out["topk_weights"][0] == pytest.approx([2 * 0.1 / 0.9, 2 * 0.8 / 0.9], rel=1e-6)


def test_the_lower_index_wins_among_equals():
    p = Params(experts=32, hidden=64, top_k=3, slices=1, warps=1, x_dtype="f32", gate_dtype="f32", row_tile=8)
    scores = np.full(32, 0.5)
    scores[30] = 0.6
    assert reference(p, inputs_with(scores, np.zeros(32)))["topk_ids"].tolist() == [[30, 0, 1]]


def test_experts_of_other_groups_lose_even_to_negative_choices():
    p = Params(
        experts=32, hidden=64, top_k=4, n_group=4, topk_group=1, slices=1, warps=1, x_dtype="f32", gate_dtype="f32", row_tile=8,
    )  # fmt: skip
    scores, bias = np.linspace(0.2, 0.3, 32), np.full(32, -4.0)
    bias[8:16] = -3.0  # the worthiest group
    bias[0] = -2.9  # the best expert, in a group that is not: its second counts too
    assert reference(p, inputs_with(scores, bias))["topk_ids"].tolist() == [[15, 14, 13, 12]]


def test_a_nan_row_has_distinct_experts_of_allowed_groups():
    p = Params(experts=32, hidden=64, top_k=8, n_group=8, topk_group=2, slices=1, warps=1)
    x = np.full((1, 64), np.nan).astype(numpy_dtype("bf16"))
    w = np.ones((32, 64), numpy_dtype("bf16"))
    out = reference(p, {"x": x, "w_gate": w, "bias": np.zeros(32, np.float32)})
    assert out["topk_ids"].tolist() == [list(range(8))]
    assert np.isnan(out["topk_weights"]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slices": 3}, "allows at most 4"),
        ({"tile_e": 64, "row_tile": 64}, "tile_e · row_tile = 4096"),
        ({"x_dtype": "f32", "row_tile": 32}, "at most 512 for f32 · bf16"),
        ({"x_dtype": "f32", "row_tile": 8, "early_weights": True}, "early_weights needs bf16"),
        ({"experts": 96, "tile_e": 64, "row_tile": 8}, "does not divide experts = 96"),
        ({"experts": 32, "n_group": 32, "topk_group": 4}, "leaves 1 of 32 experts per group"),
        ({"topk_group": 2}, "more than n_group = 1"),
        ({"n_group": 32, "topk_group": 1}, "top_k = 4 experts cannot come from 1 groups of 2"),
        ({"experts": 40}, "multiple of 32"),
        ({"hidden": 96}, "multiple of 64"),
        ({"scoring": "tanh"}, "sigmoid"),
    ],
)
def test_parameters_that_cannot_be(change, words):
    with pytest.raises(ValidationError, match=words):
        Params(**{**SMALL, **change})


def test_a_launch_is_chosen_by_the_number_of_rows():
    assert row_tiles(Params(**{**SMALL, "rows": 8})) == (8,)
    assert row_tiles(Params(**{**SMALL, "rows": 17})) == (8, 16, 32)
    launches = contract(Params(**SMALL), get_target("sm_90")).launches
    assert [launch.when for launch in launches] == ["T <= 8", "T > 8 and T <= 16", "T > 16 and T <= 32", "T > 32", ""]


def test_cases_are_beyond_doubt():
    p = Params(**SMALL, n_group=4, topk_group=2)
    names = set()
    for case in FAMILY.cases(p, np.random.default_rng(0)):
        names.add(case.name)
        assert clear_rows(p, case.inputs).all(), case.name
    assert {"T = 65", "every choice negative", "rows of zeros", "a row is NaN", "1 different experts"} <= names


def run(params, inputs, tmp_path):
    kernel = KernelSpec("route", FAMILY, Params(**params))
    (schedule,) = host_schedules(1, 0)
    with Artifacts(get_target("host"), tmp_path) as artifacts:
        kit = load_for(artifacts.directory(Spec.of("route", kernel)), [schedule], "host")[schedule]
        return run_case(kit["route"], inputs, {}, schedule.fill)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_tiles_do_not_change_a_bit(dtype, tmp_path):
    base = {**SMALL, "x_dtype": dtype, "gate_dtype": dtype, "row_tile": 8, "experts": 128, "hidden": 320, "slices": 3}
    rng = np.random.default_rng(3)
    inputs = {
        "x": rng.normal(size=(37, 320)).astype(numpy_dtype(dtype)),
        "w_gate": rng.normal(size=(128, 320)).astype(numpy_dtype(dtype)),
        "bias": rng.normal(size=128).astype(np.float32),
    }
    results = [run({**base, **change}, inputs, tmp_path) for change in ({}, {"tile_e": 64}, {"tile_e": 16, "row_tile": 32})]
    for other in results[1:]:
        for name, value in results[0].items():
            assert value.tobytes() == other[name].tobytes(), name


def test_rows_of_a_large_model_shape(tmp_path):
    """The shape the engine has, with few cases: hidden cut into the parts of the spec that ships."""
    p = {"experts": 384, "hidden": 7168, "top_k": 8, "rows": 2, "scaling": 2.827, "slices": 14, "warps": 8}
    (verdict,) = verify_spec(Spec.of("k", KernelSpec("k", FAMILY, Params(**p))), "host", schedules=2, regroup=2, out=tmp_path)
    assert verdict.passed, verdict.failures
