"""The numpy definition of the tree builder against brute force, and its properties."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdgen.kernels.tree_build import FAMILY, Params, build_tree, random_log_probs, reference
from kdgen.targets import get_target


def table(*rows):
    return np.log(np.array(rows, np.float64)).astype(np.float32)


WORKED = table([0.6, 0.3, 0.1], [0.55, 0.35, 0.1], [0.7, 0.2, 0.1])


def ranks_of(tree):
    paths = [()]
    for parent, rank, _, _ in tree:
        paths.append((*paths[parent], rank))
    return paths[1:]


def test_worked_example():
    tree = build_tree(Params(depth=3, top_k=3, budget=6), WORKED, 6)
    assert [(parent, rank, depth) for parent, rank, depth, _ in tree] == [(0, 0, 1), (1, 0, 2), (0, 1, 1), (2, 0, 3), (1, 1, 2), (3, 0, 2)]
    assert [round(math.exp(score), 3) for *_, score in tree] == [0.6, 0.33, 0.3, 0.231, 0.21, 0.165]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_emits_the_most_probable_prefixes(depth, top_k, budget, seed):
    log_probs = random_log_probs(np.random.default_rng(seed), depth, top_k)
    tree = build_tree(Params(depth=depth, top_k=top_k, budget=budget), log_probs, budget)
    everything = {
        ranks: math.fsum(float(log_probs[d, r]) for d, r in enumerate(ranks))
        for length in range(1, depth + 1)
        for ranks in itertools.product(range(top_k), repeat=length)
    }
    assert len(tree) == min(budget, len(everything))
    best = sorted(everything.values(), reverse=True)[: len(tree)]
    assert np.allclose([score for *_, score in tree], best, atol=1e-9)
    assert all(np.isclose(score, everything[ranks], atol=1e-9) for ranks, (*_, score) in zip(ranks_of(tree), tree, strict=True))


def test_exact_ties_go_to_the_smaller_rank_tuple():
    log_probs = np.full((3, 3), -1.0, np.float32)
    tree = build_tree(Params(depth=3, top_k=3, budget=39), log_probs, 39)
    keys = [(-score, ranks) for ranks, (*_, score) in zip(ranks_of(tree), tree, strict=True)]
    assert keys == sorted(keys)


def test_chain_seed_emits_the_chain_first_and_the_same_set_follows():
    p = Params(depth=3, top_k=3, budget=39, chain_seed=True)
    tree = build_tree(p, WORKED, 39)
    assert ranks_of(tree)[:3] == [(0,), (0, 0), (0, 0, 0)]
    assert set(ranks_of(tree)) == set(ranks_of(build_tree(Params(depth=3, top_k=3, budget=39), WORKED, 39)))


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf, -2e30])
def test_a_log_prob_that_is_no_token_ends_its_sibling_chain(bad):
    log_probs = WORKED.copy()
    log_probs[0, 1] = bad
    ranks = ranks_of(build_tree(Params(depth=3, top_k=3, budget=39), log_probs, 39))
    assert (0,) in ranks
    assert all(path[0] == 0 for path in ranks)


def test_no_token_at_depth_one_leaves_the_root_alone():
    log_probs = WORKED.copy()
    log_probs[0] = np.nan
    for options in ({}, {"chain_seed": True}, {"pad": True}):
        assert build_tree(Params(depth=3, top_k=3, budget=9, **options), log_probs, 9) == []


def test_padding_uses_the_ranks_beyond_the_cap():
    tree = build_tree(Params(depth=2, top_k=3, budget=9, width_cap=1, pad=True), WORKED, 9)
    assert [(parent, rank) for parent, rank, _, _ in tree] == [(0, 0), (1, 0), (0, 1), (0, 2)]


def test_bonus_favours_depth():
    plain = build_tree(Params(depth=3, top_k=3, budget=6), WORKED, 6)
    deep = build_tree(Params(depth=3, top_k=3, budget=6, depth_bonus=2.0), WORKED, 6)
    assert sum(depth for _, _, depth, _ in deep) > sum(depth for _, _, depth, _ in plain)


def test_reference_links_and_paths_agree_with_parents():
    rng = np.random.default_rng(5)
    p = Params(depth=7, top_k=8, budget=40)
    for case in FAMILY.cases(p, rng):
        out = reference(p, case.inputs)
        for s in range(len(out["counts"])):
            count = out["counts"][s]
            children = {}
            for node in range(1, count):
                parent = out["parents"][s, node]
                assert parent < node
                children.setdefault(int(parent), []).append(node)
                depth = out["depths"][s, node]
                assert depth == out["depths"][s, parent] + 1
                assert list(out["paths_out"][s, node, : depth + 1]) == [*out["paths_out"][s, parent, :depth], node]
            for node in range(count):
                chain, at = [], int(out["first_child"][s, node])
                while at >= 0:
                    chain.append(at)
                    at = int(out["next_sibling"][s, at])
                assert chain == children.get(node, [])


def test_keys_leave_room_for_every_score():
    for depth in (1, 7, 16):
        for bonus in (0.0, 0.2, 4.0):
            numbers = FAMILY.context(Params(depth=depth, top_k=4, budget=9, depth_bonus=bonus), get_target("sm_120"))
            best = numbers["top_value"] + (bonus * (depth - 1) + 0.25 * depth) * numbers["scale"]
            assert best < 2**24
            assert numbers["top_value"] / numbers["scale"] >= 20  # nats below score 0 that keys still tell apart
