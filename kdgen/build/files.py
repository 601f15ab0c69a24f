"""Directories that appear, and are replaced, as a whole; and leftovers of processes that are gone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_HOUR = 3600.0
_DAY = 24 * _HOUR


def write_tree(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files, by relative path, into a new directory, and wait until they are on the disk."""
    directories = {directory}
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        directories.add(path.parent)
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    for item in directories:
        sync_directory(item)


def read_tree(directory: Path) -> dict[str, bytes] | None:
    """All files below a directory by relative path; None when it does not exist or cannot be read."""
    found = {}
    try:
        for path in sorted(directory.rglob("*")):
            if not path.is_dir():
                found[path.relative_to(directory).as_posix()] = path.read_bytes()
        return found if directory.is_dir() else None
    except OSError:
        return None


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_directory(staged: Path, destination: Path) -> None:
    """Put `staged` in the place of `destination`, whether that exists or not; what was there is removed.

    Where the kernel can exchange two names, readers find the old or the new directory at every moment. Elsewhere there is a moment
    without either; when the second of the two renames fails, the old directory is put back.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    if not destination.exists():
        os.rename(staged, destination)
    elif _exchange(staged, destination):
        shutil.rmtree(staged, ignore_errors=True)
    else:
        aside = staged.with_name(f"{staged.name}-old")
        os.rename(destination, aside)
        try:
            os.rename(staged, destination)
        except OSError:
            os.rename(aside, destination)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    sync_directory(destination.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def private_name(prefix: str) -> str:
    """A name nobody else uses, which says who made it."""
    return f"{prefix}{_machine()}-{os.getpid()}-{os.urandom(8).hex()}"


def sweep(directory: Path, prefix: str) -> None:
    """Remove what processes that are gone left under `private_name(prefix)`.

    A name made elsewhere (another machine, or another container, on a shared disk) is left alone for an hour, since its process cannot
    be seen from here; one whose process number is in use, for a day: the number may be another process's by now.
    """
    try:
        names = [item for item in os.listdir(directory) if item.startswith(prefix)]
    except OSError:
        return
    for name in names:
        path = directory / name
        machine, _, rest = name.removeprefix(prefix).partition("-")
        pid = rest.partition("-")[0]
        is_ours = machine == _machine() and pid.isdigit()
        patience = _HOUR if not is_ours else _DAY if _is_alive(int(pid)) else 0.0
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= patience:
                shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _machine() -> str:
    """Names this machine since its start, and this container: inside, a process number means one process."""
    facts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
