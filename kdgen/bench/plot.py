"""A picture of a bench run: time over rows for every kernel, and its share of the nearer ceiling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdgen.bench.run import Result
from kdgen.errors import ToolchainError

_SIZE = re.compile(r"^(?P<rest>.*?)(?:, )?[A-Z] = (?P<size>\d+)(?P<more>.*)$")


def curves(results: Sequence[Result]) -> dict[str, list[tuple[int, Result]]]:
    """Results with a size in their workload's name (`8k, T = 16`), by kernel and the rest of that name, in order of size.

    A workload without a size is a curve of one point, at 1.
    """
    found: dict[str, list[tuple[int, Result]]] = {}
    for result in results:
        match = _SIZE.match(result.workload)
        rest = (match["rest"] + match["more"]).strip(", ") if match else result.workload
        name = f"{result.kernel} {rest}".strip()
        found.setdefault(name, []).append((int(match["size"]) if match else 1, result))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Write a PNG (or whatever the path's ending names); the file appears when it is complete.

    Raises:
        ToolchainError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ToolchainError("a picture needs matplotlib: pip install 'kdgen[sweep]'") from error

    figure = Figure(figsize=(12, 5), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for name, points in curves(results).items():
        sizes = [size for size, _ in points]
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "label": name}
        times.plot(sizes, [result.timing.median for _, result in points], **style)
        nearer = [100 * max(result.read_share, result.mma_share) for _, result in points]
        if any(nearer):
            shares.plot(sizes, nearer, **style)
    for axes, label in ((times, "µs"), (shares, "% of the nearer ceiling")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("rows, nodes or sequences")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    times.set_yscale("log")
    times.legend(fontsize=7)
    figure.suptitle(title)
    partial = path.with_name(f".{path.name}.part{path.suffix}")
    try:
        figure.savefig(partial, metadata={"Software": None} if path.suffix == ".png" else None)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
