"""The definition of the gather, and parameters that do not fit."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.embed import FAMILY, Params, reference

BF16 = ml_dtypes.bfloat16


def test_the_slices_of_all_ranks_add_up_to_the_whole_table():
    rng = np.random.default_rng(0)
    p = Params(hidden=16, out="f32")
    table = rng.normal(size=(40, 16)).astype(BF16)
    ids = np.array([0, 39, 9, 10, 11, 40, -1, 25, 25], np.int32)
    parts = [
        reference(p, {"ids": ids, "table": table[first : first + 10], "first": np.array(first, np.int32)})["out"]
        for first in range(0, 40, 10)
    ]
    whole = np.where(((ids >= 0) & (ids < 40))[:, None], table.astype(np.float32)[np.clip(ids, 0, 39)], 0)
    assert np.array_equal(sum(parts), whole)
    assert all(sum(part[row].any() for part in parts) == whole[row].any() for row in range(len(ids)))


def test_values_are_copied_bit_for_bit():
    p = Params(hidden=8)
    table = np.arange(1 << 16, dtype=np.uint16).view(BF16).reshape(-1, 8)
    ids = np.arange(0, len(table), 7, dtype=np.int32)
    out = reference(p, {"ids": ids, "table": table, "first": np.array(0, np.int32)})["out"]
    assert np.array_equal(out.view(np.uint16), table[ids].view(np.uint16))


def test_cases_hold_ids_on_both_sides_of_the_slice():
    for case in FAMILY.cases(Params(hidden=8), np.random.default_rng(0)):
        ids, first, rows = case.inputs["ids"].astype(np.int64), int(case.inputs["first"]), len(case.inputs["table"])
        if "slice" in case.name:
            assert ((ids >= first) & (ids < first + rows)).any()
            assert (ids < first).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 12}, "multiple of 8"),
        ({"hidden": 18, "out": "f32"}, "multiple of 4"),
        ({"dtype": "f32", "out": "bf16"}, "never rounded"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        Params.model_validate({"hidden": 16, **change})
