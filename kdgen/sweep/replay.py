"""Search strategies on stored results: what a search would have found, and how soon, without compiling or timing anything."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kdgen.errors import ArtifactError
from kdgen.expressions import ExpressionError
from kdgen.sweep.choose import by_configuration, score_of_rows
from kdgen.sweep.recorded import Recorded
from kdgen.sweep.search import PATIENCE, Trial, make_strategy, rung_shapes
from kdgen.sweep.space import configuration_id


@dataclass(frozen=True)
class Replay:
    """What a strategy found.

    Attributes:
        strategy, seed: which one.
        tried: points it asked for.
        evaluated: different stored configurations among them that can be chosen.
        unknown: points of which the store has no result.
        shapes: shapes looked at, all evaluations together: what it would have cost.
        chosen: the configuration it ends with; ties go to the base spec's own, then to the smallest id.
        score: of the chosen one, on all shapes.
        best: the best score in the store.
        behind: how far the chosen one is behind the best, as a share.
        curve: (shapes looked at so far, best score so far) whenever that got better.
    """

    strategy: str
    seed: int
    tried: int
    evaluated: int
    unknown: int
    shapes: int
    chosen: str
    score: float
    best: float
    behind: float
    curve: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def replay(recorded: Recorded, strategy: str, seed: int, budget: int | None) -> Replay:
    """Run a strategy on what a store knows.

    Args:
        recorded: the stored sweep.
        strategy, seed: as for a sweep.
        budget: different configurations that may be evaluated; None for as many as there are.

    Raises:
        ArtifactError: the store has no configuration that could be chosen.
    """
    rows = by_configuration(recorded.rows)
    base = rows.get(recorded.incumbent, {})
    shapes = recorded.by_weight

    def score(name: str, share: float) -> float | None:
        wanted = rung_shapes([shape.name for shape in shapes], share)
        chosen = [shape for shape in shapes if shape.name in wanted]
        return score_of_rows(rows.get(name, {}), base, chosen, recorded.objective, recorded.measured)

    finals = {name: value for name in rows if (value := score(name, 1.0)) is not None}
    if not finals:
        raise ArtifactError(f"{recorded.directory}: no stored configuration can be chosen; nothing to replay")
    search = make_strategy(strategy, recorded.space, seed, budget)
    # A sweep begins with the base spec's own configuration.
    found = {recorded.incumbent: finals[recorded.incumbent]} if recorded.incumbent in finals else {}
    tried = unknown = cost = dry = 0
    curve: list[tuple[int, float]] = []
    looked: set[tuple[str, float]] = set()
    limit = len(finals) if budget is None else min(budget + len(found), len(finals))
    while dry < PATIENCE and (strategy == "halving" or len(found) < limit):
        trials = search.ask(8 if strategy == "halving" else min(8, limit - len(found)))
        if not trials:
            break
        for trial in trials:
            tried += 1
            name = _configuration(recorded, trial)
            value = score(name, trial.share) if name else None
            unknown += not name or name not in rows
            search.tell(trial, value)
            dry = dry + 1 if value is None or (name, trial.share) in looked else 0
            if value is None:
                continue
            if (name, trial.share) not in looked:
                looked.add((name, trial.share))
                cost += len(rung_shapes([shape.name for shape in shapes], trial.share))
            if name in finals and (trial.share >= 1.0 or strategy != "halving"):
                found[name] = finals[name]
                if not curve or finals[name] < curve[-1][1]:
                    curve.append((cost, finals[name]))
    if not found:
        raise ArtifactError(f"{recorded.directory}: {strategy} with seed {seed} met no stored configuration that could be chosen")
    first = min(found.values())
    chosen = min((name for name, value in found.items() if value <= first * (1 + recorded.objective.noise)), key=recorded.order)
    best = min(finals.values())
    evaluated = len({name for name, _ in looked})
    return Replay(strategy, seed, tried, evaluated, unknown, cost, chosen, finals[chosen], best, finals[chosen] / best - 1, tuple(curve))


def _configuration(recorded: Recorded, trial: Trial) -> str:
    try:
        return configuration_id(recorded.space.values(trial.point))
    except ExpressionError:
        return ""
