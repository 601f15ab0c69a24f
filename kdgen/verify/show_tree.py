"""A decoded tree, drawn: one worked DDTree round through the kernels on the host target.

The example is small enough to follow by hand: three depths with three candidates each, six nodes, and a target model whose choices
accept two drafted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kdgen.spec import Spec
from kdgen.verify.artifacts import Artifacts, load_for
from kdgen.verify.schedules import host_schedules
from kdgen.verify.tree_step import Draft, Tree, TreeKernels, Walk, build, walk

if TYPE_CHECKING:
    from rich.text import Text

PROBABILITIES = ((0.60, 0.30, 0.10), (0.55, 0.35, 0.10), (0.70, 0.20, 0.10))
TOKENS = ((11, 12, 13), (21, 22, 23), (31, 32, 33))
CHOICES = (11, 22, 33, 41, 55, 61, 71)
EXAMPLE = Draft(log_probs=np.log(np.array(PROBABILITIES)).astype(np.float32), tokens=np.array(TOKENS), budget=6, root_token=7, start=100)


@dataclass(frozen=True)
class Guides:
    """The line pieces of a drawing."""

    branch: str
    last: str
    bar: str
    gap: str


UNICODE = Guides("├─ ", "└─ ", "│  ", "   ")
ASCII = Guides("+- ", "`- ", "|  ", "   ")


@dataclass(frozen=True)
class Round:
    """A finished round: the tree, the walk, and how the kernels' parameters had to differ from the spec's."""

    tree: Tree
    walk: Walk
    changes: str


def run_example(spec: Spec, out: Path) -> Round:
    """Run the worked example through a spec's tree kernels on the host target."""
    from dataclasses import replace

    from kdgen.targets import get_target

    kernels = TreeKernels.for_draft(spec, EXAMPLE, EXAMPLE.start + len(CHOICES))
    (schedule,) = host_schedules(1, 0)
    if kernels.changes:
        kernels = kernels.named("example")
        spec = replace(spec, name=f"{spec.name}-example", kernels=kernels.kernels)
    with Artifacts(get_target("host"), out) as artifacts:
        kit = load_for(artifacts.directory(spec), [schedule], "host")[schedule]
        tree = build(kit[kernels.build.name], kernels.build, EXAMPLE, schedule)
        outcome = walk(kit[kernels.accept.name], tree, np.array(CHOICES), EXAMPLE.start, schedule)
    return Round(tree, outcome, kernels.changes)


def draw(result: Round, guides: Guides) -> Iterator[Text]:
    """The tree as lines: accepted nodes bold green and marked `*`, rejected ones dim; then what the round commits."""
    from rich.text import Text

    tree, accepted = result.tree, set(result.walk.accepted)

    def lines(node: int, lead: str, joint: str, below: str) -> Iterator[Text]:
        token, position = int(tree["tokens"][node]), int(tree["positions"][node])
        taken = node in accepted
        text = Text(lead + joint, style="dim")
        text.append(f"token {token}{' *' if taken else ''}", style="bold green" if taken else "dim")
        probability = float(np.exp(tree["scores"][node]))
        parts = [f"position {position}"] + ([f"probability {probability:.3f}"] if node else ["the root: decided in the round before"])
        text.append(f"   node {node}, {', '.join(parts)}", style="" if taken else "dim")
        yield text
        # Nodes are numbered parents first, best sibling first.
        rest = [child for child in range(node + 1, tree.count) if tree["parents"][child] == node]
        for child in rest:
            last = child == rest[-1]
            yield from lines(child, lead + below, guides.last if last else guides.branch, guides.gap if last else guides.bar)

    yield from lines(0, "", "", "")
    done = result.walk
    yield Text("")
    yield Text(f"target's choices per node: {', '.join(map(str, CHOICES))}")
    yield Text(
        f"accepted (*): nodes {', '.join(map(str, done.accepted))}, committing tokens {', '.join(map(str, done.committed))}; "
        f"acceptance length {len(done.accepted)}"
    )
    yield Text(f"next round: root token {done.bonus} at position {done.new_start}")
