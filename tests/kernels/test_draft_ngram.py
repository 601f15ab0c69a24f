"""Prompt lookup against a search token by token."""

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.kernels.draft_ngram import FAMILY, Params, reference


def search(p, tokens):
    """Candidates by depth, and the match length, for a sequence given as a list."""
    start = len(tokens) - 1

    def match(e):
        n = 0
        while n < p.n_max and e - n >= 0 and tokens[e - n] == tokens[start - n] >= 0:
            n += 1
        return n

    n = max((match(e) for e in range(start)), default=0)
    if n < p.n_min:
        return [[] for _ in range(p.depth)], 0
    places = [e for e in range(start - 1, -1, -1) if match(e) == n][: p.top_k]
    out = []
    for d in range(1, p.depth + 1):
        found = []
        for e in places:
            if e + d <= start and tokens[e + d] >= 0 and tokens[e + d] not in found:
                found.append(tokens[e + d])
        out.append(found)
    return out, n


def one(p, tokens):
    history = np.full((1, p.positions), 999, np.int32)
    history[0, : len(tokens) - 1] = tokens[:-1]
    starts, roots = np.array([len(tokens) - 1], np.int32), np.array(tokens[-1:], np.int32)
    out = reference(p, {"history": history, "starts": starts, "root_tokens": roots})
    return [
        [int(t) for t, lp in zip(*row, strict=True) if lp > -1e30] for row in zip(out["token_ids"][0], out["log_probs"][0], strict=True)
    ]


def test_definition_is_the_search():
    p = Params(depth=4, top_k=3, positions=200, n_max=4, n_min=2)
    drafted = 0
    for case in FAMILY.cases(p, np.random.default_rng(0)):
        out, x = reference(p, case.inputs), case.inputs
        for s, start in enumerate(x["starts"].tolist()):
            tokens = [*x["history"][s, :start].tolist(), int(x["root_tokens"][s])] if 0 <= start < p.positions else [1]
            wanted, n = search(p, tokens)
            for d, found in enumerate(wanted):
                assert list(out["token_ids"][s, d]) == found + [0] * (p.top_k - len(found)), (case.name, s, d)
                assert (np.isfinite(out["log_probs"][s, d]) == (np.arange(p.top_k) < len(found))).all()
            drafted += n > 0
    assert drafted > 30


def test_examples():
    p = Params(depth=3, top_k=2, positions=50, n_max=3, n_min=1)
    assert one(p, [1, 2, 3, 4, 1, 2]) == [[3], [4], [1]]
    # The longer match wins over the later one; of equals the later comes first.
    assert one(p, [5, 6, 7, 9, 9, 6, 8, 9, 5, 6]) == [[7], [9], [9]]
    assert one(p, [6, 7, 1, 6, 8, 2, 6]) == [[8, 7], [2, 1], [6]]
    # What follows is known only up to the root.
    assert one(p, [1, 1]) == [[1], [], []]
    assert one(p, [1, 2]) == [[], [], []]
    assert one(p, [1]) == [[], [], []]


def test_certainty_grows_with_the_match():
    p = Params(depth=1, top_k=2, positions=50, n_max=6, n_min=1)
    firsts = []
    for n in range(1, 6):
        history = np.zeros((1, 50), np.int32)
        repeat = list(range(1, n + 1))
        tokens = [*repeat, 30, 40, *repeat]
        history[0, : len(tokens)] = tokens
        starts, roots = np.array([len(tokens) - 1], np.int32), np.array(tokens[-1:], np.int32)
        firsts.append(float(np.exp(reference(p, {"history": history, "starts": starts, "root_tokens": roots})["log_probs"][0, 0, 0])))
    assert firsts == pytest.approx([0.6, 0.7, 0.8, 0.9, 0.9], abs=1e-6)


def test_an_empty_range_of_matches_is_refused():
    with pytest.raises(ValidationError, match="n_min = 3 is above n_max = 2"):
        Params(depth=1, top_k=1, positions=9, n_max=2, n_min=3)
