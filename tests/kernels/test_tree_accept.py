"""The numpy definition of acceptance against the walk it stands for."""

import numpy as np

from kdgen.kernels.tree_accept import FAMILY, Params, reference


def walk(tokens, parents, count, choices):
    accepted = [0]
    while True:
        child = next((i for i in range(1, count) if parents[i] == accepted[-1] and tokens[i] == choices[accepted[-1]]), None)
        if child is None:
            return accepted
        accepted.append(child)


def test_definition_is_the_walk():
    for seed in range(20):
        p = Params(depth=5, budget=30)
        for case in FAMILY.cases(p, np.random.default_rng(seed)):
            out, x = reference(p, case.inputs), case.inputs
            for s in range(len(x["counts"])):
                expected = walk(x["tokens"][s], x["parents"][s], int(x["counts"][s]), x["choices"][s])
                assert list(out["accepted"][s, : len(expected)]) == expected
                assert out["accepted_counts"][s] == len(expected)
                assert out["next_roots"][s] == x["choices"][s, expected[-1]]
                assert out["next_starts"][s] == x["starts"][s] + len(expected)
                assert (out["accepted"][s, len(expected) :] == -1).all()


def test_cases_reach_every_depth():
    p = Params(depth=5, budget=60)
    lengths = {
        int(n)
        for seed in range(5)
        for case in FAMILY.cases(p, np.random.default_rng(seed))
        for n in reference(p, case.inputs)["accepted_counts"]
    }
    assert lengths >= {1, 2, 3, 4, 5}
