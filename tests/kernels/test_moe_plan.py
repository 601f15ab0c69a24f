"""The numpy definition of the plan, and that a router's choices go through it."""

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.moe_plan import FAMILY, Params, reference


def test_a_plan_by_hand():
    ids = np.array([[3, 1], [1, 0], [-1, -1], [3, 4]], np.int32)
    out = reference(Params(experts=5, top_k=2), {"topk_ids": ids})
    assert out["expert_offsets"].tolist() == [0, 1, 3, 3, 5, 6]
    assert out["sorted_rows"].tolist() == [3, 1, 2, 0, 6, 7, -1, -1]
    assert out["active_experts"].tolist() == [0, 1, 3, 4, -1]
    assert out["active_count"].tolist() == [4]


def test_every_entry_stands_in_its_experts_list_once():
    p = Params(experts=40, top_k=3, rows=50)
    for case in FAMILY.cases(p, np.random.default_rng(2)):
        out, ids = reference(p, case.inputs), case.inputs["topk_ids"].reshape(-1)
        offsets, listed = out["expert_offsets"], out["sorted_rows"]
        for e in range(p.experts):
            mine = listed[offsets[e] : offsets[e + 1]]
            assert mine.tolist() == np.flatnonzero(ids == e).tolist()
        assert (listed[offsets[-1] :] == -1).all()


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValidationError, match="top_k = 4 is more than experts = 3"):
        Params(experts=3, top_k=4)
