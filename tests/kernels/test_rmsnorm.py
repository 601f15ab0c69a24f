"""The norm against float64 and against its rounding order, and parameters that do not fit."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.rmsnorm import FAMILY, Params, random_inputs, reference, sum_of_squares
from kdgen.targets import get_target

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize(("hidden", "threads"), [(64, 512), (7168, 896), (7168, 256), (16380, 1024), (100, 32)])
def test_the_sum_is_that_of_float64_to_a_few_ulps(hidden, threads):
    p = Params(hidden=hidden, eps=1e-5, x="f32", out="f32", threads=threads)
    rows = np.random.default_rng(0).normal(size=(4, hidden)).astype(np.float32)
    exact = (rows.astype(np.float64) ** 2).sum(axis=1)
    # Squares are rounded, then at most unit tree + slots + two warps' trees additions, all of one sign.
    depth = 1 + 3 + p.slots + 10
    assert (np.abs(sum_of_squares(p, rows) - exact) <= exact * depth * 2.0**-24).all()


def test_outputs_are_those_of_float64_within_their_rounding():
    rng = np.random.default_rng(1)
    for out, bound in (("f32", 2.0**-20), ("bf16", 2.0**-7)):
        p = Params(hidden=256, eps=1e-5, x="bf16", residual="f32", weight="f32", out=out)
        inputs = random_inputs(p, rng, 8)
        v = inputs["residual"].astype(np.float64) + inputs["x"].astype(np.float64)
        want = v / np.sqrt((v * v).mean(axis=1, keepdims=True) + p.eps) * inputs["weight"]
        got = reference(p, inputs)["out"].astype(np.float64)
        assert (np.abs(got - want) <= np.abs(want) * bound).all()


def test_bf16_is_rounded_before_the_weight_and_after_it():
    p = Params(hidden=64, eps=0.0)
    inputs = random_inputs(p, np.random.default_rng(2), 1)
    x, weight = (inputs[name].astype(np.float32) for name in ("x", "weight"))
    r = np.float32(1) / np.sqrt(sum_of_squares(p, x) / np.float32(64))
    twice = ((x * r).astype(BF16).astype(np.float32) * weight).astype(BF16)
    got = reference(p, inputs)["out"]
    assert np.array_equal(got, twice)
    assert not np.array_equal(got, (x * r * weight).astype(BF16))


def test_the_residual_is_rounded_when_stored_and_normed_as_stored():
    p = Params(hidden=8, eps=0.0, residual="bf16")
    inputs = {"x": np.full((1, 8), 1.0, BF16), "residual": np.full((1, 8), 512.0, BF16), "weight": np.full(8, 1.0, BF16)}
    result = reference(p, inputs)
    assert (result["residual"] == 512).all()  # 513 lies between two bf16 numbers
    assert (result["out"] == 1).all()
    assert (inputs["residual"] == 512).all()


def test_a_row_of_zeros_gives_zeros():
    p = Params(hidden=64, eps=1e-6, x="f32", out="f32")
    result = reference(p, {"x": np.zeros((2, 64), np.float32), "weight": np.ones(64, BF16)})
    assert not result["out"].any()


def test_what_decides_bits_is_pinned():
    pinned = [FAMILY.contract(Params(hidden=7168, eps=1e-5, threads=t), get_target("sm_120")).pinned for t in (448, 896)]
    assert pinned[0] != pinned[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 60}, "multiple of 8"),
        ({"hidden": 66, "x": "f32"}, "multiple of 4"),
        ({"hidden": 16384, "threads": 256}, "leaves 64 values"),
        ({"threads": 100}, "multiple of 32"),
        ({"eps": -1e-5}, "greater than or equal to 0"),
        ({"x": "f16"}, "'bf16' or 'f32'"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        Params.model_validate({"hidden": 64, "eps": 1e-5, **change})


def test_a_narrower_unit_allows_rows_that_are_multiples_of_8_bytes():
    assert Params(hidden=60, eps=1e-5, residual="f32").unit == 4
