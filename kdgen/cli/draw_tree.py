"""A round's draft tree as lines of text: the accepted path marked, rejected branches dim, with the drafter's probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kdgen.verify.show_tree import Guides

if TYPE_CHECKING:
    from rich.text import Text

    from kdgen.engine.first_round import DraftTree


def tree_lines(tree: DraftTree, guides: Guides) -> Iterator[Text]:
    """One line per node, then what the round commits."""
    from rich.text import Text

    accepted = set(tree.accepted)

    def lines(node: int, lead: str, joint: str, below: str) -> Iterator[Text]:
        taken = node in accepted
        text = Text(lead + joint, style="dim")
        text.append(f"{tree.tokens[node]}{' *' if taken else ''}", style="bold green" if taken else "dim")
        if node:
            path = math.exp(tree.scores[node])
            own = math.exp(tree.scores[node] - tree.scores[tree.parents[node]])
            text.append(f"   probability {own:.3f}, of its path {path:.3f}", style="" if taken else "dim")
        else:
            text.append(f"   the root, at position {tree.positions[0]}: decided before the round")
        yield text
        rest = tree.children(node)
        for child in rest:
            last = child == rest[-1]
            yield from lines(child, lead + below, guides.last if last else guides.branch, guides.gap if last else guides.bar)

    yield Text("first round: drafted tokens, * accepted", style="bold")
    yield from lines(0, "", "", "")
    path = [tree.tokens[node] for node in tree.accepted[1:]]
    rejected = len(tree.tokens) - len(tree.accepted)
    then = "the generation ends there" if tree.next_token is None else f"then the target's own {tree.next_token}"
    yield Text(
        f"accepted: {' '.join(map(str, path)) or 'none'}, {then}; {rejected} of {len(tree.tokens) - 1} nodes rejected, "
        f"acceptance length {len(tree.accepted)}"
    )
