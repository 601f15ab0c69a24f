"""What a build tells: while it runs (`Progress`), and at its end (`BuildReport`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

#: `to build` occurs in dry runs only.
Status = Literal["reused", "built", "to build"]


class Progress(Protocol):
    """Where a build reports how far it is. A build that compiles nothing calls nothing."""

    def start(self, total: int) -> None:
        """`total` units of work follow."""

    def advance(self, label: str) -> None:
        """One unit, described by `label`, is done, well or not."""

    def finish(self) -> None:
        """No more units follow; called after failures, too."""


@dataclass(frozen=True)
class KernelReport:
    """What happened to one kernel.

    Attributes:
        name: its name in the spec.
        status: `reused` (found in the cache, or compiled by another build meanwhile), `built`, or `to build` (dry run).
        key: its object's name in the cache.
        hash: content hash of its source.
        resources: entry to `registers`, `shared_bytes`, `stack_bytes`, `spill_bytes`, `occupancy`, as in the manifest; empty in a dry run
            for what is to be built.
        bytes: size of its binary; 0 where there is none yet.
        seconds: compile time; 0.0 when reused.
        warnings: of the compiler; empty when there are none.
        note: why a cached object was thrown away; empty when none was.
    """

    name: str
    status: Status
    key: str
    hash: str
    resources: Mapping[str, Mapping[str, Any]]
    bytes: int
    seconds: float
    warnings: str = ""
    note: str = ""


@dataclass(frozen=True)
class TargetReport:
    """What happened to one target.

    Attributes:
        target: its name.
        directory: where its files are, or would be.
        changed: the directory was written; False when it held exactly these files already, and in a dry run.
        kernels: in the order of the spec.
    """

    target: str
    directory: Path
    changed: bool
    kernels: tuple[KernelReport, ...]


@dataclass(frozen=True)
class BuildReport:
    """What a build did.

    Attributes:
        spec: name of the spec.
        targets: in the order asked for.
        seconds: wall time of the whole build.
        dry_run: nothing was compiled or written.
    """

    spec: str
    targets: tuple[TargetReport, ...]
    seconds: float
    dry_run: bool = False

    @property
    def built(self) -> int:
        """How many kernels were compiled."""
        return sum(kernel.status == "built" for target in self.targets for kernel in target.kernels)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        data = asdict(self)
        for target in data["targets"]:
            target["directory"] = str(target["directory"])
        return data
