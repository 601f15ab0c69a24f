"""Directories that are replaced as a whole, leftovers, and the cache's own errors."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdgen.build import ObjectCache, cache_directory
from kdgen.build import files as files_module
from kdgen.build.cache import CorruptObjectError
from kdgen.build.files import private_name, read_tree, replace_directory, sweep, write_tree
from kdgen.build.publish import publish
from kdgen.errors import KdgenError

KEY = "ab" * 32


def make(directory: Path, content: bytes) -> Path:
    directory.mkdir(parents=True)
    write_tree(directory, {"a": content, "deep/b": content})
    return directory


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    if not can_exchange:
        monkeypatch.setattr(files_module, "_exchange", lambda first, second: False)
    place = tmp_path / "x" / "place"
    for content in (b"one", b"two"):
        replace_directory(make(tmp_path / "staged", content), place)
        assert read_tree(place) == {"a": content, "deep/b": content}
        assert sorted(os.listdir(tmp_path)) == ["x"]


def test_failed_rename_puts_the_old_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make(tmp_path / "place", b"old")
    staged = make(tmp_path / "staged", b"new")
    real = os.rename
    monkeypatch.setattr(files_module, "_exchange", lambda first, second: False)

    def rename(source: Path, target: Path) -> None:
        if source == staged:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="No space left"):
        replace_directory(staged, place)
    assert read_tree(place) == {"a": b"old", "deep/b": b"old"}


def test_sweep_removes_only_what_is_dead(tmp_path: Path) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = private_name("").split("-")[0]
    old = time.time() - 2 * 3600
    cases = {
        f"t-{machine}-{dead}-1": (None, False),
        f"t-{machine}-{os.getpid()}-2": (old, True),
        "t-elsewhere-1-3": (None, True),
        "t-elsewhere-1-4": (old, False),
        f"other-{machine}-{dead}-5": (old, True),
    }
    for name, (stamp, _) in cases.items():
        make(tmp_path / name, b"x")
        if stamp:
            os.utime(tmp_path / name, (stamp, stamp))
    sweep(tmp_path, "t-")
    assert {name: (tmp_path / name).exists() for name in cases} == {name: stays for name, (_, stays) in cases.items()}
    sweep(tmp_path / "missing", "t-")


def test_cache_stores_and_checks(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    assert cache.load(KEY) is None
    cache.store(KEY, {"kernel": b"one"}, {"warnings": ""})
    cache.store(KEY, {"kernel": b"two"}, {"warnings": "w"})
    found = cache.load(KEY)
    assert found is not None
    assert (found.files, found.facts) == ({"kernel": b"two"}, {"warnings": "w"})
    # An object that was copied under another name is not that other object.
    other = cache.place("cd" * 32)
    other.parent.mkdir()
    cache.place(KEY).rename(other)
    with pytest.raises(CorruptObjectError):
        cache.load("cd" * 32)


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"KDGEN_CACHE_DIR": "/k"}, "/k"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/kdgen/1"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/kdgen/1"),
        ({"HOME": "/h"}, "/h/.cache/kdgen/1"),
    ],
)
def test_cache_directory(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], want: str) -> None:
    for name in ("KDGEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(want)


def test_publish_refuses_what_is_not_kdgens(tmp_path: Path) -> None:
    mine = tmp_path / "spec" / "host"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(KdgenError, match="was not built by kdgen"):
        publish(tmp_path, "spec", "host", {"manifest.json": b'{"kernels": {}}'})
    assert (mine / "thesis.txt").exists()
    assert publish(tmp_path, "spec", "sm_90", {"manifest.json": b'{"kernels": {}}'})
    assert not publish(tmp_path, "spec", "sm_90", {"manifest.json": b'{"kernels": {}}'})
    assert publish(tmp_path, "spec", "sm_90", {"manifest.json": b'{"kernels": {"x": 1}}'})


def test_publish_leaves_the_old_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, "spec", "host", {"manifest.json": b'{"kernels": {}}'})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KdgenError, match=r"the disk is full.*unchanged"):
        publish(tmp_path, "spec", "host", {"manifest.json": b'{"kernels": {"x": 1}}'})
    assert read_tree(tmp_path / "spec" / "host") == {"manifest.json": b'{"kernels": {}}'}
    assert not list(tmp_path.glob(".staging-*"))
