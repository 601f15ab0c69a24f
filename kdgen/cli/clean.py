"""`kdgen clean`: remove what kdgen wrote, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kdgen.cli.output import human_bytes


def clean(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Remove the builds below this directory.")] = Path("generated"),
    cache: Annotated[bool, typer.Option("--cache", help="Remove the objects in the cache, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove built directories, and with --cache the compiled objects.

    A directory counts as built when it holds a manifest that kdgen wrote; files of other origin stay. Lock files stay, too: a running
    build may hold them.

    Example: kdgen clean --out generated --cache --dry-run
    """
    from kdgen.build import cache_directory

    verb = "would remove" if dry_run else "removed"
    total = 0
    for directory in list(built_directories(out)):
        total += (size := _size(directory))
        print(f"{verb} {directory} ({human_bytes(size)})")
        if not dry_run:
            _remove([directory])
    if cache:
        objects = list(cached_objects(cache_directory()))
        total += (size := sum(map(_size, objects)))
        print(f"{verb} {len(objects)} compiled objects in {cache_directory()} ({human_bytes(size)})")
        if not dry_run:
            _remove(objects)
    print(f"{human_bytes(total)} in all")


def built_directories(out: Path) -> Iterator[Path]:
    """The directories OUT/SPEC/TARGET that kdgen wrote."""
    for manifest in sorted(out.glob("*/*/manifest.json")):
        try:
            document = json.loads(manifest.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(document, dict) and {"schema", "kdgen", "kernels"} <= document.keys():
            yield manifest.parent


def cached_objects(cache: Path) -> Iterator[Path]:
    """The directories of the objects in a cache. The user may have put the cache where other things are: names are checked."""
    for record in sorted(cache.glob("objects/*/*/object.json")):
        if re.fullmatch(r"[0-9a-f]{64}", record.parent.name):
            yield record.parent


def _size(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.rglob("*") if not file.is_dir())


def _remove(directories: Sequence[Path]) -> None:
    """Remove directories, and those around them that held nothing else."""
    import shutil

    from kdgen.errors import KdgenError

    for directory in directories:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise KdgenError(f"{directory}: cannot be removed: {error.strerror} ({error.filename})") from error
        if not any(directory.parent.iterdir()):
            directory.parent.rmdir()
