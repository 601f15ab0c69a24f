"""The definition of the largest logit, the cut of rows into parts, and parameters that do not fit."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.expressions import evaluate
from kdgen.kernels.argmax import FAMILY, Params, reference, special_rows
from kdgen.targets import get_target

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "value", "column"),
    [
        ([1, 3, 2, 3], 3, 1),
        ([-0.0, 0.0, -1, 0.0], 0, 0),
        ([NAN, -INFINITY, NAN, -INFINITY], -INFINITY, 1),
        ([NAN, 5, INFINITY, NAN], INFINITY, 2),
        ([-3, -2, -4, NAN], -2, 1),
        ([NAN, NAN, NAN, NAN], NAN, 0),
    ],
)
def test_the_largest_number_wins_and_of_equals_the_lowest_id(row, value, column):
    result = reference(Params(vocab=4), {"logits": np.array([row], np.float32), "first": np.array(100, np.int32)})
    assert result["ids"].tolist() == [100 + column]
    np.testing.assert_array_equal(result["values"], np.float32([value]))
    assert not np.signbit(result["values"][0]) or value < 0 or np.isnan(value)


def test_without_special_values_it_is_numpys():
    for dtype in (np.float32, ml_dtypes.bfloat16):
        logits = np.random.default_rng(0).normal(size=(20, 512)).astype(dtype)
        name = "f32" if dtype is np.float32 else "bf16"
        result = reference(Params(vocab=512, dtype=name), {"logits": logits, "first": np.array(0, np.int32)})
        assert np.array_equal(result["ids"], logits.astype(np.float32).argmax(axis=1))


def test_special_rows_hold_what_their_names_say():
    rows = special_rows(64, np.random.default_rng(0))
    assert np.isnan(rows).all(axis=1).sum() == 1
    assert (rows == -np.inf).all(axis=1).sum() == 1
    assert np.signbit(rows[np.isnan(rows)]).any()
    assert not np.signbit(rows[np.isnan(rows)]).all()


def test_rows_are_cut_only_while_there_are_few():
    p = Params(vocab=163_840, blocks=384)
    launch, join = FAMILY.contract(p, get_target("sm_120")).launches
    parts = {rows: evaluate(str(launch.grid[1]), {"T": rows}) for rows in (0, 1, 8, 9, 10, 64, 192, 193, 512)}
    assert parts == {0: 40, 1: 40, 8: 40, 9: 40, 10: 38, 64: 6, 192: 2, 193: 1, 512: 1}
    for rows, count in parts.items():
        assert evaluate(join.when, {"T": rows}) == (count > 1)
        assert count <= p.most_parts


def test_short_rows_need_neither_a_second_launch_nor_a_workspace():
    contract = FAMILY.contract(Params(vocab=4096), get_target("sm_120"))
    assert len(contract.launches) == 1
    assert "workspace" not in {argument.role for argument in contract.arguments}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": 1002}, "multiple of 4"),
        ({"vocab": 1004, "dtype": "bf16"}, "pad them"),
        ({"threads": 48}, "32"),
        ({"loads": 3}, "1, 2, 4"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        Params.model_validate({"vocab": 1024, **change})
