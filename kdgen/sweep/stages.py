"""How far a configuration came, and why not further; and the row of the store that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """Where a configuration ended. The order is that of the work: a later stage replaces an earlier one in the store."""

    CONSTRAINT = "invalid: constraint"
    PARAMETERS = "invalid: parameters"
    NO_FIT = "does not fit"
    NO_COMPILE = "does not compile"
    SPILLS = "spills"
    COMPILED = "compiled"
    PRUNED = "pruned"
    WRONG = "wrong"
    LAUNCH_FAILED = "launch failed"
    TIMED_OUT = "timed out"
    MEASURED = "measured"

    @property
    def rank(self) -> int:
        """0 for the first."""
        return list(Stage).index(self)

    @property
    def is_rejection(self) -> bool:
        """True where the configuration cannot be chosen."""
        return self not in (Stage.COMPILED, Stage.MEASURED, Stage.PRUNED)


#: The shape of the row that is about a configuration as a whole.
WHOLE = ""


@dataclass(frozen=True)
class Row:
    """One row of the store: a configuration as a whole (`shape` is ""), or a configuration on one shape.

    Attributes:
        configuration: its id.
        shape: the workload's name; "" for the configuration as a whole.
        stage: how far it came.
        reason: why not further; "" where there is nothing to say.
        values: path to value of the swept parameters.
        predicted: microseconds by the static model; None where there is no prediction.
        limiter: what limits it by the static model.
        measured, low, high: microseconds of a launch: median, 10th and 90th percentile; None where it was not measured.
        incumbent: microseconds of the base spec's own configuration, measured in turns with it.
        details: everything else: resources, terms of the model, clocks.
    """

    configuration: str
    shape: str
    stage: Stage
    reason: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    predicted: float | None = None
    limiter: str = ""
    measured: float | None = None
    low: float | None = None
    high: float | None = None
    incumbent: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {**asdict(self), "stage": str(self.stage)}
