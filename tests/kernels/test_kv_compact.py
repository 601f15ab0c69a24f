"""The swizzled row layout and the numpy definition of the moves."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.cache_layout import swizzled
from kdgen.kernels.kv_compact import FAMILY, Params, reference

SMALL = {"layers": 2, "width": 128, "depth": 3, "page_size": 8, "max_pages": 8, "sequences": 4}


def test_swizzle_is_its_own_inverse_and_moves_whole_units():
    rows = np.arange(3 * 8 * 128).reshape(3, 8, 128).astype(np.float32)
    assert np.array_equal(swizzled(swizzled(rows)), rows)
    once = swizzled(rows.astype(ml_dtypes.bfloat16))
    unit = 8  # elements of 16 bytes in bf16
    for slot in range(8):
        for u in range(16):
            place = (u // 8) * 8 + (u % 8 ^ slot)
            assert np.array_equal(
                once[0, slot, place * unit : place * unit + unit], rows.astype(ml_dtypes.bfloat16)[0, slot, u * unit : u * unit + unit]
            )


@pytest.mark.parametrize("swizzle", [False, True])
def test_accepted_rows_reach_their_positions_and_no_other_row_changes(swizzle):
    p = Params(**SMALL, dtype="f32", swizzle=swizzle)
    cache = np.random.default_rng(0).normal(size=(2, 6, 8, 128)).astype(np.float32)
    table = np.array([[4, 1, 3, 0, 0, 0, 0, 0]], np.int32)
    inputs = {
        "cache": cache, "page_tables": table, "starts": np.array([6], np.int32),
        "accepted": np.array([[0, 3, 9, -1]], np.int32), "accepted_counts": np.array([3], np.int32),
    }  # fmt: skip
    before = swizzled(cache) if swizzle else cache
    after = reference(p, inputs)["cache"]
    after = swizzled(after) if swizzle else after

    def row(rows, position):
        return rows[:, table[0, position // 8], position % 8]

    assert np.array_equal(row(after, 7), row(before, 9))
    assert np.array_equal(row(after, 8), row(before, 15))
    changed = np.argwhere((after != before).any(axis=(0, 3)))
    assert sorted(map(tuple, changed)) == sorted([(4, 7), (1, 0)])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"width": 12}, "multiple of 16"), ({"width": 96, "swizzle": True}, "128"), ({"page_size": 4, "swizzle": True}, "8 rows")],
)
def test_rows_that_do_not_fit_their_layout_are_refused(change, words):
    base = {**SMALL, "dtype": "bf16" if "width" in change else "f32"}
    with pytest.raises(ValidationError, match=words):
        Params(**{**base, **change})


def test_cases_stay_inside_their_pages():
    p = Params(**SMALL)
    for case in FAMILY.cases(p, np.random.default_rng(1)):
        for s in range(len(case.inputs["starts"])):
            count = case.inputs["accepted_counts"][s]
            last = case.inputs["starts"][s] + case.inputs["accepted"][s, count - 1]
            assert 0 <= last < p.max_pages * p.page_size
