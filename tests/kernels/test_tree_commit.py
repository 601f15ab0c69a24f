"""The end of a round: rounds until nothing runs give what plain decoding gives, whatever ends the sequences."""

import numpy as np
import pytest

from kdgen.kernels import draft_ngram, draft_oracle, tree_accept, tree_build, tree_rows
from kdgen.kernels.tree_commit import FAMILY, Params, reference

POSITIONS, DEPTH, TOP_K, VOCAB, SEQUENCES = 120, 4, 5, 50, 7
PROMPT = 6


def plain(truth, start, stops, most, limit):
    """New tokens of one sequence, one at a time: the root at `start` is known."""
    out = []
    while start < limit and len(out) < most:
        start += 1
        out.append(int(truth[start]))
        if out[-1] in stops:
            break
    return out


def first_state(p, rng, truth):
    starts = rng.integers(PROMPT, 20, size=SEQUENCES).astype(np.int32)
    history = np.full((SEQUENCES, p.positions), -7, np.int32)
    for s, start in enumerate(starts):
        history[s, : start + 1] = truth[s, : start + 1]
    return {
        "stop_tokens": np.array([-1, 3, -1], np.int32),
        "max_new_tokens": rng.integers(1, p.max_new + 5, size=SEQUENCES).astype(np.int32),
        "position_limit": rng.integers(22, POSITIONS - 1, size=SEQUENCES).astype(np.int32),
        "wanted_budgets": np.full(SEQUENCES, p.budget, np.int32),
        "root_tokens": truth[np.arange(SEQUENCES), starts].copy(),
        "starts": starts,
        "active": np.ones(SEQUENCES, np.int32),
        "budgets": np.full(SEQUENCES, 1, np.int32),
        "new_tokens": np.zeros((SEQUENCES, p.max_new), np.int32),
        "new_counts": np.zeros(SEQUENCES, np.int32),
        "history": history,
        "rounds": np.zeros(SEQUENCES, np.int32),
        "acceptance": np.zeros((SEQUENCES, p.depth + 1), np.int32),
    }


def play(p, state, truth, draft, rng):
    """Rounds until nothing runs; the target follows `truth`, and says anything after what it would not have said."""
    build = tree_build.Params(depth=DEPTH, top_k=TOP_K, budget=p.budget, sequences=SEQUENCES)
    rows = tree_rows.Params(depth=DEPTH, budget=p.budget, sequences=SEQUENCES)
    accept = tree_accept.Params(depth=DEPTH, budget=p.budget, sequences=SEQUENCES)
    while state["active"].any():
        tree = tree_build.reference(build, {**draft(state), **{name: state[name] for name in ("root_tokens", "starts", "budgets")}})
        tree["paths"] = tree["paths_out"]
        names = ("tokens", "positions", "depths", "paths", "counts")
        forward = tree_rows.reference(
            rows, {**{n: tree[n] for n in names}, **{n: state[n] for n in ("starts", "active")}, "nodes": np.arange(rows.nodes)}
        )
        slots = forward["row_slots"].reshape(SEQUENCES, -1)
        assert (slots < state["position_limit"][:, None]).all()
        choices = rng.integers(0, VOCAB, size=(SEQUENCES, rows.nodes)).astype(np.int32)
        for s in range(SEQUENCES):
            for i in range(tree["counts"][s]):
                path = [int(node) for node in tree["paths"][s, i, 1 : tree["depths"][s, i] + 1]]
                position = int(tree["positions"][s, i])
                if list(tree["tokens"][s, path]) == list(truth[s, state["starts"][s] + 1 : position + 1]):
                    choices[s, i] = truth[s, position + 1] if position + 1 < POSITIONS else 0
        names = ("tokens", "parents", "depths", "paths", "counts")
        done = tree_accept.reference(accept, {**{name: tree[name] for name in names}, "choices": choices, "starts": state["starts"]})
        names = ("committed", "accepted_counts", "next_roots")
        out = reference(p, {**state, **{name: done[name] for name in names}})
        assert out.pop("running")[0] == np.count_nonzero(out["active"])
        state = {**state, **out}
    return state


@pytest.mark.parametrize("drafter", ["oracle", "ngram"])
@pytest.mark.parametrize("budget", [0, 1, 9])
def test_rounds_give_what_plain_decoding_gives(drafter, budget):
    oracle = draft_oracle.Params(depth=DEPTH, top_k=TOP_K, positions=POSITIONS, vocab=VOCAB)
    ngram = draft_ngram.Params(depth=DEPTH, top_k=TOP_K, positions=POSITIONS, n_max=3, n_min=1)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        truth = rng.integers(0, VOCAB if drafter == "oracle" else 6, size=(SEQUENCES, POSITIONS)).astype(np.int32)
        p = Params(depth=DEPTH, budget=budget, sequences=SEQUENCES, stops=3, max_new=40, positions=POSITIONS)
        state = first_state(p, rng, truth)
        first = {name: value.copy() for name, value in state.items()}

        def draft(state, truth=truth):
            if drafter == "ngram":
                return draft_ngram.reference(ngram, {name: state[name] for name in ("history", "starts", "root_tokens")})
            rates, ranks = np.full(DEPTH, 0.7, np.float32), np.zeros(DEPTH, np.int32)
            fixed = {"truth": truth, "hit_rates": rates, "ranks": ranks, "seed": np.array([5], np.uint32)}
            return draft_oracle.reference(oracle, {**fixed, "starts": state["starts"]})

        state = play(p, state, truth, draft, rng)
        for s in range(SEQUENCES):
            most = min(int(first["max_new_tokens"][s]), p.max_new)
            want = plain(truth[s], int(first["starts"][s]), {3}, most, int(first["position_limit"][s]))
            assert list(state["new_tokens"][s, : state["new_counts"][s]]) == want
            end = int(first["starts"][s]) + len(want)
            assert state["starts"][s] == end
            assert list(state["history"][s, : end + 1]) == list(truth[s, : end + 1])
            assert (state["history"][s, end + 1 :] == -7).all()
            assert state["acceptance"][s].sum() == state["rounds"][s] >= -(-len(want) // (DEPTH + 1))
        if budget == 9:
            assert state["rounds"].sum() < state["new_counts"].sum()


def test_cases_end_for_every_reason_and_go_on():
    p = Params(depth=7, budget=16, sequences=48, max_new=60, positions=400)
    seen = {}
    for case in FAMILY.cases(p, np.random.default_rng(0)):
        out = reference(p, case.inputs)
        before = np.count_nonzero(case.inputs["active"])
        seen[case.name] = (before, int(out["running"][0]))
    assert seen["all go on"][0] == seen["all go on"][1]
    for name in ("stop tokens", "most new tokens", "the context ends"):
        assert 0 < seen[name][1] < seen[name][0], name
    assert seen["all ended"] == (0, 0)


def test_nothing_of_an_ended_sequence_changes():
    p = Params(depth=3, budget=4, sequences=9, max_new=20, positions=50)
    for case in FAMILY.cases(p, np.random.default_rng(1)):
        out, ended = reference(p, case.inputs), case.inputs["active"] == 0
        for name in set(out) - {"running"}:
            assert (out[name][ended] == case.inputs[name][ended]).all(), (case.name, name)
