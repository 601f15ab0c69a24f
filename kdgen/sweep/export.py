"""Exports of a store: CSV and JSON with the standard library, parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdgen.errors import KdgenError, ToolchainError, UsageError
from kdgen.sweep.store import Store

FORMATS = ("csv", "json", "parquet")
_LEADING = (
    "sweep", "target", "device", "toolchain", "spec", "configuration", "shape", "stage", "reason", "predicted", "limiter", "measured",
    "low", "high", "incumbent",
)  # fmt: skip


def records(store: Store) -> list[dict[str, Any]]:
    """Every row of a store as one flat mapping; a swept parameter `tile.n` is the key `tile.n`."""
    found = []
    for place, name, target, _ in store.sweeps():
        for row in store.rows(place):
            data = row.to_json()
            found.append(
                {
                    "sweep": name, "target": target, "device": place.device, "toolchain": place.toolchain, "spec": place.spec,
                    **{key: data[key] for key in _LEADING if key in data},
                    **dict(row.values),
                    "details": dict(row.details),
                }
            )  # fmt: skip
    return found


def export(store: Store, path: Path) -> int:
    """Write every row to a file, whose ending says how; returns how many.

    Raises:
        UsageError: an unknown ending.
        ToolchainError: parquet without pyarrow.
        KdgenError: the file cannot be written; what was there is unchanged.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UsageError(f"{path}: the ending says how to export; allowed: {', '.join('.' + item for item in FORMATS)}")
    found = records(store)
    content = {"csv": _csv, "json": _json, "parquet": _parquet}[kind](found)
    write_whole(path, content)
    return len(found)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there as a whole, or as it was before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise KdgenError(f"{path} cannot be written: {error.strerror}") from error


def _columns(found: Sequence[dict[str, Any]]) -> list[str]:
    swept = sorted({key for item in found for key in item} - {*_LEADING, "details"})
    return [*_LEADING, *swept, "details"]


def _cell(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list | bool) else value


def _csv(found: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _columns(found), restval="")
    writer.writeheader()
    for item in found:
        writer.writerow({key: "" if value is None else _cell(value) for key, value in item.items()})
    return text.getvalue().encode()


def _json(found: Sequence[dict[str, Any]]) -> bytes:
    return json.dumps(found, indent=1, sort_keys=True).encode() + b"\n"


def _parquet(found: Sequence[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ToolchainError("parquet files need pyarrow: pip install pyarrow; or export to .csv or .json") from error
    floats = ("predicted", "measured", "low", "high", "incumbent")
    columns: dict[str, Any] = {}
    for name in _columns(found):
        cells = [item.get(name) for item in found]
        if name in floats:
            columns[name] = pyarrow.array(cells, pyarrow.float64())
            continue
        kinds = {type(cell) for cell in cells if cell is not None}
        # A parameter of mixed kinds, or one that is a list, travels as text.
        columns[name] = (
            cells if len(kinds) == 1 and kinds <= {int, float, str, bool} else [None if c is None else str(_cell(c)) for c in cells]
        )
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())
