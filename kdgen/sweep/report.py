"""The report of a sweep: one HTML file that asks for nothing from outside, and its pictures as PNG files beside it."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kdgen.sweep.choose import Choice, Rows, by_configuration, choose, correlations, score_of_rows
from kdgen.sweep.export import write_whole
from kdgen.sweep.plots import fastest, pictures
from kdgen.sweep.recorded import Recorded
from kdgen.sweep.stages import WHOLE, Stage

HTML = "report.html"
_RANKED = 50
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto; } caption { text-align: left; color: #555; }
th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } code { font-size: .9em; }
tr.chosen { background: #eaf3ff; } img { max-width: 100%; height: auto; } figure { display: inline-block; margin: .5rem; }
figcaption, .note { color: #555; font-size: .9rem; }
"""


def write_report(recorded: Recorded, directory: Path) -> Path:
    """Write `report.html` and the pictures into a directory; returns the HTML file.

    Raises:
        ToolchainError: matplotlib is not installed.
        KdgenError: a file cannot be written.
    """
    rows = by_configuration(recorded.rows)
    images = pictures(recorded, rows)
    for name, png in images.items():
        write_whole(directory / f"{name}.png", png)
    write_whole(directory / HTML, report_html(recorded, rows, images).encode())
    return directory / HTML


def report_html(recorded: Recorded, rows: Rows, images: Mapping[str, bytes]) -> str:
    """The document."""
    kind = "measured" if recorded.measured else "predicted by the static model, nothing was timed"
    choices = choose(rows, recorded.incumbent, recorded.shapes, recorded.objective)
    sections = [
        f"<h1>Sweep {escape(recorded.name)} for {escape(recorded.target)}</h1>",
        f"<p>{escape(recorded.place.device)} · {escape(recorded.place.toolchain)} · times are {kind}. Spec hash "
        f"<code>{recorded.place.spec[:12]}</code>. {recorded.space.size:,} points, {len(rows):,} configurations stored.</p>",
        _ceilings(recorded),
        _clocks(rows),
        _choices(recorded, choices),
        _per_shape(recorded, rows),
        _images(images, ("best", "floor")),
        _ranked(recorded, rows, choices),
        _rejections(rows),
        _images(images, ("stages",)),
        _model(recorded, rows),
        _images(images, ("predicted",)),
    ]
    pairs = sorted(name for name in images if name.startswith("pair-"))
    if pairs:
        sections += ["<h2>Pairs of parameters</h2><p class=note>The best score with each pair of values.</p>", _images(images, pairs)]
    sections.append(_long_values(recorded))
    body = "\n".join(filter(None, sections))
    title = f"kdgen sweep: {escape(recorded.name)}, {escape(recorded.target)}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _table(columns: Sequence[str], lines: Iterable[Sequence[Any]], numbers: Sequence[str] = (), chosen: Sequence[int] = ()) -> str:
    def cells(tag: str, items: Sequence[Any]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column in numbers else ''}>{escape(str(item))}</{tag}>"
            for column, item in zip(columns, items, strict=True)
        )

    body = "".join(f"<tr{' class=chosen' if number in chosen else ''}>{cells('td', line)}</tr>" for number, line in enumerate(lines))
    return f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"


def _images(images: Mapping[str, bytes], names: Sequence[str]) -> str:
    return "".join(
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(images[name]).decode()}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for name in names
        if name in images
    )


def _ceilings(recorded: Recorded) -> str:
    if not recorded.ceilings:
        return ""
    read, mma = recorded.ceilings["read"] / 1e9, recorded.ceilings["mma"] / 1e12
    return f"<p>Ceilings measured beside it: read {read:,.0f} GB/s, <code>mma.sync</code> bf16 {mma:,.0f} TFLOP/s.</p>"


def _clocks(rows: Rows) -> str:
    """Clocks, temperature and throttling while it was timed, where the driver told of them."""
    notes = [row.details["timing"].get("after") or {} for own in rows.values() for row in own.values() if "timing" in row.details]
    clocks = [note["clock_mhz"] for note in notes if "clock_mhz" in note]
    degrees = [note["temperature"] for note in notes if "temperature" in note]
    reasons = Counter(reason for note in notes for reason in note.get("throttle", ()))
    parts = [f"{min(clocks):,}–{max(clocks):,} MHz"] if clocks else []
    parts += [f"up to {max(degrees)} °C"] if degrees else []
    parts += [f"throttled after {count} of {len(notes)} timings: {reason}" for reason, count in sorted(reasons.items())]
    return f"<p>While timing: {escape(', '.join(parts))}.</p>" if parts else ""


def shown_values(recorded: Recorded, values: Mapping[str, Any]) -> str:
    """What differs from the base spec on one line: `key_tile=16 widths=#2`, where #2 is the second value of the file."""
    from kdgen.sweep.space import paths_of

    base = paths_of(dict(recorded.params))
    changed = [f"{axis.path}={axis.label(values[axis.path])}" for axis in recorded.space.axes if values.get(axis.path) != base[axis.path]]
    return " ".join(changed) or "as the base spec"


def _long_values(recorded: Recorded) -> str:
    """What the numbers stand for that are shown instead of long values."""
    lines = [
        [axis.path, axis.label(value), json.dumps(value)]
        for axis in recorded.space.axes
        for value in axis.values
        if axis.label(value) == f"#{axis.values.index(value) + 1}"
    ]
    return "<h2>Long values</h2>" + _table(("parameter", "shown as", "value"), lines) if lines else ""


def _choices(recorded: Recorded, choices: Sequence[Choice]) -> str:
    if not choices:
        return "<h2>Choice</h2><p>No configuration has a time for every shape.</p>"
    lines = [
        [
            item.bucket, item.configuration + (" (base)" if item.configuration == recorded.incumbent else ""), f"{item.score:.4f}",
            item.ties, f"{item.noise:.1%}", shown_values(recorded, item.values),
        ]
        for item in choices
    ]  # fmt: skip
    meaning = (
        "weighted geometric mean of time / the base spec's time"
        if recorded.objective.score == "relative"
        else "weighted mean of times in µs"
    )
    columns = ("shapes", "configuration", "score", "ties", "noise", "parameters")
    note = f"<p class=note>Score: {meaning}; smaller is better. Ties go to the base spec, then to the smallest id.</p>"
    return "<h2>Choice</h2>" + _table(columns, lines, ("score", "ties", "noise")) + note


def _per_shape(recorded: Recorded, rows: Rows) -> str:
    best = fastest(recorded, rows)
    base = rows.get(recorded.incumbent, {})
    lines = []
    for shape in recorded.shapes:
        if shape.name not in best:
            continue
        name, value = best[shape.name]
        row = rows[name][shape.name]
        own = base.get(shape.name)
        before = (own.measured if recorded.measured else own.predicted) if own else None
        floor = recorded.floors.get(shape.name, 0.0)
        spread = f"{row.low:.2f}–{row.high:.2f}" if row.low is not None and row.high is not None else ""
        lines.append(
            [
                shape.name, shape.bucket, f"{shape.weight:g}", f"{before:.2f}" if before else "", f"{value:.2f}", spread,
                f"{before / value:.2f}×" if before else "", f"{floor / value:.0%}" if floor else "", row.limiter, name,
            ]
        )  # fmt: skip
    columns = ("shape", "bucket", "weight", "base µs", "best µs", "10–90 %", "gain", "of floor", "limited by (model)", "configuration")
    return "<h2>Best per shape</h2>" + _table(columns, lines, ("weight", "base µs", "best µs", "gain", "of floor"))


def ranked(recorded: Recorded, rows: Rows) -> list[tuple[float, str]]:
    """(score, configuration) of all that can be chosen, the best first."""
    base = rows.get(recorded.incumbent, {})
    scores = [
        (score, name)
        for name, own in rows.items()
        if (score := score_of_rows(own, base, recorded.shapes, recorded.objective, recorded.measured)) is not None
    ]
    return sorted(scores, key=lambda item: (item[0], recorded.order(item[1])))


def _ranked(recorded: Recorded, rows: Rows, choices: Sequence[Choice]) -> str:
    every = ranked(recorded, rows)
    taken = {item.configuration for item in choices}
    lines, marked = [], []
    for number, (score, name) in enumerate(every[:_RANKED]):
        whole = rows[name][WHOLE]
        entries = whole.details.get("entries", {}).values()
        registers = max((entry["registers"] for entry in entries), default=0)
        shared = max((entry["shared_bytes"] for entry in entries), default=0)
        lines.append(
            [
                number + 1,
                name + (" (base)" if name == recorded.incumbent else ""),
                f"{score:.4f}",
                registers,
                f"{shared:,}",
                shown_values(recorded, whole.values),
            ]
        )
        if name in taken:
            marked.append(number)
    head = f"<h2>Ranking</h2><p class=note>{len(every):,} configurations can be chosen; the first {min(len(every), _RANKED)}.</p>"
    columns = ("rank", "configuration", "score", "registers", "shared bytes", "parameters")
    return head + _table(columns, lines, ("rank", "score", "registers", "shared bytes"), marked)


def _rejections(rows: Rows) -> str:
    wholes = [own[WHOLE] for own in rows.values() if WHOLE in own]
    counts = Counter((row.stage, row.reason) for row in wholes if row.stage.is_rejection or row.stage is Stage.PRUNED)
    lines = [[stage, reason, count] for (stage, reason), count in sorted(counts.items(), key=lambda item: (item[0][0].rank, -item[1]))]
    if not lines:
        return "<h2>Turned down</h2><p>No configuration was turned down.</p>"
    more = f"<p class=note>{len(lines) - 200} further reasons are in the store.</p>" if len(lines) > 200 else ""
    return "<h2>Turned down, and why</h2>" + _table(("stage", "reason", "configurations"), lines[:200], ("configurations",)) + more


def _model(recorded: Recorded, rows: Rows) -> str:
    if not recorded.measured:
        limits = Counter(row.limiter for own in rows.values() for shape, row in own.items() if shape and row.limiter)
        lines = [[limiter, count] for limiter, count in limits.most_common()]
        return "<h2>What limits, by the static model</h2>" + _table(
            ("limiter", "configurations × shapes"), lines, ("configurations × shapes",)
        )
    found = correlations(rows, [shape.name for shape in recorded.shapes])
    if not found:
        return ""
    lines = [[shape, f"{value:.2f}"] for shape, value in found.items()]
    mean = sum(found.values()) / len(found)
    head = f"<h2>Predicted and measured</h2><p>Mean rank correlation over the shapes: {mean:.2f}.</p>"
    return head + _table(("shape", "rank correlation"), lines, ("rank correlation",))
