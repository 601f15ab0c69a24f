"""Publishing: the complete directory of a target takes the place of the old one in one step, or nothing changes."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kdgen.build.files import private_name, read_tree, replace_directory, sweep, write_tree
from kdgen.build.locks import hold
from kdgen.build.manifest import FILE_NAME
from kdgen.errors import KdgenError

_STAGING = ".staging-"
_LOCKS = ".locks"
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "your disk quota is used up: free some space",
    errno.EROFS: "it is on a read-only file system: choose another --out",
    errno.EACCES: "you may not write there: choose another --out",
    errno.EPERM: "you may not write there: choose another --out",
}


def publish(out: Path, spec: str, target: str, files: Mapping[str, bytes]) -> bool:
    """Make `out/spec/target` hold exactly `files`.

    Args:
        out: the output directory; made when missing.
        spec, target: names of the two directories below it.
        files: relative path to contents, the manifest among them.

    Returns:
        False when the directory held exactly these files already; nothing was touched then.

    Raises:
        KdgenError: it cannot be written, or something that kdgen did not build stands in its place. What was there is still there.
    """
    destination = out / spec / target
    if read_tree(destination) == files:
        return False
    try:
        out.mkdir(parents=True, exist_ok=True)
        with hold(out / _LOCKS / f"{spec}@{target}.lock", f"{destination}", _tell):
            if read_tree(destination) == files:
                return False  # another build has just published the same
            _refuse_foreign(destination)
            sweep(out, _STAGING)
            staged = out / private_name(_STAGING)
            staged.mkdir()
            try:
                write_tree(staged, files)
                replace_directory(staged, destination)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose another --out")
        raise KdgenError(
            f"{destination} cannot be written: {error.strerror} ({error.filename}); {remedy}. What was there is unchanged"
        ) from error
    return True


def _refuse_foreign(destination: Path) -> None:
    """The old directory is removed, so it had better be one of ours."""
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_dir() and not destination.is_symlink():
        if not any(destination.iterdir()):
            return
        try:
            if "kernels" in json.loads((destination / FILE_NAME).read_bytes()):
                return
        except ValueError:
            return  # a damaged manifest is still a manifest
        except FileNotFoundError:
            pass
    raise KdgenError(f"{destination} exists and was not built by kdgen; move it away, or choose another --out")


def _tell(message: str) -> None:
    print(f"kdgen: {message}", file=sys.stderr, flush=True)
