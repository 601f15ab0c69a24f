import itertools

import pytest

from kdgen.errors import UsageError
from kdgen.sweep.search import GRID_LIMIT, Halving, make_strategy, neighbours, shuffled
from kdgen.sweep.space import Axis, Rule, Space, configuration_id, expression_name, nested, paths_of

SPACE = Space(
    (Axis("a", (1, 2, 3)), Axis("tile.n", (16, 32), when="a > 1", otherwise=64), Axis("c", ("x", "y"))),
    (Rule("tile.n * a <= 64", "it must fit"), Rule("c != 'y' or a < 3")),
    {"a": 1, "tile.n": 16, "c": "x", "target.sms": 188},
)
HUGE = Space(tuple(Axis(f"p{i}", tuple(range(10))) for i in range(9)))


def test_every_point_has_its_own_choices():
    assert SPACE.size == 12
    assert [SPACE.choices(p) for p in range(12)] == list(itertools.product(range(3), range(2), range(2)))
    assert all(SPACE.point_of(SPACE.choices(p)) == p for p in range(12))


def test_a_condition_folds_points_into_one_configuration():
    values = [SPACE.values(p) for p in range(4)]
    assert all(item["tile.n"] == 64 for item in values)
    assert len({configuration_id(item) for item in values}) == 2


def test_a_broken_rule_is_named_with_its_reason():
    assert SPACE.broken_rule({"a": 3, "tile.n": 32, "c": "x"}) == "tile.n * a <= 64 (it must fit)"
    assert SPACE.broken_rule({"a": 3, "tile.n": 16, "c": "y"}) == "c != 'y' or a < 3"
    assert SPACE.broken_rule({"a": 1, "tile.n": 16, "c": "y"}) == ""


def test_a_rule_that_cannot_be_evaluated_turns_a_configuration_down():
    space = Space(SPACE.axes, (Rule("4 // (a - 1) > 0"),), SPACE.fixed)
    assert "division" in space.broken_rule({"a": 1, "tile.n": 64, "c": "x"})


def test_values_are_put_into_mappings_and_lists():
    params = {"tile": {"n": 1, "k": 2}, "launches": [{"stages": 1}, {"stages": 2}], "s": 3}
    assert nested(params, {"tile.n": 9, "launches.1.stages": 8, "s": 0}) == {
        "tile": {"n": 9, "k": 2}, "launches": [{"stages": 1}, {"stages": 8}], "s": 0,
    }  # fmt: skip
    assert params["tile"]["n"] == 1
    for path in ("tile.x", "launches.2.stages", "s.t", "nothing"):
        with pytest.raises(KeyError):
            nested(params, {path: 1})
    assert paths_of(params)["launches.1.stages"] == 2
    assert expression_name("launches.1.stages") == "launches_1_stages"
    assert expression_name("tile.n") == "tile.n"


def test_a_grid_refuses_a_thousand_million_points_and_random_search_does_not():
    assert HUGE.size == 10**9
    with pytest.raises(UsageError, match=f"1,000,000,000 points, a grid visits at most {GRID_LIMIT:,}: use --strategy random"):
        make_strategy("grid", HUGE, 0, None)
    points = [trial.point for trial in make_strategy("random", HUGE, 3, 5).ask(5)]
    assert len(set(points)) == 5
    assert points == [trial.point for trial in make_strategy("random", HUGE, 3, 5).ask(5)]
    assert points != [trial.point for trial in make_strategy("random", HUGE, 4, 5).ask(5)]


def test_random_order_of_a_small_space_visits_every_point_once():
    assert sorted(shuffled(100, 1)) == list(range(100))


def test_an_unknown_strategy_is_named_with_the_known_ones():
    with pytest.raises(UsageError, match="unknown strategy 'anneal'; allowed: grid, random, halving, optuna"):
        make_strategy("anneal", SPACE, 0, None)


def test_halving_keeps_the_best_third_of_each_rung():
    search = Halving(HUGE, 0, 18)
    seen: dict[float, list[int]] = {}
    while trials := search.ask(5):
        for trial in trials:
            seen.setdefault(trial.share, []).append(trial.point)
            search.tell(trial, float(trial.point))
    first, second, last = seen.values()
    assert (len(first), len(second)) == (18, 6)
    assert sorted(first)[:6] == second
    assert second[:2] == last[:2]
    assert len(set(last)) == len(last)
    assert min(last) < second[0], "neighbours of the best come last"


def test_neighbours_differ_in_one_parameter():
    found = [HUGE.choices(point) for point in neighbours(HUGE, HUGE.point_of((0, 5, *[9] * 7)))]
    assert len(found) == 1 + 2 + 7
    assert sum(sum(a != b for a, b in zip(item, (0, 5, *[9] * 7), strict=True)) for item in found) == len(found)
    assert len(neighbours(SPACE, 0)) == 2 + 1 + 1


def test_optuna_repeats_itself_and_learns():
    pytest.importorskip("optuna")

    def search(seed: int) -> list[int]:
        strategy, points = make_strategy("optuna", HUGE, seed, None), []
        for _ in range(8):
            for trial in strategy.ask(8):
                points.append(trial.point)
                digits = HUGE.choices(trial.point)
                strategy.tell(trial, None if digits[0] == 9 else float(sum(digits)))
        return points

    points = search(1)
    assert points == search(1) != search(2)
    sums = [sum(HUGE.choices(point)) for point in points]
    assert min(sums[32:]) < min(sums[:16])
