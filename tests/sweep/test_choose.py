from dataclasses import replace

import pytest

from kdgen.sweep.choose import by_configuration, choose, correlations, rank_correlation, score_of
from kdgen.sweep.model import Objective
from kdgen.sweep.stages import Row, Stage
from kdgen.sweep.workloads import Shape

SHAPES = (Shape("T = 1", 2.0, "few"), Shape("T = 64", 1.0, "many"))


def rows_of(times, stage=Stage.MEASURED, spread=0.0):
    found = []
    for name, (first, second) in times.items():
        found.append(Row(name, "", stage, values={"id": name}))
        for shape, value, base in zip(SHAPES, (first, second), (10.0, 100.0), strict=True):
            found.append(Row(name, shape.name, stage, "", {}, value, "mma", value, value * (1 - spread), value * (1 + spread), base))
    return by_configuration(found)


def test_the_score_is_a_weighted_geometric_mean():
    times = {"T = 1": (5.0, 10.0), "T = 64": (400.0, 100.0)}
    assert score_of(times, SHAPES, Objective()) == pytest.approx((0.5**2 * 4) ** (1 / 3))
    assert score_of(times, SHAPES, Objective(score="total")) == pytest.approx((2 * 5 + 400) / 3)


def test_each_bucket_has_its_own_best():
    rows = rows_of({"a": (8.0, 100.0), "b": (10.0, 60.0), "base": (10.0, 100.0)})
    found = {choice.bucket: choice.configuration for choice in choose(rows, "base", SHAPES, Objective())}
    assert found == {"all": "b", "few": "a", "many": "b"}
    one = choose(rows, "base", SHAPES[:1], Objective())
    assert [choice.bucket for choice in one] == ["all"]
    assert one[0].times == {"T = 1": (8.0, 10.0)}


def test_ties_go_to_the_base_and_then_to_the_smallest_id():
    rows = rows_of({"c": (8.00, 80.0), "b": (8.05, 80.0), "d": (8.02, 80.1), "base": (10.0, 100.0)})
    (choice, *_) = choose(rows, "base", SHAPES, Objective(noise=0.01))
    assert (choice.configuration, choice.ties) == ("b", 3)
    assert choice.best < choice.score
    (exact, *_) = choose(rows, "base", SHAPES, Objective(noise=0.0))
    assert exact.configuration == "c"
    near = rows_of({"a": (9.95, 99.5), "base": (10.0, 100.0)})
    assert choose(near, "base", SHAPES, Objective())[0].configuration == "base", "nothing is changed for nothing"


def test_noisy_timings_make_wider_ties():
    times = {"c": (8.0, 80.0), "a": (8.2, 82.0)}
    assert choose(rows_of(times), "base", SHAPES, Objective())[0].configuration == "c"
    assert choose(rows_of(times, spread=0.03), "base", SHAPES, Objective())[0].configuration == "a"


def test_what_is_wrong_or_lacks_a_shape_is_not_chosen():
    rows = rows_of({"a": (1.0, 1.0), "b": (9.0, 90.0), "base": (10.0, 100.0)})
    rows["a"][""] = replace(rows["a"][""], stage=Stage.WRONG)
    assert choose(rows, "base", SHAPES, Objective())[0].configuration == "b"
    del rows["b"]["T = 64"]
    assert {c.bucket: c.configuration for c in choose(rows, "base", SHAPES, Objective())} == {"all": "base", "few": "b", "many": "base"}
    assert choose({}, "base", SHAPES, Objective()) == ()


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 40)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert rank_correlation([(1, 1), (1, 2), (2, 3), (3, 3)]) == pytest.approx(8 / 9)
    assert rank_correlation([(1, 1), (2, 2)]) is None
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None
    found = correlations(rows_of({"a": (1.0, 5.0), "b": (2.0, 6.0), "c": (3.0, 7.0)}), ["T = 1", "T = 64", "T = 3"])
    assert found == {"T = 1": pytest.approx(1.0), "T = 64": pytest.approx(1.0)}
