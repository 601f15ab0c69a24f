"""The sum by hand, its fused multiply-adds against exact fractions, and parameters that do not fit."""

from fractions import Fraction

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.moe_combine import FAMILY, Params, fma, random_inputs, reference
from kdgen.targets import get_target


def test_a_sum_by_hand():
    p = Params(experts=5, top_k=3, hidden=4, shared="f32", residual="f32", out_dtype="f32")
    inputs = {
        "y": np.array([[[1, 2, 3, 4], [np.nan] * 4, [10, 20, 30, 40]]], np.float32),
        "topk_ids": np.array([[4, 5, 0]], np.int32),
        "topk_weights": np.array([[0.5, 7.0, 0.25]], np.float32),
        "shared": np.array([[100, 200, 300, 400]], np.float32),
        "residual": np.array([[1000, 2000, 3000, 4000]], np.float32),
    }
    assert reference(p, inputs)["out"].tolist() == [[1103, 2206, 3309, 4412]]


def nearest(value):
    """A fraction rounded once to float32, to nearest even, by search among the neighbours of a first guess."""
    guess = np.float32(float(value))
    candidates = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    distances = [abs(Fraction(float(c)) - value) for c in candidates]
    best = min(distances)
    equal = [c for c, d in zip(candidates, distances, strict=True) if d == best]
    return next((c for c in equal if not c.view(np.uint32) & 1), equal[0])


def test_the_reference_rounds_a_multiply_add_once():
    rng = np.random.default_rng(0)
    # Bits far below a tie: where a float64 sum, rounded again, would go wrong.
    a = np.concatenate([rng.normal(size=500), [1 + 2.0**-23] * 2]).astype(np.float32)
    b = np.concatenate([rng.normal(size=500) * 2.0 ** rng.integers(-40, 40, 500), [2.0**-25, -(2.0**-25)]]).astype(np.float32)
    c = np.concatenate([rng.normal(size=500), [1 + 2.0**-23, 1 + 2.0**-22]]).astype(np.float32)
    got = fma(a, b, c)
    for x, y, z, result in zip(a, b, c, got, strict=True):
        assert result == nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))), (x, y, z)


def test_double_rounding_would_show():
    # 1 + 2^-24 + 2^-60: just above a tie of float32, which float64 cannot tell from the tie.
    a, b, c = (np.array([v], np.float32) for v in (2.0**-24 * (1 + 2.0**-20), 1 + 2.0**-20, 1.0))
    third = np.array([2.0**-60], np.float32)
    assert fma(np.array([1.0], np.float32), third, np.array([1.0], np.float32))[0] == 1.0
    assert fma(a, b, c)[0] == np.float32(1 + 2.0**-23)


def test_rows_are_those_of_float64_within_their_rounding():
    for out, bound in (("f32", 2.0**-20), ("bf16", 2.0**-8)):
        p = Params(experts=16, top_k=8, hidden=64, shared="bf16", residual="bf16", out_dtype=out)
        inputs = random_inputs(p, np.random.default_rng(1), 6)
        wide = {name: value.astype(np.float64) for name, value in inputs.items()}
        want = (wide["y"] * wide["topk_weights"][..., None]).sum(axis=1) + wide["shared"] + wide["residual"]
        assert np.abs(reference(p, inputs)["out"].astype(np.float64) - want).max() <= np.abs(want).max() * bound


def test_arguments_are_those_the_parameters_ask_for():
    names = [a.name for a in FAMILY.contract(Params(experts=8, top_k=2, hidden=64), get_target("sm_120")).arguments]
    assert names == ["y", "topk_ids", "topk_weights", "out"]
    p = Params(experts=8, top_k=2, hidden=64, residual="bf16")
    assert "residual" in [a.name for a in FAMILY.contract(p, get_target("host")).arguments]


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValidationError, match="top_k = 4 is more than experts = 3"):
        Params(experts=3, top_k=4, hidden=64)
