"""How commands print: tables and progress bars on a terminal, plain columns and lines everywhere else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: Columns of plain output: wide enough that no value is ever cut, since a script may read it.
PLAIN_WIDTH = 240


def make_console(*, stderr: bool = False) -> Console:
    """A console for standard output (or standard error), without colours and line breaks when it is not a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    terminal = stream.isatty()
    return Console(file=stream, width=None if terminal else PLAIN_WIDTH, highlight=False, soft_wrap=not terminal)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), fold: str = "") -> None:
    """Print one table; as plain columns when standard output is no terminal, or one too narrow.

    Args:
        title: a line above it; empty for none.
        columns: headings.
        rows: cells, as many in each row as there are columns; shown as they are, no markup.
        right: headings of the columns that hold numbers, aligned to the right.
        fold: heading of the column whose cells may take several lines.
    """
    console = make_console() if sys.stdout.isatty() else None
    # What a column that may not fold needs is its longest cell; one that may fold should still have room for a few words.
    needs = [20 if column == fold else max(map(len, cells)) for column, *cells in zip(columns, columns, *rows, strict=True)]
    if console is None or sum(needs) + 2 * len(columns) > console.width:
        _print_plain(title, columns, rows, right)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != fold, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def _print_plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """The table as plain columns, without loading rich: builds are run by scripts, often."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if title:
        print(title)
    for row in (columns, *rows):
        cells = zip(columns, row, widths, strict=True)
        print("  ".join(cell.rjust(width) if column in right else cell.ljust(width) for column, cell, width in cells).rstrip())


def print_json(value: Any) -> None:
    """Print a JSON document: sorted keys, two spaces, nothing else on standard output."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def human_bytes(count: int) -> str:
    """A byte count for people: `101,376 B`."""
    return f"{count:,} B"


@dataclass
class LineProgress:
    """Progress as one plain line a unit, on standard error, so that logs stay readable and standard output stays clean."""

    total: int = 0
    done: int = 0

    def start(self, total: int) -> None:
        """`total` units of work follow."""
        self.total, self.done = total, 0

    def advance(self, label: str) -> None:
        """One unit, described by `label`, is done."""
        self.done += 1
        print(f"[{self.done}/{self.total}] {label}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """No more units follow."""


@dataclass
class BarProgress:
    """Progress as a bar on the terminal's standard error; it disappears when the work is done."""

    _bar: RichProgress | None = field(default=None, init=False)
    _task: TaskID | None = field(default=None, init=False)

    def start(self, total: int) -> None:
        """`total` units of work follow."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[label]}"))
        self._bar = Progress(*columns, console=make_console(stderr=True), transient=True)
        self._task = self._bar.add_task("compiling", total=total, label="")
        self._bar.start()

    def advance(self, label: str) -> None:
        """One unit, described by `label`, is done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, label=label)

    def finish(self) -> None:
        """No more units follow."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def make_progress() -> BarProgress | LineProgress:
    """A bar when standard error is a terminal, plain lines otherwise."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()
