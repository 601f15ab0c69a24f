"""The definition of the most probable tokens, slices and their merge against the whole vocabulary, and the draft tree they feed."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.build import build_spec
from kdgen.kernels import get_family, topk_logprob, topk_logprob_merge, tree_build
from kdgen.kernels.argmax import special_rows
from kdgen.kernels.topk_logprob import MOST_CANDIDATES, Params, capacity, groups, reference
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target

NAN, INFINITY = float("nan"), float("inf")

RANKS, SLICE, TOP_K, DEPTH = 8, 192, 6, 5
CUT = {"chunk": 256, "threads": 64}
KERNELS = {
    "whole": ("topk_logprob", Params(vocab=RANKS * SLICE, top_k=TOP_K, rows=64, **CUT)),
    "fewer": ("topk_logprob", Params(vocab=RANKS * SLICE, top_k=2, rows=64, **CUT)),
    "part": ("topk_logprob", Params(vocab=SLICE, top_k=TOP_K, slice=True, rows=64, **CUT)),
    "merge": ("topk_logprob_merge", topk_logprob_merge.Params(ranks=RANKS, top_k=TOP_K, rows=64)),
    "logs": ("topk_logprob_merge", topk_logprob_merge.Params(ranks=1, top_k=1, rows=20_000)),
    "tree": ("tree_build", tree_build.Params(depth=DEPTH, top_k=TOP_K, budget=12, sequences=4)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a kernel of `KERNELS` on the host: name, inputs, dimensions → outputs."""
    out = tmp_path_factory.mktemp("built")
    build_spec(
        Spec.of("all", *(KernelSpec(name, get_family(family), p) for name, (family, p) in KERNELS.items())), [get_target("host")], out
    )
    device = open_device("host")
    kit = load(out / "all" / "host", device)

    def call(name, inputs, **dimensions):
        arrays = {key: value if np.ndim(value) == 0 else device.array(value) for key, value in inputs.items()}
        allocated = kit[name].allocate(**dimensions)
        kit[name](**arrays, **allocated)
        device.synchronize()
        written = {argument.name for argument in kit[name].contract.arguments if argument.role == "out"}
        return {key: array.numpy().copy() for key, array in allocated.items() if key in written}

    return call


@pytest.fixture
def rows():
    rng = np.random.default_rng(3)
    special = special_rows(RANKS * SLICE, rng)
    return np.concatenate([special, 3 * rng.normal(size=(20, RANKS * SLICE)).astype(np.float32)])


def logits_of(rows, first=0):
    return {"logits": np.ascontiguousarray(rows), "first": np.array(first, np.int32)}


def found_by_ranks(run, rows, order):
    parts = [run("part", logits_of(rows[:, rank * SLICE :][:, :SLICE], rank * SLICE), T=len(rows)) for rank in order]
    return {f"rank_{name}": np.stack([part[name] for part in parts]) for name in ("values", "ids", "maxima", "sums")}


def close(got, want):
    same = np.array_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    return same and np.allclose(got[finite], want[finite], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("row", "ids", "probabilities"),
    [
        ([1, 3, 2, 3], [101, 103, 102], np.exp([0, 0, -1]) / (2 + np.exp(-1) + np.exp(-2))),
        ([-0.0, 0.0, -1, 0.0], [100, 101, 103], np.full(3, 1 / (3 + np.exp(-1)))),
        ([NAN, 5, -INFINITY, NAN], [101, 100, 102], [1, 0, 0]),
        ([NAN, 5, INFINITY, INFINITY], [102, 103, 101], [0.5, 0.5, 0]),
        ([NAN, NAN, NAN, NAN], [100, 101, 102], [0, 0, 0]),
        ([-INFINITY, NAN, -INFINITY, NAN], [100, 101, 102], [0, 0, 0]),
        ([-1e4, NAN, -1e4, 1e4], [103, 100, 102], [1, 0, 0]),
    ],
)
def test_the_largest_logits_win_and_of_equals_the_lowest_id(row, ids, probabilities):
    result = reference(Params(vocab=4, top_k=3), logits_of(np.array([row], np.float32), 100))
    assert result["ids"].tolist() == [ids]
    np.testing.assert_allclose(np.exp(result["log_probs"][0]), probabilities, rtol=1e-12)


def test_without_special_values_it_is_a_sorted_log_softmax():
    for dtype, name in ((np.float32, "f32"), (ml_dtypes.bfloat16, "bf16")):
        logits = np.random.default_rng(0).normal(size=(20, 512)).astype(dtype)
        wide = logits.astype(np.float64)
        softmax = np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
        result = reference(Params(vocab=512, top_k=9, dtype=name), logits_of(logits))
        np.testing.assert_allclose(np.exp(result["log_probs"]), -np.sort(-softmax)[:, :9], rtol=1e-12)
        assert np.array_equal(np.take_along_axis(wide, result["ids"], axis=1), -np.sort(-wide)[:, :9])


@pytest.mark.parametrize("order", [range(RANKS), [5, 0, 7, 2, 1, 6, 4, 3]])
def test_merged_slices_are_the_whole_in_any_order_of_ranks(run, rows, order):
    want = run("whole", logits_of(rows), T=len(rows))
    merged = run("merge", found_by_ranks(run, rows, order), T=len(rows))
    assert np.array_equal(merged["ids"], want["ids"])
    assert close(merged["log_probs"], want["log_probs"])
    assert close(want["log_probs"], reference(KERNELS["whole"][1], logits_of(rows))["log_probs"])


def test_a_merged_row_does_not_feel_its_neighbours(run, rows):
    pairs = found_by_ranks(run, rows, range(RANKS))
    whole = run("merge", pairs, T=len(rows))
    for chosen in ([7], [3, 1], np.arange(len(rows))[::-1]):
        part = run("merge", {key: np.ascontiguousarray(value[:, chosen]) for key, value in pairs.items()}, T=len(chosen))
        assert all(part[key].tobytes() == whole[key][chosen].tobytes() for key in whole)


def test_how_many_tokens_are_asked_for_changes_no_bit_of_the_first(run, rows):
    more, fewer = (run(name, logits_of(rows), T=len(rows)) for name in ("whole", "fewer"))
    assert all(np.ascontiguousarray(more[key][:, :2]).tobytes() == fewer[key].tobytes() for key in more)


def test_a_row_of_nothing_but_nan_gives_the_lowest_ids_and_no_probability(run):
    nothing = np.full((2, RANKS * SLICE), NAN, np.float32)
    nothing[1] = -INFINITY
    for result in (run("whole", logits_of(nothing), T=2), run("merge", found_by_ranks(run, nothing, range(RANKS)), T=2)):
        assert result["ids"].tolist() == [list(range(TOP_K))] * 2
        assert np.isneginf(result["log_probs"]).all()


def test_the_logarithm_is_right_within_one_unit_in_the_last_place(run):
    rng = np.random.default_rng(1)
    sums = np.concatenate([np.exp2(rng.uniform(0, 31, size=9_000)), 1 + rng.uniform(0, 1, size=9_000), 2.0 ** np.arange(31)])
    sums = sums.astype(np.float32)
    inputs = {"rank_values": np.zeros((1, len(sums), 1), np.float32), "rank_ids": np.zeros((1, len(sums), 1), np.int32)}
    inputs |= {"rank_maxima": np.zeros((1, len(sums)), np.float32), "rank_sums": sums[None]}
    got = -run("logs", inputs, T=len(sums))["log_probs"][:, 0].astype(np.float64)
    want = np.log(sums.astype(np.float64))
    assert np.all(np.abs(got - want) <= np.spacing(want.astype(np.float32)))
    assert got[sums == 1].tolist() == [0.0]


def test_what_comes_out_goes_into_the_draft_tree(run):
    sequences = 3
    logits = 4 * np.random.default_rng(2).normal(size=(sequences * DEPTH, RANKS * SLICE)).astype(np.float32)
    logits[DEPTH + 2] = NAN  # the second sequence has nothing to offer beyond depth 2
    found = run("whole", logits_of(logits), T=len(logits))
    inputs = {
        "log_probs": found["log_probs"].reshape(sequences, DEPTH, TOP_K),
        "token_ids": found["ids"].reshape(sequences, DEPTH, TOP_K),
        "root_tokens": np.full(sequences, 7, np.int32),
        "starts": np.zeros(sequences, np.int32),
        "budgets": np.full(sequences, 12, np.int32),
    }
    tree = run("tree", inputs, S=sequences)
    want = tree_build.reference(KERNELS["tree"][1], inputs)
    assert all(np.array_equal(tree[name], want[name]) for name in ("tokens", "parents", "depths", "counts"))
    assert (tree["counts"] == 13).all()
    assert tree["depths"][1].max() == 2
    assert tree["tokens"][:, 1].tolist() == logits[::DEPTH].argmax(axis=1).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 16, 17, 33, 64])
@pytest.mark.parametrize("threads", [64, 128, 256, 512, 1024])
def test_candidates_of_a_chunk_fit_whatever_the_logits(top_k, threads):
    count = groups(top_k, threads)
    assert top_k <= count <= threads
    assert count % 32 == threads % count == 0
    assert threads // count <= 32
    largest = min(16384, 32 * threads)
    assert capacity(top_k, threads, largest) <= MOST_CANDIDATES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab": 1002}, "multiple of 4"),
        ({"vocab": 1004, "dtype": "bf16"}, "pad them"),
        ({"vocab": 16, "top_k": 17}, "not as many"),
        ({"chunk": 1000}, "multiple of 1024"),
        ({"chunk": 16384}, "more threads"),
        ({"top_k": 65}, "64"),
        ({"threads": 96}, "64, 128"),
        ({"vocab": 1 << 20, "top_k": 64, "chunk": 1024}, "larger chunk"),
        ({"vocab": 1 << 24}, "4096 chunks of 4096"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        Params.model_validate({"vocab": 1024, "top_k": 4, **change})


def test_seven_draft_positions_are_as_many_blocks_as_fill_a_gpu():
    scan, join = topk_logprob.FAMILY.contract(Params(vocab=163_840, top_k=16), get_target("sm_120")).launches
    assert (scan.grid, join.grid) == ((40, "T", 1), ("T", 1, 1))
