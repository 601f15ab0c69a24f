"""Worked DDTree cases run through the kernels: the tree, the walk and the cache moves must be the ones written in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kdgen.errors import DeviceError
from kdgen.verify.ddtree_cases import DdtreeCase
from kdgen.verify.kernel import Watcher
from kdgen.verify.schedules import Schedule
from kdgen.verify.tree_step import Draft, Tree, TreeKernels, Walk, build, moves, walk

if TYPE_CHECKING:
    from kdgen.runtime import Kernel

SCORE_BOUND = 1e-6  # scores are written with 9 decimals, and the log-probs were rounded to float32


@dataclass(frozen=True)
class CaseVerdict:
    """What one worked case showed.

    Attributes:
        case: its name.
        nodes: of its tree.
        schedules: how many it was run on.
        changes: how the kernels' parameters differ from the spec's; "" when the spec's own kernels ran it.
        error: largest difference of a score.
        failures: what was not as written.
    """

    case: str
    nodes: int
    schedules: int
    changes: str
    error: float
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True when everything was as written."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {
            "case": self.case, "nodes": self.nodes, "schedules": self.schedules, "changes": self.changes, "error": self.error,
            "bound": SCORE_BOUND, "passed": self.passed, "failures": list(self.failures),
        }  # fmt: skip


def draft_of(case: DdtreeCase) -> Draft:
    """The part of a case that a drafter would give."""
    return Draft(case.log_probs, case.tokens, case.budget, case.root_token, case.start, case.chain_seed, case.depth_bonus)


def check_case(case: DdtreeCase, kernels: TreeKernels, kits: Mapping[Schedule, Mapping[str, Kernel]], watch: Watcher) -> CaseVerdict:
    """Run a case on every schedule; `watch` is called before each."""
    failures: list[str] = []
    error = 0.0
    for schedule, kit in kits.items():
        watch(kernels.build.name, case.name, schedule.name)
        try:
            tree = build(kit[kernels.build.name], kernels.build, draft_of(case), schedule)
            found = list(_tree_faults(case, tree))
            if not found:
                error = max(error, float(np.abs(tree["scores"] - case.scores).max()))
                outcome = walk(kit[kernels.accept.name], tree, case.target_tokens, case.start, schedule)
                found += _walk_faults(case, outcome)
                if not found:
                    moved = moves(kit[kernels.compact.name], kernels.compact, outcome, schedule, start=case.start, nodes=tree.count)
                    found += _move_faults(case, moved)
        except DeviceError as fault:
            found = [f"fault: {fault}"]
        if found:
            failures += [f"{text} ({schedule.name})" for text in found]
            break
    return CaseVerdict(case.name, case.nodes, len(kits), kernels.changes, error, tuple(failures))


def _tree_faults(case: DdtreeCase, tree: Tree) -> Iterator[str]:
    if tree.count != case.nodes:
        yield f"counts: got {tree.count} nodes, want {case.nodes}"
        return
    exact = {
        "tokens": case.verify_tokens, "positions": case.positions, "parents": case.parents, "first_child": case.first_child,
        "next_sibling": case.next_sibling,
    }  # fmt: skip
    if case.depths is not None:
        exact["depths"] = case.depths
    for name, want in exact.items():
        for node in np.flatnonzero(tree[name] != want)[:1]:
            yield f"{name}[{node}]: got {tree[name][node]}, want {want[node]}"
    distance = np.abs(tree["scores"] - case.scores)
    for node in np.flatnonzero(~(distance <= SCORE_BOUND))[:1]:
        yield f"scores[{node}]: got {tree['scores'][node]}, want {case.scores[node]} within {SCORE_BOUND}"
    for node in range(case.nodes):
        if tree.rank_path(node) != case.rank_paths[node]:
            yield f"ranks of node {node}: got {list(tree.rank_path(node))}, want {list(case.rank_paths[node])}"
            break
    for node in range(case.nodes):
        if tree.ancestors(node) != case.ancestors[node]:
            yield f"path of node {node}: got nodes {sorted(tree.ancestors(node))}, want {sorted(case.ancestors[node])}"
            break


def _walk_faults(case: DdtreeCase, outcome: Walk) -> Iterator[str]:
    pairs = {
        "accepted": (outcome.accepted, tuple(case.accepted.tolist())),
        "committed": (outcome.committed, tuple(case.committed.tolist())),
        "acceptance length": (len(outcome.accepted), case.tau),
        "bonus token": (outcome.bonus, case.bonus),
        "new start": (outcome.new_start, case.new_start),
    }
    for name, (got, want) in pairs.items():
        if got != want:
            yield f"{name}: got {got}, want {want}"


def _move_faults(case: DdtreeCase, moved: Mapping[int, int] | str) -> Iterator[str]:
    if isinstance(moved, str):
        yield f"cache moves: {moved}"
        return
    got = sorted((source, destination) for destination, source in moved.items())
    if got != sorted(case.moves):
        yield f"cache moves: got {got}, want {sorted(case.moves)}"
