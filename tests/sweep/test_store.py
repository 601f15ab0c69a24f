import csv
import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest

from kdgen.errors import ArtifactError, KdgenError, ToolchainError, UsageError
from kdgen.sweep.export import export
from kdgen.sweep.stages import Row, Stage
from kdgen.sweep.store import FILE_NAME, Store
from tests.sweep.fakes import PLACE, ROOT, comparable

ROW = Row("c1", "T = 1", Stage.COMPILED, "", {"tile.n": 64, "mode": "x"}, 1.5, "memory", details={"floor": 1.0})
WRITER = """
import sys
from pathlib import Path
from kdgen.sweep.stages import Row, Stage
from kdgen.sweep.store import Place, Store
place = Place("s" * 64, "a GPU", "a compiler")
with Store(Path(sys.argv[1])) as store:
    for i in range(int(sys.argv[3])):
        store.put(place, [Row(f"{sys.argv[2]}{i:05}", shape, Stage.COMPILED, "", {"i": i}, float(i)) for shape in ("", "T = 1")])
        print(i, flush=True)
"""


def start_writer(directory, name, count):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory), name, str(count)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_rows_come_back_as_they_were(tmp_path):
    measured = replace(ROW, shape="T = 8", stage=Stage.MEASURED, measured=2.0, low=1.9, high=2.1, incumbent=2.2)
    with Store(tmp_path) as store:
        store.put(PLACE, [ROW, measured])
        store.describe(PLACE, "x", "sm_90", {"a": [1]})
        assert store.rows(PLACE) == [ROW, measured]
        assert store.rows(PLACE, "c1") == [ROW, measured]
        assert store.rows(replace(PLACE, device="another")) == []
    with Store(tmp_path, read_only=True) as store:
        assert store.rows(PLACE) == [ROW, measured]
        assert store.sweeps() == [(PLACE, "x", "sm_90", {"a": [1]})]


def test_a_later_stage_stays(tmp_path):
    with Store(tmp_path) as store:
        store.put(PLACE, [replace(ROW, stage=Stage.MEASURED, measured=2.0)])
        store.put(PLACE, [ROW])
        assert store.rows(PLACE)[0].measured == 2.0
        store.put(PLACE, [replace(ROW, stage=Stage.MEASURED, measured=3.0)])
        assert store.rows(PLACE)[0].measured == 3.0


def test_all_rows_of_a_call_or_none(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(KdgenError):
            store.put(PLACE, [ROW, replace(ROW, shape="T = 2", details={"x": 1}, configuration=None)])
        assert store.rows(PLACE) == []
        store.put(PLACE, [ROW])


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    big = [replace(ROW, configuration=f"b{i}", reason="x" * 4000) for i in range(50)]
    with Store(tmp_path) as store:
        store.put(PLACE, [ROW])
        store.limit_pages(30)
        with pytest.raises(
            KdgenError, match=r"database or disk is full; the disk is full: free some space, and give the same command again"
        ):
            store.put(PLACE, big)
        assert store.rows(PLACE) == [ROW]
    with Store(tmp_path) as store:
        store.put(PLACE, big)
        assert len(store.rows(PLACE)) == 51


def test_a_database_that_may_not_be_written(tmp_path):
    with Store(tmp_path) as store:
        store.put(PLACE, [ROW])
    with Store(tmp_path, read_only=True) as store, pytest.raises(KdgenError, match="readonly database; you may not write there"):
        store.put(PLACE, [ROW])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(KdgenError, match="choose another --out"):
        Store(tmp_path / "inner")


def test_places_that_are_no_stores(tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no sweep.sqlite"):
        Store(tmp_path, read_only=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(KdgenError, match=r"cannot be made: .*; choose another --out"):
        Store(tmp_path / "file" / "inner")
    (tmp_path / FILE_NAME).write_bytes(b"this is no database, and never was one" * 100)
    with pytest.raises(ArtifactError, match="damaged, or no store of a sweep"):
        Store(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    sqlite3.connect(other / FILE_NAME).execute("create table something (x)").connection.close()
    with pytest.raises(ArtifactError, match="no store of a sweep"):
        Store(other, read_only=True)


def test_a_store_of_a_newer_kdgen(tmp_path):
    Store(tmp_path).__exit__()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("update meta set value = '2' where key = 'schema'")
    with pytest.raises(ArtifactError, match="has schema 2, this kdgen knows 1: upgrade kdgen"):
        Store(tmp_path)


def test_two_processes_write_at_once(tmp_path):
    writers = [start_writer(tmp_path, name, 60) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    with Store(tmp_path, read_only=True) as store:
        assert len(store.rows(PLACE)) == 240
    for writer in writers:
        writer.stdout.close()


def test_a_killed_writer_loses_nothing_that_it_said_was_there(tmp_path):
    writer = start_writer(tmp_path, "k", 100_000)
    for _ in range(25):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(10) == -signal.SIGKILL
    writer.stdout.close()
    with Store(tmp_path) as store:
        rows = store.rows(PLACE)
        assert len(rows) % 2 == 0
        assert len(rows) >= 2 * (last + 1)
        store.put(PLACE, [ROW])


def test_exports_have_every_row(tmp_path):
    with Store(tmp_path) as store:
        store.describe(PLACE, "x", "sm_90", {})
        store.put(PLACE, [ROW, replace(ROW, configuration="c2", values={"tile.n": 32, "list": [1, 2]})])
        assert export(store, tmp_path / "a" / "x.csv") == 2
        lines = list(csv.DictReader((tmp_path / "a" / "x.csv").open()))
        assert [line["tile.n"] for line in lines] == ["64", "32"]
        assert lines[0]["predicted"] == "1.5"
        assert lines[1]["list"] == "[1, 2]"
        export(store, tmp_path / "x.json")
        found = json.loads((tmp_path / "x.json").read_text())
        assert found[0]["stage"] == "compiled"
        assert found[1]["list"] == [1, 2]
        with pytest.raises(UsageError, match=r"x.xlsx: the ending says how to export; allowed: .csv, .json, .parquet"):
            export(store, tmp_path / "x.xlsx")
        with pytest.raises(KdgenError, match="cannot be written"):
            export(store, tmp_path / "x.json" / "y.csv")
    assert comparable([ROW])[0]["configuration"] == "c1"


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    with Store(tmp_path) as store:
        store.describe(PLACE, "x", "sm_90", {})
        store.put(PLACE, [ROW])
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "pyarrow", None)
            with pytest.raises(ToolchainError, match=r"parquet files need pyarrow: pip install pyarrow; or export to .csv or .json"):
                export(store, tmp_path / "x.parquet")
        assert not (tmp_path / "x.parquet").exists()
        parquet = pytest.importorskip("pyarrow.parquet")
        export(store, tmp_path / "x.parquet")
        table = parquet.read_table(tmp_path / "x.parquet").to_pylist()
        assert table[0]["predicted"] == 1.5
        assert table[0]["tile.n"] == 64
