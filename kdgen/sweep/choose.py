"""Which configuration is the best: a weighted score per bucket of shapes, and ties that are broken the same way in every run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kdgen.sweep.model import Objective
from kdgen.sweep.stages import WHOLE, Row, Stage
from kdgen.sweep.workloads import Shape

#: All shapes together.
ALL = "all"
_MOST_NOISE = 0.05  # however widely timings are spread, more than this is a difference

Rows = Mapping[str, Mapping[str, Row]]


@dataclass(frozen=True)
class Choice:
    """The best configuration of a bucket.

    Attributes:
        bucket: of shapes; `all` for all of them.
        configuration: its id.
        values: path to value of the swept parameters.
        score: by the objective: below 1 is faster than the base spec where that is relative.
        best: the score of the very best, which is a tie with the chosen one.
        ties: how many configurations are within the noise of it.
        noise: the share that counts as equal.
        measured: measured, not predicted.
        times: shape to (microseconds, microseconds of the base spec or None).
    """

    bucket: str
    configuration: str
    values: Mapping[str, Any]
    score: float
    best: float
    ties: int
    noise: float
    measured: bool
    times: Mapping[str, tuple[float, float | None]]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


def by_configuration(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Configuration to shape to row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.configuration, {})[row.shape] = row
    return found


def times_of(
    rows: Mapping[str, Row], base: Mapping[str, Row], shapes: Sequence[str], measured: bool
) -> dict[str, tuple[float, float | None]] | None:
    """Shape to the configuration's and the base's microseconds; None when one of the shapes has no time.

    Args:
        rows: of the configuration, by shape.
        base: of the base spec's own configuration.
        shapes: that are wanted.
        measured: by the clock, not by the static model.
    """
    found: dict[str, tuple[float, float | None]] = {}
    for shape in shapes:
        row = rows.get(shape)
        if row is None:
            return None
        own = row.measured if measured else row.predicted
        other = row.incumbent if measured else base[shape].predicted if shape in base else None
        if own is None or own <= 0:
            return None
        found[shape] = own, other
    return found


def score_of(times: Mapping[str, tuple[float, float | None]], shapes: Sequence[Shape], objective: Objective) -> float:
    """The weighted score of a configuration; smaller is better."""
    total = sum(shape.weight for shape in shapes)
    if objective.score == "total":
        return sum(shape.weight * times[shape.name][0] for shape in shapes) / total
    return math.exp(sum(shape.weight * math.log(times[shape.name][0] / (times[shape.name][1] or 1.0)) for shape in shapes) / total)


def score_of_rows(
    rows: Mapping[str, Row], base: Mapping[str, Row], shapes: Sequence[Shape], objective: Objective, measured: bool
) -> float | None:
    """The score of a configuration's rows; None when it cannot be chosen, or lacks a shape."""
    whole = rows.get(WHOLE)
    if whole is None or whole.stage.is_rejection:
        return None
    times = times_of(rows, base, [shape.name for shape in shapes], measured)
    return score_of(times, shapes, objective) if times else None


def choose(rows: Rows, incumbent: str, shapes: Sequence[Shape], objective: Objective) -> tuple[Choice, ...]:
    """The best configuration of all shapes, and of each bucket when there are several.

    Of configurations whose scores are equal within the noise the base spec's own comes first, then the one with the smallest id: equal
    results lead to equal choices, and nothing is changed for nothing.

    Args:
        rows: configuration to shape to row.
        incumbent: the base spec's own configuration.
        shapes: that are served.
        objective: what is to be small.
    """
    buckets = list(dict.fromkeys(shape.bucket for shape in shapes))
    groups = {ALL: list(shapes)}
    if len(buckets) > 1:
        groups |= {bucket: [shape for shape in shapes if shape.bucket == bucket] for bucket in buckets}
    measured = any(row.measured is not None for own in rows.values() for row in own.values())
    found = []
    for bucket, group in groups.items():
        if choice := _choose(rows, incumbent, bucket, group, objective, measured):
            found.append(choice)
    return tuple(found)


def _choose(rows: Rows, incumbent: str, bucket: str, shapes: list[Shape], objective: Objective, measured: bool) -> Choice | None:
    base = rows.get(incumbent, {})
    scores = {name: score for name, own in rows.items() if (score := score_of_rows(own, base, shapes, objective, measured)) is not None}
    if not scores:
        return None
    best = min(scores, key=lambda name: (scores[name], name))
    noise = max(objective.noise, _spread(rows[best], shapes) if measured else 0.0)
    ties = sorted(
        (name for name, score in scores.items() if score <= scores[best] * (1 + noise)), key=lambda name: (name != incumbent, name)
    )
    chosen = rows[ties[0]]
    times = times_of(chosen, base, [shape.name for shape in shapes], measured) or {}
    return Choice(bucket, ties[0], chosen[WHOLE].values, scores[ties[0]], scores[best], len(ties), noise, measured, times)


def _spread(rows: Mapping[str, Row], shapes: Sequence[Shape]) -> float:
    """Half the spread of a configuration's timings, as a share: the middle one of its shapes."""
    shares = sorted(
        (row.high - row.low) / 2 / row.measured
        for shape in shapes
        if (row := rows.get(shape.name)) and row.measured and row.high is not None and row.low is not None
    )
    return min(_MOST_NOISE, shares[len(shares) // 2]) if shares else 0.0


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's coefficient of pairs; None for fewer than three, or when one side is constant."""
    if len(pairs) < 3:
        return None
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    mean = (len(pairs) + 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second))
    return covariance / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share their mean rank."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2 + 1
        start = end + 1
    return ranks


def correlations(rows: Rows, shapes: Sequence[str]) -> dict[str, float]:
    """Per shape, how well predicted times order the measured ones; shapes without enough of both are left out."""
    found = {}
    for shape in shapes:
        pairs = [
            (row.predicted, row.measured)
            for own in rows.values()
            if (row := own.get(shape)) and row.stage is Stage.MEASURED and row.predicted is not None and row.measured is not None
        ]
        if (value := rank_correlation(pairs)) is not None:
            found[shape] = value
    return found
