"""The rows of a round against what attention and the cache need of them."""

import numpy as np

from kdgen.kernels import attention_plan
from kdgen.kernels.tree_rows import FAMILY, Params, random_trees, reference


def test_real_rows_are_the_nodes_in_order():
    p = Params(depth=5, budget=30, sequences=6)
    for seed in range(5):
        inputs = random_trees(p, np.random.default_rng(seed), 6)
        inputs["active"][3] = 0
        out = reference(p, inputs)
        for s in range(6):
            mine = np.flatnonzero(out["row_sequences"] == s)
            count = inputs["counts"][s] if inputs["active"][s] else 0
            assert list(mine) == list(range(s * p.nodes, s * p.nodes + count))
            assert list(out["row_slots"][mine]) == list(inputs["starts"][s] + np.arange(count))
            assert list(out["ids"][mine]) == list(inputs["tokens"][s, :count])
            assert list(out["row_positions"][mine]) == list(inputs["starts"][s] + out["row_depths"][mine])


def test_padding_is_told_by_every_output():
    p = Params(depth=4, budget=20, sequences=9)
    for case in FAMILY.cases(p, np.random.default_rng(3)):
        out = reference(p, case.inputs)
        padding = out["row_sequences"] < 0
        assert padding.size == len(case.inputs["tokens"]) * len(case.inputs["nodes"])
        assert ((out["row_slots"] < 0) == padding).all(), case.name
        for name in ("ids", "row_positions", "row_depths"):
            assert (out[name][padding] == 0).all(), case.name
        assert (out["row_paths"][padding] == [0, *[255] * 15]).all(), case.name


def test_a_sequence_does_not_move_another():
    p = Params(depth=4, budget=9, sequences=8)
    inputs = random_trees(p, np.random.default_rng(5), 8)
    whole, order = reference(p, inputs), np.random.default_rng(6).permutation(8)
    part = reference(p, {name: value if name == "nodes" else value[order] for name, value in inputs.items()})
    for name in set(whole) - {"row_sequences"}:
        split = whole[name].reshape(8, p.nodes, -1), part[name].reshape(8, p.nodes, -1)
        assert (split[0][order] == split[1]).all(), name


def test_attention_takes_the_rows_as_they_are():
    p = Params(depth=5, budget=12, sequences=3)
    inputs = random_trees(p, np.random.default_rng(7), 3)
    inputs["starts"] %= 500
    inputs["active"][1] = 0
    rows = reference(p, inputs)
    plan = attention_plan.Params(heads=8, rows=64, sequences=3, page_size=32, max_pages=64, depth=5)
    units = np.zeros((len(rows["ids"]) * plan.units_per_row, attention_plan.RECORD), np.int32)
    names = ("row_sequences", "row_depths", "row_paths")
    out = attention_plan.reference(plan, {"starts": inputs["starts"], **{name: rows[name] for name in names}, "units": units})
    assert ((out["row_parts"] >= 0) == (rows["row_sequences"] >= 0)).all()
