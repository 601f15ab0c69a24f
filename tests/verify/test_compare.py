import ml_dtypes
import numpy as np
import pytest

from kdgen.kernels.base import EXACT, Tolerance
from kdgen.verify.compare import compare, filled, first_change
from kdgen.verify.schedules import device_schedules, host_schedules

LOOSE = Tolerance(1e-3, "test")


def test_exact_finds_one_bit() -> None:
    want = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = want.copy()
    assert compare("y", got, want, EXACT, 0xFF).difference is None
    got[1, 2] = np.nextafter(got[1, 2], np.float32(np.inf))
    difference = compare("y", got, want, EXACT, 0xFF).difference
    assert difference is not None
    assert (difference.index, difference.count, difference.note) == ((1, 2), 1, "")
    assert str(difference).startswith("y[1, 2]: got 6.0000")


def test_exact_tells_zeros_apart() -> None:
    assert compare("y", np.array([-0.0]), np.array([0.0]), EXACT, 0xFF).difference is not None


@pytest.mark.parametrize("fill", [0xFF, 0xA5])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64, np.uint8, ml_dtypes.bfloat16])
def test_an_element_never_written_is_named(dtype: type, fill: int) -> None:
    want = np.ones((2, 3), dtype)
    got = want.copy()
    got[1, 1] = filled((1,), dtype, fill)[0]
    difference = compare("y", got, want, EXACT, fill).difference
    assert difference is not None
    assert (difference.index, difference.note) == ((1, 1), "never written")


def test_minus_one_hides_behind_one_fill_but_not_behind_the_other() -> None:
    want = np.array([-1], np.int32)
    assert compare("y", filled((1,), np.int32, 0xFF), want, EXACT, 0xFF).difference is None
    assert compare("y", filled((1,), np.int32, 0xA5), want, EXACT, 0xA5).difference is not None
    fills = {schedule.fill for schedule in host_schedules(2, 0)}
    assert fills == {schedule.fill for schedule in device_schedules(2)} == {0xFF, 0xA5}


def test_a_written_nan_matches_a_nan_whatever_its_payload() -> None:
    got = np.array([0x7FFFFFFF], np.uint32).view(np.float32)
    want = np.array([np.nan], np.float32)
    assert compare("y", got, want, EXACT, 0xFF).difference is None
    assert compare("y", got, want, LOOSE, 0xFF).difference is None
    untouched = filled((1,), np.float32, 0xFF)
    assert compare("y", untouched, want, EXACT, 0xFF).difference is not None
    assert compare("y", untouched, want, LOOSE, 0xFF).difference is not None


def test_tolerance_is_relative_to_the_largest_value() -> None:
    want = np.array([100.0, 1.0])
    assert compare("y", np.array([100.0, 1.09], np.float32), want, LOOSE, 0xFF).difference is None
    outcome = compare("y", np.array([100.0, 1.2], np.float32), want, LOOSE, 0xFF)
    assert outcome.difference is not None
    assert outcome.error == pytest.approx(0.002, rel=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tolerance_does_not_excuse_non_numbers(value: float) -> None:
    outcome = compare("y", np.array([1.0, value]), np.array([1.0, 1.0]), LOOSE, 0xFF)
    assert outcome.difference is not None
    assert outcome.error == np.inf


def test_equal_infinities_agree() -> None:
    same = np.array([1.0, -np.inf])
    assert compare("y", same, same, LOOSE, 0xFF) == compare("y", same, same.copy(), LOOSE, 0xFF)
    assert compare("y", same, same, LOOSE, 0xFF).difference is None


def test_shape_and_empty() -> None:
    assert compare("y", np.zeros(3), np.zeros(4), EXACT, 0xFF).difference is not None
    assert compare("y", np.zeros((0, 4)), np.zeros((0, 4)), EXACT, 0xFF).difference is None


def test_first_change() -> None:
    a = np.zeros((2, 2), np.float32)
    b = a.copy()
    assert first_change("y", a, b) is None
    b[1, 0] = -0.0
    change = first_change("y", a, b)
    assert change is not None
    assert (change.index, change.want, change.got) == ((1, 0), "0.0", "-0.0")


def test_schedules_are_distinct_and_follow_the_seed() -> None:
    plan = host_schedules(6, 3)
    assert [s.order for s in plan[:3]] == ["in_order", "reverse", "random"]
    assert [s.copies for s in plan[:3]] == ["earliest", "latest", "random"]
    assert len({(s.order, s.seed) for s in plan}) == 6
    assert plan == host_schedules(6, 3)
    assert {s.seed for s in plan[2:]}.isdisjoint(s.seed for s in host_schedules(6, 4)[2:])
    assert len(host_schedules(1, 0)) == 1
