"""Names of temporary directories that say whose they are, so that what a killed process left behind is found and removed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

_NAME = re.compile(r"kdgen-[a-z]+-(\d+)-")
#: Seconds that a directory of a dead process is left alone: its number may be that of a process in another namespace of the same machine.
_GRACE = 600


def prefix(kind: str) -> str:
    """For `tempfile`: names the kind and this process. The first call removes what dead processes have left."""
    remove_orphans()
    return f"kdgen-{kind}-{os.getpid()}-"


@functools.cache
def remove_orphans() -> None:
    """Remove this user's temporary directories of processes that are gone; never an error."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            match = _NAME.match(path.name)
            if match and not _alive(int(match[1])):
                with contextlib.suppress(OSError):
                    status = path.lstat()
                    if status.st_uid == os.getuid() and time.time() - status.st_mtime > _GRACE:
                        shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True
