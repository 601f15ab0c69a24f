"""The drafter that knows: how often it hits, that it errs where it should, and that batch mates do not matter."""

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.draft_oracle import FAMILY, Params, mix, reference


def draft(p, truth, starts, rates=1.0, ranks=0, seed=1):
    return reference(
        p,
        {
            "truth": np.asarray(truth, np.int32),
            "starts": np.asarray(starts, np.int32),
            "hit_rates": np.full(p.depth, rates, np.float32),
            "ranks": np.full(p.depth, ranks, np.int32),
            "seed": np.array([seed], np.uint32),
        },
    )


def test_candidates_are_distinct_tokens_with_falling_log_probs():
    for p in (Params(depth=4, top_k=9, positions=60, vocab=10), Params(depth=7, top_k=16, positions=60, vocab=163_840)):
        for case in FAMILY.cases(p, np.random.default_rng(0)):
            out = reference(p, case.inputs)
            tokens = np.sort(out["token_ids"], axis=2)
            assert (np.diff(tokens, axis=2) > 0).all(), case.name
            assert (tokens >= 0).all()
            assert (tokens < p.vocab).all()
            assert (np.diff(out["log_probs"], axis=2) < 0).all()
            assert (out["log_probs"] < 0).all()
            assert (np.exp(out["log_probs"].astype(np.float64)).sum(axis=2) <= 1 + 1e-6).all()


def test_hits_stand_at_their_rank_and_misses_nowhere():
    p = Params(depth=3, top_k=4, positions=2000, vocab=100)
    truth = np.random.default_rng(1).integers(0, p.vocab, size=(1, p.positions))
    hits = np.zeros(p.depth)
    for start in range(1900):
        tokens = draft(p, truth, [start], rates=0.3, ranks=2)["token_ids"][0]
        for d in range(p.depth):
            found = np.flatnonzero(tokens[d] == truth[0, start + d + 1])
            assert list(found) in ([], [2])
            hits[d] += len(found)
    assert (abs(hits / 1900 - 0.3) < 0.04).all()


def test_unknown_truths_are_never_hit_and_rates_above_1_always():
    p = Params(depth=4, top_k=3, positions=40, vocab=20)
    truth = np.arange(40)[None] % 20
    always = draft(p, truth, [10])
    assert list(always["token_ids"][0, :, 0]) == [11, 12, 13, 14]
    unknown = np.full((1, 40), -1)
    never = draft(p, unknown, [10], seed=1)
    assert (never["log_probs"] == always["log_probs"]).all()


def test_seed_and_position_decide_and_not_the_sequence():
    p = Params(depth=3, top_k=4, positions=100, vocab=1000)
    truth = np.random.default_rng(2).integers(0, p.vocab, size=(1, 100))
    alone = draft(p, truth, [40], rates=0.5)
    among = draft(p, np.repeat(truth, 3, axis=0), [7, 90, 40], rates=0.5)
    assert (among["token_ids"][2] == alone["token_ids"][0]).all()
    # The same position is drafted alike at another depth.
    earlier = draft(p, truth, [39], rates=0.5)
    assert (earlier["token_ids"][0, 1:] == alone["token_ids"][0, :-1]).all()
    assert (draft(p, truth, [40], rates=0.5, seed=2)["token_ids"] != alone["token_ids"]).any()


def test_mix_is_the_published_finaliser():
    # Fixed points of the definition: 0 stays 0, and 1 gives the value that MurmurHash3's fmix32 gives.
    assert mix(0) == 0
    assert mix(1) == 0x514E28B7


def test_a_vocabulary_without_enough_wrong_tokens_is_refused():
    with pytest.raises(ValidationError, match="at least top_k \\+ 1 = 5"):
        Params(depth=1, top_k=4, positions=4, vocab=4)
