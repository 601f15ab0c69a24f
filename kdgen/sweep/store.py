"""The store of a sweep: one SQLite file (WAL), a row per spec hash, configuration, device, toolchain and shape.

Every row is committed when its work is done, so a killed sweep has lost at most what it was doing. Several sweeps may write at the same
time: a row is replaced only by one of a later stage.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kdgen.errors import ArtifactError, KdgenError
from kdgen.sweep.stages import Row, Stage

FILE_NAME = "sweep.sqlite"
SCHEMA = 1
_WAIT_SECONDS = 60.0  # for other writers

_TABLES = """
create table if not exists meta (key text primary key, value text not null) without rowid;
create table if not exists sweeps (
  spec text not null, device text not null, toolchain text not null, name text not null, target text not null, document text not null,
  turn integer not null,
  primary key (spec, device, toolchain)
) without rowid;
create table if not exists results (
  spec text not null, configuration text not null, device text not null, toolchain text not null, shape text not null,
  stage text not null, rank integer not null, reason text not null, params text not null, predicted real, limiter text not null,
  measured real, low real, high real, incumbent real, details text not null,
  primary key (spec, configuration, device, toolchain, shape)
) without rowid;
"""
_COLUMNS = (
    "spec", "configuration", "device", "toolchain", "shape", "stage", "rank", "reason", "params", "predicted", "limiter", "measured",
    "low", "high", "incumbent", "details",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What rows belong together: the first part of their key.

    Attributes:
        spec: spec hash (`SweepSpec.digest`).
        device: the GPU's name, or `none (sm_120)`.
        toolchain: the compiler's identity.
    """

    spec: str
    device: str
    toolchain: str


class Store:
    """An open store; a context manager.

    Args:
        directory: that holds `sweep.sqlite`; made when missing.
        read_only: nothing is written; the file must exist.

    Raises:
        KdgenError: it cannot be made or written.
        ArtifactError: it is no store, or of a newer kdgen.
    """

    def __init__(self, directory: Path, *, read_only: bool = False):
        self.directory = directory
        self.path = directory / FILE_NAME
        if read_only and not self.path.is_file():
            raise ArtifactError(f"{directory}: holds no {FILE_NAME}; give the --out directory of a sweep")
        try:
            if not read_only:
                directory.mkdir(parents=True, exist_ok=True)
            mode = "ro" if read_only else "rwc"
            self._db = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_WAIT_SECONDS, isolation_level=None
            )
        except OSError as error:
            raise KdgenError(f"{directory} cannot be made: {error.strerror}; choose another --out") from error
        except sqlite3.Error as error:
            raise self._failure(error) from error
        with self._guarded():
            if not read_only:
                self._switch_to_wal()
                self._db.execute("pragma synchronous = normal")
                self._create()
        self._check_schema()

    def _switch_to_wal(self) -> None:
        # SQLite does not wait for another process that is just switching; whoever comes second has to try again.
        limit = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                self._db.execute("pragma journal_mode = wal")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > limit:
                    raise
                time.sleep(0.02)

    def _create(self) -> None:
        # Two sweeps may start at once: the second waits here, and finds everything made.
        self._db.execute("begin immediate")
        try:
            for statement in filter(str.strip, _TABLES.split(";")):
                self._db.execute(statement)
            self._db.execute("insert or ignore into meta values ('schema', ?)", (str(SCHEMA),))
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def _check_schema(self) -> None:
        with self._guarded():
            try:
                found = self._db.execute("select value from meta where key = 'schema'").fetchone()
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):
                    raise
                found = None
        if found is None or not str(found[0]).isdigit():
            raise ArtifactError(f"{self.path} is no store of a sweep; choose another --out")
        if int(found[0]) > SCHEMA:
            raise ArtifactError(f"{self.path} has schema {found[0]}, this kdgen knows {SCHEMA}: upgrade kdgen, or choose another --out")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._db.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> KdgenError:
        text = str(error)
        if isinstance(error, sqlite3.DatabaseError) and ("not a database" in text or "malformed" in text):
            return ArtifactError(f"{self.path} is damaged, or no store of a sweep ({text}); move it away, or choose another --out")
        if "full" in text:
            remedy = "the disk is full: free some space, and give the same command again; what was recorded is kept"
        elif "readonly" in text or "read-only" in text:
            remedy = "you may not write there: choose another --out"
        elif "locked" in text:
            remedy = f"another process has held it for {_WAIT_SECONDS:.0f} seconds"
        elif "unable to open" in text:
            why = "" if os.path.isdir(self.directory) else " (no such directory)"
            remedy = f"it cannot be opened{why}: choose another --out"
        elif "disk I/O" in text:
            remedy = "the disk fails, or is full"
        else:
            remedy = "choose another --out"
        return KdgenError(f"{self.path}: {text}; {remedy}")

    def describe(self, place: Place, name: str, target: str, document: Mapping[str, Any]) -> None:
        """Say what the rows of `place` are about; the last description counts, and is the last of `sweeps`."""
        text = json.dumps(dict(document), sort_keys=True)
        with self._guarded():
            self._db.execute(
                "insert or replace into sweeps select ?, ?, ?, ?, ?, ?, coalesce(max(turn), 0) + 1 from sweeps",
                (*_key(place), name, target, text),
            )

    def sweeps(self) -> list[tuple[Place, str, str, dict[str, Any]]]:
        """Every (place, name, target, document), the one described last at the end."""
        with self._guarded():
            rows = self._db.execute("select spec, device, toolchain, name, target, document from sweeps order by turn").fetchall()
        return [(Place(*row[:3]), row[3], row[4], json.loads(row[5])) for row in rows]

    def put(self, place: Place, rows: Iterable[Row]) -> None:
        """Record rows, all or none; one that is there already stays when its stage is a later one."""
        values = [_to_values(place, row) for row in rows]
        marks = ", ".join("?" * len(_COLUMNS))
        changes = ", ".join(f"{column} = excluded.{column}" for column in _COLUMNS[5:])
        statement = (
            f"insert into results ({', '.join(_COLUMNS)}) values ({marks}) "
            f"on conflict (spec, configuration, device, toolchain, shape) do update set {changes} where excluded.rank >= results.rank"
        )
        with self._guarded():
            self._db.execute("begin immediate")
            try:
                self._db.executemany(statement, values)
                self._db.execute("commit")
            except BaseException:
                # When the disk is full SQLite may have ended the transaction itself.
                if self._db.in_transaction:
                    self._db.execute("rollback")
                raise

    def rows(self, place: Place, configuration: str = "") -> list[Row]:
        """The rows of a place, or of one configuration, by configuration and shape."""
        text = f"select {', '.join(_COLUMNS)} from results where spec = ? and device = ? and toolchain = ?"
        with self._guarded():
            if configuration:
                found = self._db.execute(f"{text} and configuration = ? order by shape", (*_key(place), configuration)).fetchall()
            else:
                found = self._db.execute(f"{text} order by configuration, shape", _key(place)).fetchall()
        return [_from_values(item) for item in found]

    def remove(self, place: Place, configuration: str) -> None:
        """Forget a configuration."""
        with self._guarded():
            self._db.execute(
                "delete from results where spec = ? and device = ? and toolchain = ? and configuration = ?", (*_key(place), configuration)
            )

    def limit_pages(self, pages: int) -> None:
        """Let the file grow to so many pages at most; what a full disk does, for whoever wants to bound a store."""
        with self._guarded():
            self._db.execute(f"pragma max_page_count = {pages:d}")


def _key(place: Place) -> tuple[str, str, str]:
    return place.spec, place.device, place.toolchain


def _to_values(place: Place, row: Row) -> tuple[Any, ...]:
    return (
        place.spec, row.configuration, place.device, place.toolchain, row.shape, str(row.stage), row.stage.rank, row.reason,
        json.dumps(dict(row.values), sort_keys=True), row.predicted, row.limiter, row.measured, row.low, row.high, row.incumbent,
        json.dumps(dict(row.details), sort_keys=True),
    )  # fmt: skip


def _from_values(item: tuple[Any, ...]) -> Row:
    _, configuration, _, _, shape, stage, _, reason, params, predicted, limiter, measured, low, high, incumbent, details = item
    return Row(
        configuration, shape, Stage(stage), reason, json.loads(params), predicted, limiter, measured, low, high, incumbent,
        json.loads(details),
    )  # fmt: skip
