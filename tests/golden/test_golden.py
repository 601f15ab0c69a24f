"""The tracked bundles are what `regenerate.py` writes, and what the definition says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kdgen.kdtr import Reader
from tests.golden.regenerate import BUNDLES, HERE, TREE_CASES


def test_regenerating_gives_the_tracked_bytes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, HERE / "regenerate.py", tmp_path], check=True, capture_output=True)
    for name in BUNDLES:
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes(), (
            f"{name}: run python tests/golden/regenerate.py and look at what changed"
        )


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles_are_undamaged_and_small(name: str) -> None:
    with Reader(HERE / name) as reader:
        reader.check()
        assert len(reader) > 0
    assert (HERE / name).stat().st_size < 100_000


def best_tuples(log_probs: np.ndarray, budget: int, usable: int, bonus: float) -> list[tuple[int, ...]]:
    """The nodes by exhaustion: all tuples whose prefix is there, sorted by score and then by tuple. Small dyadic sums are exact."""
    depth = log_probs.shape[0]
    every = [(r,) for r in range(usable)]
    for _ in range(depth - 1):
        every += [(*t, r) for t in every if len(t) == len(every[-1]) for r in range(usable)]
    score = {t: sum(float(log_probs[d, r]) for d, r in enumerate(t)) + bonus * (len(t) - 1) for t in every}
    chosen: list[tuple[int, ...]] = []
    candidates = {(0,)}
    while candidates and len(chosen) < budget:
        best = min(candidates, key=lambda t: (-score[t], t))
        chosen.append(best)
        candidates.remove(best)
        if best[-1] + 1 < usable:
            candidates.add((*best[:-1], best[-1] + 1))
        if len(best) < depth:
            candidates.add((*best, 0))
    return chosen


@pytest.mark.parametrize("name", ["plain", "ties", "depth_bonus", "width_cap"])
def test_trees_are_those_of_an_exhaustive_search(name: str) -> None:
    p, _, budgets = TREE_CASES[name]
    with Reader(HERE / "ddtree.kdtr") as reader:
        for s, budget in enumerate(budgets):
            expected = best_tuples(reader[f"{name}/in/log_probs"][s], budget, p.width_cap or p.top_k, p.depth_bonus)
            ranks, parents, count = (reader[f"{name}/out/{key}"][s] for key in ("node_ranks", "parents", "counts"))
            tuples: list[tuple[int, ...]] = [()]
            for node in range(1, int(count)):
                tuples.append((*tuples[parents[node]], int(ranks[node])))
            assert tuples[1:] == expected
