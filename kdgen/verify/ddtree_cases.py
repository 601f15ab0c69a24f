"""Files of worked DDTree cases, format `ddtree-oracle-v1`.

A case file is JSON: `{"format": "ddtree-oracle-v1", "conventions": TEXT, "cases": [CASE, ...]}`. Node 0 is the root (the token
already decided; not counted in the budget); the other nodes are numbered in the order they enter the tree. L is the number of
draft depths, K the candidates per depth, n the number of nodes, root included.

    CASE["name"]                    short, unique
    CASE["note"]                    optional text
    CASE["input"]
      top_probs      [L][K] float   probabilities of the K best tokens of each depth, highest first; their natural logarithm,
                                    rounded to float32, is what a drafter hands to `tree_build`
      top_tokens     [L][K] int     their token ids
      budget         int            most nodes beside the root
      root_token     int            token of node 0
      start_position int            its absolute position
      chain_seed     bool           the chain of best candidates enters first
      depth_bonus    float          added to the score of a child for each depth beyond the first
    CASE["output"]                  the tree
      verify_tokens  [n] int        token of each node
      positions      [n] int        absolute position: start_position + depth
      depths         [n] int        optional
      parents        [n] int        -1 for the root
      rank_paths     [n][depth] int candidate numbers from depth 1 down to the node
      scores_logprob [n] float      sum of log-probabilities (and bonuses) along the path, 9 decimals
      first_child    [n] int        best child, or -1
      next_sibling   [n] int        next best child of the same parent, or -1
      ancestor_bitmask_hex [n] str  bit j is set when node j is the node itself or an ancestor
    CASE["verify"]                  the walk and what it commits
      target_token_per_node [n] int the target model's choice after each node
      accepted_node_indices [a] int nodes of the walk, the root first
      committed_tokens      [a] int their tokens
      bonus_next_token      int     the target's choice at the last of them: the next root
      new_start             int     start_position + a
      tau_this_round        int     a
      kv_moves_src_dst      [m][2]  absolute cache rows [from, to] that must move: node i's row lies at start_position + i and
                                    belongs at start_position + depth

Further keys (`path_probs`, `child_maps`, `visibility`, ...) are allowed and not read: they say the same in other words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.errors import ArtifactError

FORMAT = "ddtree-oracle-v1"
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DdtreeCase:
    """One worked case; the module's docstring says what each value is.

    Attributes:
        log_probs: [L, K] float32, natural logarithms of `top_probs`.
        tokens: [L, K] int64.
        ancestors: per node, the set of its ancestors and itself.
        moves: (source, destination) cache rows, absolute.
    """

    name: str
    log_probs: npt.NDArray[np.float32]
    tokens: Ints
    budget: int
    root_token: int
    start: int
    chain_seed: bool
    depth_bonus: float
    verify_tokens: Ints
    positions: Ints
    depths: Ints | None
    parents: Ints
    rank_paths: tuple[tuple[int, ...], ...]
    scores: npt.NDArray[np.float64]
    first_child: Ints
    next_sibling: Ints
    ancestors: tuple[frozenset[int], ...]
    target_tokens: Ints
    accepted: Ints
    committed: Ints
    bonus: int
    new_start: int
    tau: int
    moves: tuple[tuple[int, int], ...]

    @property
    def depth(self) -> int:
        """L, the number of draft depths."""
        return int(self.log_probs.shape[0])

    @property
    def top_k(self) -> int:
        """K, the candidates per depth."""
        return int(self.log_probs.shape[1])

    @property
    def nodes(self) -> int:
        """n, the number of nodes, root included."""
        return len(self.verify_tokens)


def load_cases(path: Path) -> tuple[DdtreeCase, ...]:
    """Read a case file.

    Raises:
        ArtifactError: the file is missing, is not JSON, has another format, or a case lacks a value or contradicts itself.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not a JSON file: {error}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ArtifactError(f"{path}: format is {found!r}; allowed: {FORMAT!r} (see the docstring of kdgen.verify.ddtree_cases)")
    cases = []
    for number, item in enumerate(document.get("cases", [])):
        name = item.get("name", f"number {number}") if isinstance(item, dict) else f"number {number}"
        try:
            case = _parse(item)
            _check(case)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ArtifactError(f"{path}: case {name}: {reason}") from error
        cases.append(case)
    if not cases:
        raise ArtifactError(f"{path}: holds no cases")
    return tuple(cases)


def _parse(item: Mapping[str, Any]) -> DdtreeCase:
    given, tree, walk = item["input"], item["output"], item["verify"]
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.asarray(given["top_probs"], np.float64)).astype(np.float32)
    return DdtreeCase(
        name=item["name"],
        log_probs=log_probs,
        tokens=np.asarray(given["top_tokens"], np.int64),
        budget=int(given["budget"]),
        root_token=int(given["root_token"]),
        start=int(given["start_position"]),
        chain_seed=bool(given["chain_seed"]),
        depth_bonus=float(given["depth_bonus"]),
        verify_tokens=np.asarray(tree["verify_tokens"], np.int64),
        positions=np.asarray(tree["positions"], np.int64),
        depths=np.asarray(tree["depths"], np.int64) if "depths" in tree else None,
        parents=np.asarray(tree["parents"], np.int64),
        rank_paths=tuple(tuple(int(rank) for rank in path) for path in tree["rank_paths"]),
        scores=np.asarray(tree["scores_logprob"], np.float64),
        first_child=np.asarray(tree["first_child"], np.int64),
        next_sibling=np.asarray(tree["next_sibling"], np.int64),
        ancestors=tuple(_bits(int(text, 16)) for text in tree["ancestor_bitmask_hex"]),
        target_tokens=np.asarray(walk["target_token_per_node"], np.int64),
        accepted=np.asarray(walk["accepted_node_indices"], np.int64),
        committed=np.asarray(walk["committed_tokens"], np.int64),
        bonus=int(walk["bonus_next_token"]),
        new_start=int(walk["new_start"]),
        tau=int(walk["tau_this_round"]),
        moves=tuple((int(source), int(destination)) for source, destination in walk["kv_moves_src_dst"]),
    )


def _bits(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def _check(case: DdtreeCase) -> None:
    if case.log_probs.ndim != 2 or case.log_probs.shape != case.tokens.shape or not case.log_probs.size:
        raise ValueError(f"top_probs {case.log_probs.shape} and top_tokens {case.tokens.shape} must both be [L][K]")
    per_node: dict[str, Sized] = {
        "positions": case.positions, "parents": case.parents, "rank_paths": case.rank_paths, "scores_logprob": case.scores,
        "first_child": case.first_child, "next_sibling": case.next_sibling, "ancestor_bitmask_hex": case.ancestors,
        "target_token_per_node": case.target_tokens,
    }  # fmt: skip
    for key, values in per_node.items():
        if len(values) != case.nodes:
            raise ValueError(f"{key} has {len(values)} entries for {case.nodes} nodes")
    if case.depths is not None and len(case.depths) != case.nodes:
        raise ValueError(f"depths has {len(case.depths)} entries for {case.nodes} nodes")
    if len(case.accepted) != case.tau or len(case.committed) != case.tau:
        raise ValueError(f"tau_this_round {case.tau} differs from the length of accepted_node_indices or committed_tokens")
