"""The cache of compiled objects: `objects/KEY[:2]/KEY/` holds an object's files and `object.json`, which lists them with their hashes.

An object is written in a private directory and appears by one rename, so a name under `objects/` is complete or not there. Disks fail and
people edit, so it is checked in full whenever it is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdgen.build.files import private_name, replace_directory, sweep, write_tree
from kdgen.build.locks import hold
from kdgen.errors import KdgenError

#: Part of every key: raised when the same inputs give other files, so that objects of older versions are not found.
SCHEMA = 1
_DIRECTORY_SCHEMA = "1"
_RECORD = "object.json"
_TEMPORARY = "t-"


def cache_directory() -> Path:
    """The cache: `KDGEN_CACHE_DIR`, else `$XDG_CACHE_HOME/kdgen/1`, else `~/.cache/kdgen/1`. It need not exist.

    Raises:
        KdgenError: none of them says where it is.
    """
    if chosen := os.environ.get("KDGEN_CACHE_DIR"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard says to ignore a relative one
        return Path(base) / "kdgen" / _DIRECTORY_SCHEMA
    try:
        return Path.home() / ".cache" / "kdgen" / _DIRECTORY_SCHEMA
    except RuntimeError as error:
        raise KdgenError("there is no home directory for the cache of compiled objects; set KDGEN_CACHE_DIR") from error


@dataclass(frozen=True)
class CachedObject:
    """An object out of the cache, checked.

    Attributes:
        files: name to contents.
        facts: what its maker recorded beside them (`resources`, `warnings`).
    """

    files: Mapping[str, bytes]
    facts: Mapping[str, Any]


class CorruptObjectError(Exception):
    """An object in the cache is not what was stored; the text says how."""


class ObjectCache:
    """A cache directory. Reading needs no lock; storing is done under `lock(key)`."""

    def __init__(self, root: Path):
        self.root = root

    def place(self, key: str) -> Path:
        """The directory of an object."""
        return self.root / "objects" / key[:2] / key

    def load(self, key: str) -> CachedObject | None:
        """The object, or None when there is none.

        Raises:
            CorruptObjectError: it is damaged.
        """
        place = self.place(key)
        try:
            record = json.loads((place / _RECORD).read_bytes())
            if record["digest"] != _digest(record) or record["key"] != key:
                raise CorruptObjectError(f"{_RECORD} does not match its digest")
            files = {name: _checked(place / name, facts) for name, facts in record["files"].items()}
        except (FileNotFoundError, NotADirectoryError) as error:
            if not place.exists():
                return None
            raise CorruptObjectError(f"{Path(str(error.filename)).name} is missing") from error
        except OSError as error:
            raise CorruptObjectError(f"it cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptObjectError(f"{_RECORD} is damaged") from error
        return CachedObject(files, record["facts"])

    def store(self, key: str, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
        """Store an object in the place of any other of its key. Call it under `lock(key)`."""
        listed = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
        record: dict[str, Any] = {"schema": SCHEMA, "key": key, "files": listed, "facts": dict(facts)}
        record["digest"] = _digest(record)
        place = self.place(key)
        with self.temporary() as directory:
            staged = directory / "object"
            staged.mkdir()
            write_tree(staged, {**files, _RECORD: json.dumps(record, sort_keys=True, indent=1).encode()})
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                replace_directory(staged, place)
            except OSError as error:
                # Where locks do not work (some network disks) another process may have been faster; its object is as good when it is whole.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self.load(key):
                    raise

    @contextlib.contextmanager
    def lock(self, key: str, what: str, tell: Callable[[str], None]) -> Iterator[None]:
        """Hold the lock of a key; see `kdgen.build.locks.hold`."""
        with hold(self.root / "locks" / f"{key}.lock", what, tell):
            yield

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """A private directory on the cache's file system, removed at the end."""
        parent = self.root / "tmp"
        parent.mkdir(parents=True, exist_ok=True)
        directory = parent / private_name(_TEMPORARY)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def sweep(self) -> None:
        """Remove private directories of processes that are gone."""
        sweep(self.root / "tmp", _TEMPORARY)


def _checked(path: Path, facts: Mapping[str, Any]) -> bytes:
    content = path.read_bytes()
    if len(content) != facts["bytes"]:
        raise CorruptObjectError(f"{path.name} has {len(content)} bytes, not {facts['bytes']}")
    if hashlib.sha256(content).hexdigest() != facts["sha256"]:
        raise CorruptObjectError(f"{path.name} does not match its SHA-256")
    return content


def _digest(record: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in record.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
