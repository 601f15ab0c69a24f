"""A stored sweep as a whole: rows, and the document that says what they are about. Reports, choices and replays need no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdgen.errors import ArtifactError, UsageError
from kdgen.sweep.load import SweepSpec
from kdgen.sweep.model import Objective
from kdgen.sweep.space import Axis, Rule, Space
from kdgen.sweep.stages import Row
from kdgen.sweep.store import Place, Store
from kdgen.sweep.workloads import Shape


@dataclass(frozen=True)
class Recorded:
    """A stored sweep.

    Attributes:
        directory: of the store.
        place: key of its rows.
        name, target: of the sweep.
        base_path: the base spec, absolute.
        kernel: name of its kernel.
        params: its parameters as JSON data.
        pinned: its parameters that decide bits, as the contract names them.
        incumbent: the base spec's own configuration.
        space, shapes, objective: as in the sweep's file.
        floors: shape to microseconds that its bytes take at the read rate of the device.
        ceilings: measured `read` in bytes/s and `mma` in operations/s; empty without a GPU.
        rows: all of them.
    """

    directory: Path
    place: Place
    name: str
    target: str
    base_path: str
    kernel: str
    params: Mapping[str, Any]
    pinned: tuple[str, ...]
    incumbent: str
    space: Space
    shapes: tuple[Shape, ...]
    objective: Objective
    floors: Mapping[str, float]
    ceilings: Mapping[str, float]
    rows: tuple[Row, ...]

    @property
    def measured(self) -> bool:
        """Some configuration was timed."""
        return any(row.measured is not None for row in self.rows)

    @property
    def by_weight(self) -> tuple[Shape, ...]:
        """The shapes, the weightiest first."""
        return tuple(sorted(self.shapes, key=lambda shape: -shape.weight))

    def order(self, name: str) -> tuple[bool, str]:
        """How ties are broken: the base spec's own configuration, then by id."""
        return name != self.incumbent, name


def document_of(spec: SweepSpec, shapes: Sequence[Shape], floors: Mapping[str, float], ceilings: Mapping[str, float]) -> dict[str, Any]:
    """What the store keeps of a sweep's file."""
    return {
        "base_path": str(Path(spec.base_path).resolve()),
        "kernel": spec.kernel.name,
        "params": spec.kernel.params.model_dump(mode="json"),
        "pinned": sorted(spec.kernel.family.contract(spec.kernel.params, spec.target).pinned),
        "incumbent": spec.incumbent_id,
        "axes": [asdict(axis) for axis in spec.space.axes],
        "rules": [asdict(rule) for rule in spec.space.rules],
        "fixed": dict(spec.space.fixed or {}),
        "shapes": [asdict(shape) for shape in shapes],
        "objective": spec.objective.model_dump(mode="json"),
        "floors": dict(floors),
        "ceilings": dict(ceilings),
    }


def read_recorded(store: Store, *, name: str = "", device: str = "", target: str = "") -> Recorded:
    """The stored sweep that these select; the only one when they are empty.

    Of sweeps that differ only in what was built (the spec, its templates, the compiler) it is the one that was run last.

    Raises:
        ArtifactError: the store is empty.
        UsageError: none, or several, are selected.
    """
    every = store.sweeps()
    if not every:
        raise ArtifactError(f"{store.directory}: nothing is stored there yet")
    fits = [
        item for item in every
        if (not name or item[1] == name) and (not target or item[2] == target) and (not device or item[0].device == device)
    ]  # fmt: skip
    # Spec hash and toolchain change with every edit of a template; names and devices are what people tell sweeps apart by.
    kinds = {(item[1], item[2], item[0].device) for item in fits}
    if len(kinds) != 1:
        listed = "; ".join(f"{item[1]} on {item[0].device} ({item[2]}, spec {item[0].spec[:8]})" for item in every)
        what = "no stored sweep is" if not fits else f"{len(kinds)} stored sweeps are"
        raise UsageError(f"{store.directory}: {what} what --name, --arch and --on select; stored are: {listed}")
    return _recorded(store, *fits[-1])


def read_place(store: Store, place: Place) -> Recorded:
    """The stored sweep at a place; ArtifactError when there is none."""
    for item in store.sweeps():
        if item[0] == place:
            return _recorded(store, *item)
    raise ArtifactError(f"{store.directory}: has no sweep of spec {place.spec[:12]} on {place.device}")


def _recorded(store: Store, place: Place, found: str, arch: str, data: Mapping[str, Any]) -> Recorded:
    return Recorded(
        directory=store.directory,
        place=place,
        name=found,
        target=arch,
        base_path=data["base_path"],
        kernel=data["kernel"],
        params=data["params"],
        pinned=tuple(data["pinned"]),
        incumbent=data["incumbent"],
        space=Space(
            tuple(Axis(**{**axis, "values": tuple(axis["values"])}) for axis in data["axes"]),
            tuple(Rule(**rule) for rule in data["rules"]),
            data["fixed"],
        ),
        shapes=tuple(Shape(**shape) for shape in data["shapes"]),
        objective=Objective.model_validate(data["objective"]),
        floors=data["floors"],
        ceilings=data["ceilings"],
        rows=tuple(store.rows(place)),
    )
