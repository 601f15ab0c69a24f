"""Built directories as the commands read them: manifests, checked, as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

#: Headings of `resource_cells`.
NUMBERS = ("registers", "shared", "stack", "spill", "occupancy")
#: A table cell with nothing to say.
ABSENT = "–"
BuiltPath = Annotated[
    Path, typer.Argument(metavar="DIR", help="What kdgen build wrote: OUT/SPEC/TARGET, or OUT/SPEC for all targets.", show_default=False)
]


@dataclass(frozen=True)
class Built:
    """One built target.

    Attributes:
        directory: where it lies.
        manifest: the content of its manifest.json.
    """

    directory: Path
    manifest: dict[str, Any]

    @property
    def target(self) -> str:
        """The target's name."""
        return str(self.manifest["target"]["name"])

    @property
    def kernels(self) -> dict[str, Any]:
        """Kernel name to its entry in the manifest."""
        return dict(self.manifest["kernels"])


def find_built(path: Path) -> tuple[Built, ...]:
    """The built targets at `path`: a target's directory, its manifest.json, or the directory above with all targets.

    Raises:
        ArtifactError: there is none, or one is damaged.
    """
    from kdgen.errors import ArtifactError
    from kdgen.runtime.manifest import read_manifest

    if path.name == "manifest.json":
        path = path.parent
    directories = [path] if (path / "manifest.json").exists() else sorted(item.parent for item in path.glob("*/manifest.json"))
    if not directories:
        reason = "holds no manifest.json" if path.is_dir() else "no such directory"
        raise ArtifactError(f"{path}: {reason}; give what kdgen build wrote, such as generated/SPEC/TARGET")
    return tuple(Built(directory, dict(read_manifest(directory).data)) for directory in directories)


def worst_resources(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The resources of a kernel as a whole: of its entry points the most of each, and the lowest occupancy.

    None where a target has no such thing (registers of the host), or nothing is known yet.
    """

    def known(key: str) -> list[Any]:
        return [entry[key] for entry in entries.values() if entry[key] is not None]

    most = {key: max(known(key), default=None) for key in ("registers", "shared_bytes", "stack_bytes", "spill_bytes")}
    return {**most, "occupancy": min(known("occupancy"), default=None)}


def resource_cells(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The resources of a kernel as table cells under the headings `NUMBERS`."""
    worst = worst_resources(entries)
    occupancy = worst.pop("occupancy")
    counts = [ABSENT if count is None else f"{count:,}" for count in worst.values()]
    return [*counts, ABSENT if occupancy is None else f"{occupancy:.0%}"]
