"""Locks between processes: the operating system's, so that they end with the process that holds them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PATIENCE = 5.0  # seconds of waiting before the user hears of it


@contextlib.contextmanager
def hold(path: Path, what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`; waits as long as its holder lives.

    Args:
        path: the lock file; made when missing, never removed, since that would let two processes hold it.
        what: what it guards, for the message.
        tell: called with a message once `PATIENCE` seconds have passed without getting it.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    holder = path.with_suffix(".pid")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        tell(f"waiting for {_who(holder)}, which holds {what} (lock {path})")
        lock.acquire()
    try:
        with contextlib.suppress(OSError):
            holder.write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()


def _who(holder: Path) -> str:
    try:
        return f"process {int(holder.read_text())}"
    except (OSError, ValueError):
        return "another process"
