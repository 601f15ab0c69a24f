"""The pictures of a sweep's report, as PNG; matplotlib draws them, without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from kdgen.errors import ToolchainError
from kdgen.sweep.choose import Rows, rank_correlation, score_of_rows
from kdgen.sweep.recorded import Recorded
from kdgen.sweep.space import Axis
from kdgen.sweep.stages import Row, Stage

_MOST_PAIRS = 15
_BRIGHT = 0.5  # the lower half of the colour map is light
_COLORS = ("#3366aa", "#cc7722", "#338855", "#aa3355", "#7755aa", "#668899", "#997733", "#335577")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainError("pictures need matplotlib: pip install 'kdgen[sweep]'") from error
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without version and date, equal results give equal files.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def pictures(recorded: Recorded, rows: Rows) -> dict[str, bytes]:
    """File stem to PNG: `best`, `floor`, `stages`, `predicted`, and `pair-A-B` for each pair of parameters; those with data."""
    found = {
        "best": _best(recorded, rows),
        "floor": _floor(recorded, rows),
        "stages": _stages(rows),
        "predicted": _predicted(rows),
        **_pairs(recorded, rows),
    }
    return {name: png for name, png in found.items() if png}


def _times(recorded: Recorded, rows: Mapping[str, Row]) -> dict[str, float]:
    return {
        shape: value
        for shape, row in rows.items()
        if shape and (value := row.measured if recorded.measured else row.predicted) is not None and not _rejected(rows)
    }


def _rejected(rows: Mapping[str, Row]) -> bool:
    return "" not in rows or rows[""].stage.is_rejection


def fastest(recorded: Recorded, rows: Rows) -> dict[str, tuple[str, float]]:
    """Shape to the configuration that is fastest on it, and its microseconds."""
    found: dict[str, tuple[str, float]] = {}
    for name in sorted(rows, key=recorded.order):
        for shape, value in _times(recorded, rows[name]).items():
            if shape not in found or value < found[shape][1]:
                found[shape] = name, value
    return found


def _best(recorded: Recorded, rows: Rows) -> bytes:
    best, base = fastest(recorded, rows), _times(recorded, rows.get(recorded.incumbent, {}))
    names = [shape.name for shape in recorded.shapes if shape.name in best]
    if not names:
        return b""
    figure, axes = _figure(8, 0.9 + 0.36 * len(names))
    places = range(len(names))
    axes.barh([place + 0.2 for place in places], [base.get(name, 0.0) for name in names], 0.38, label="base spec", color=_COLORS[5])
    axes.barh([place - 0.2 for place in places], [best[name][1] for name in names], 0.38, label="fastest", color=_COLORS[0])
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("µs, " + ("measured" if recorded.measured else "predicted"))
    axes.legend()
    return _png(figure)


def _floor(recorded: Recorded, rows: Rows) -> bytes:
    best = fastest(recorded, rows)
    shares = [(shape.name, recorded.floors.get(shape.name, 0.0) / best[shape.name][1]) for shape in recorded.shapes if shape.name in best]
    shares = [(name, share) for name, share in shares if share > 0]
    if not shares:
        return b""
    figure, axes = _figure(8, 0.9 + 0.28 * len(shares))
    axes.barh([name for name, _ in shares], [share * 100 for _, share in shares], color=_COLORS[2])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time that reading its bytes alone takes")
    return _png(figure)


def _stages(rows: Rows) -> bytes:
    counts = {stage: sum(own[""].stage is stage for own in rows.values() if "" in own) for stage in Stage}
    counts = {stage: count for stage, count in counts.items() if count}
    if not counts:
        return b""
    figure, axes = _figure(8, 0.8 + 0.3 * len(counts))
    bars = axes.barh([str(stage) for stage in counts], list(counts.values()), color=[_COLORS[3 if s.is_rejection else 0] for s in counts])
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("configurations")
    return _png(figure)


def _predicted(rows: Rows) -> bytes:
    pairs = [
        (row.predicted, row.measured)
        for own in rows.values()
        for row in own.values()
        if row.measured is not None and row.predicted is not None
    ]
    if len(pairs) < 3:
        return b""
    figure, axes = _figure(5.5, 5)
    axes.scatter([a for a, _ in pairs], [b for _, b in pairs], s=10, alpha=0.6, color=_COLORS[0])
    ends = [min(min(pair) for pair in pairs), max(max(pair) for pair in pairs)]
    axes.plot(ends, ends, color=_COLORS[5], linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted µs")
    axes.set_ylabel("measured µs")
    value = rank_correlation(pairs)
    if value is not None:
        axes.set_title(f"rank correlation over all shapes {value:.2f}")
    return _png(figure)


def _pairs(recorded: Recorded, rows: Rows) -> dict[str, bytes]:
    """A heat map per pair of parameters: the best score with those two values."""
    base = rows.get(recorded.incumbent, {})
    scores = {
        name: score
        for name, own in rows.items()
        if (score := score_of_rows(own, base, recorded.shapes, recorded.objective, recorded.measured)) is not None
    }
    axes_used = [axis for axis in recorded.space.axes if len(axis.values) > 1]
    found: dict[str, bytes] = {}
    for first, second in combinations(axes_used, 2):
        cells: dict[tuple[str, str], float] = {}
        for name, score in scores.items():
            values = rows[name][""].values
            key = first.label(values.get(first.path)), second.label(values.get(second.path))
            cells[key] = min(score, cells.get(key, score))
        rows_used = _labels(first, {key[0] for key in cells})
        columns = _labels(second, {key[1] for key in cells})
        if len(rows_used) < 2 or len(columns) < 2 or len(found) >= _MOST_PAIRS:
            continue
        figure, axes = _figure(1.8 + 0.75 * len(columns), 1.4 + 0.45 * len(rows_used))
        grid = [[cells.get((row, column), float("nan")) for column in columns] for row in rows_used]
        image = axes.imshow(grid, cmap="viridis_r", aspect="auto")
        axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
        axes.set_yticks(range(len(rows_used)), rows_used)
        axes.set_xlabel(second.path)
        axes.set_ylabel(first.path)
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                if not math.isnan(value):
                    color = "black" if image.norm(value) < _BRIGHT else "white"
                    axes.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=7, color=color)
        figure.colorbar(image, label="best score")
        found[f"pair-{first.path}-{second.path}"] = _png(figure)
    return found


def _labels(axis: Axis, used: set[str]) -> list[str]:
    """The labels in the order of the file, then those that only conditions give."""
    known = [label for value in axis.values if (label := axis.label(value)) in used]
    return list(dict.fromkeys([*known, *sorted(used - set(known))]))
