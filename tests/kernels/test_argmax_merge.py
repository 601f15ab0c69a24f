"""Slices and their merge against the whole vocabulary, by the definitions and by the kernels."""

import numpy as np
import pytest

from kdgen.build import build_spec
from kdgen.kernels import argmax, argmax_merge, get_family
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target

RANKS, SLICE = 8, 128
SLICED = argmax.Params(vocab=SLICE, threads=32, loads=1, blocks=16, rows=64)
WHOLE = argmax.Params(vocab=RANKS * SLICE)
MERGE = argmax_merge.Params(ranks=RANKS, rows=64)


@pytest.fixture
def rows():
    return argmax.special_rows(RANKS * SLICE, np.random.default_rng(3))


def slices(rows):
    for rank in range(RANKS):
        yield {"logits": np.ascontiguousarray(rows[:, rank * SLICE :][:, :SLICE]), "first": np.array(rank * SLICE, np.int32)}


def same(got, want):
    return np.array_equal(got["ids"], want["ids"]) and np.array_equal(got["values"], want["values"], equal_nan=True)


def gathered(results, order):
    return {f"rank_{name}": np.stack([results[rank][name] for rank in order]) for name in ("values", "ids")}


@pytest.mark.parametrize("order", [range(RANKS), [5, 0, 7, 2, 1, 6, 4, 3]])
def test_merged_slices_are_the_whole_in_any_order_of_ranks(rows, order):
    want = argmax.reference(WHOLE, {"logits": rows, "first": np.array(0, np.int32)})
    parts = [argmax.reference(SLICED, part) for part in slices(rows)]
    assert same(argmax_merge.reference(MERGE, gathered(parts, order)), want)


def test_the_kernels_give_the_whole_and_a_row_does_not_feel_its_neighbours(rows, tmp_path):
    kernels = [KernelSpec(name, get_family(name), p) for name, p in (("argmax", SLICED), ("argmax_merge", MERGE))]
    build_spec(Spec.of("sliced", *kernels), [get_target("host")], tmp_path)
    device = open_device("host")
    kit = load(tmp_path / "sliced" / "host", device)

    def run(name, inputs, count):
        arrays = {key: value if value.ndim == 0 else device.array(value) for key, value in inputs.items()}
        out = kit[name].allocate(T=count)
        kit[name](**arrays, **out)
        device.synchronize()
        return {key: out[key].numpy().copy() for key in ("values", "ids")}

    parts = [run("argmax", part, len(rows)) for part in slices(rows)]
    pairs = gathered(parts, range(RANKS))
    got = run("argmax_merge", pairs, len(rows))
    assert same(got, argmax.reference(WHOLE, {"logits": rows, "first": np.array(0, np.int32)}))
    for chosen in ([7], [3, 1], np.arange(len(rows))[::-1]):
        part = run("argmax_merge", {key: np.ascontiguousarray(value[:, chosen]) for key, value in pairs.items()}, len(chosen))
        assert all(part[key].tobytes() == got[key][chosen].tobytes() for key in got)


def test_negative_ids_come_last_among_equals_and_nothing_but_nan_keeps_the_lowest_id():
    p = argmax_merge.Params(ranks=3)
    values = np.array([[1, np.nan, 2], [1, np.nan, np.nan], [0, np.nan, 2]], np.float32)
    ids = np.array([[-1, 9, -7], [70, 4, 0], [3, 5, -2]], np.int32)
    result = argmax_merge.reference(p, {"rank_values": values, "rank_ids": ids})
    assert result["ids"].tolist() == [70, 4, -7]
    np.testing.assert_array_equal(result["values"], np.float32([1, np.nan, 2]))
