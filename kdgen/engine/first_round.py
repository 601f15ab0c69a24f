"""The draft tree of a generation's first round: built again from the same draft, and walked along the tokens that came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.engine.draft import Drafter
from kdgen.engine.engine import Engine, Mode
from kdgen.engine.state import Request, State
from kdgen.errors import UsageError
from kdgen.runtime import Kernel
from kdgen.runtime.array import Array
from kdgen.runtime.call import BoundCall

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class DraftTree:
    """A round's tree.

    Attributes:
        tokens, positions, parents: of each node, the root first, parents before children; the root's parent is −1.
        scores: natural logarithm of the probability that the drafter gives the path to each node.
        accepted: nodes that the target agreed with, the root first.
        next_token: the target's own choice behind the last of them; None when the generation ended before.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    accepted: tuple[int, ...]
    next_token: int | None

    def children(self, node: int) -> list[int]:
        """Nodes below a node, the most probable first."""
        return [child for child in range(node + 1, len(self.parents)) if self.parents[child] == node]


@dataclass
class _Watched:
    """A drafter that remembers the arrays it writes."""

    inner: Drafter
    name: str = "watched"
    written: list[Array] = field(default_factory=list)

    def bind(self, kit: Mapping[str, Kernel], state: State) -> tuple[BoundCall, Array, Array]:
        """See `Drafter`."""
        call, log_probs, token_ids = self.inner.bind(kit, state)
        self.written = [log_probs, token_ids]
        return call, log_probs, token_ids


def first_tree(
    engine: Engine, prompt: Sequence[int], mode: Mode, budget: int | None, drafter: Drafter, tokens: Sequence[int]
) -> DraftTree | None:
    """The tree of the first round.

    Args:
        engine: what generated.
        prompt: the sequence's.
        mode: chain or tree.
        budget: as given to `Engine.generate`.
        drafter: likewise; an oracle that knows its truth.
        tokens: what came out.

    Returns:
        None when the generation ended with the prompt's own token, so that there was no round.

    Raises:
        UsageError: mode `ar`, which has no trees.
    """
    if mode == "ar":
        raise UsageError("mode ar drafts nothing, so there is no tree; allowed are chain and tree")
    start, limits = len(prompt), engine.spec.tree
    if len(tokens) < 2:
        return None
    watched = _Watched(drafter)
    engine.generate([Request(prompt, 2)], mode=mode, budget=budget, drafter=watched)  # the token after the prompt, and one round
    nodes = min(limits.depth, limits.budget) if mode == "chain" else limits.budget if budget is None else budget
    kernel, device = engine.kit["tree_build" if mode == "tree" else "chain_build"], engine.device
    inputs: dict[str, Any] = {
        name: device.array(np.array([value], np.int32))
        for name, value in (("root_tokens", tokens[0]), ("starts", start), ("budgets", max(0, min(nodes, engine.context - start - 1))))
    }
    arrays = kernel.complete(log_probs=watched.written[0], token_ids=watched.written[1], **inputs)
    kernel.bind(**arrays).launch()
    count = int(arrays["counts"].numpy()[0])

    def of(name: str) -> tuple[Any, ...]:
        return tuple(arrays[name].numpy()[0, :count].tolist())

    return _walked(DraftTree(of("tokens"), of("positions"), of("parents"), of("scores"), (0,), None), tokens[1:])


def _walked(tree: DraftTree, following: Sequence[int]) -> DraftTree:
    """The same tree with the path along the tokens that follow its root."""
    accepted = [0]
    for token in following:
        below = [child for child in tree.children(accepted[-1]) if tree.tokens[child] == token]
        if not below:
            return replace(tree, accepted=tuple(accepted), next_token=token)
        accepted.append(below[0])
    return replace(tree, accepted=tuple(accepted))
