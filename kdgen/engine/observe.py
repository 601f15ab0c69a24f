"""Observers of an engine: how long each stage of the forwards takes, and how many experts a layer's rows go to."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kdgen.engine.forward import Stage
from kdgen.runtime.device import Device

#: Name under which everything between two forwards is summed, and the forward's first kernel with it.
BETWEEN = "round, embed"


@dataclass
class Stopwatch:
    """An observer of `kdgen.engine.Engine` that waits for every kernel and sums up the time by stage.

    Attributes:
        device: that of the engine.
        skip: forwards that are not counted: those over the prompts.
        forwards: that were counted.
        milliseconds: by name of the stage, all layers together; `BETWEEN` is what draft, tree, acceptance and the host take, from the
            second forward on.
        experts: by layer, the number of experts that the rows of each forward went to.
    """

    device: Device
    skip: int = 0
    forwards: int = 0
    milliseconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    experts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _seen: int = 0
    _last: float = 0.0

    def __call__(self, stage: Stage) -> None:
        """A stage was launched."""
        self.device.synchronize()
        took, begins = time.perf_counter() - self._last, stage.name == "embed"
        self._seen += begins
        self.forwards = max(0, self._seen - self.skip)
        if self.forwards and not (begins and self.forwards == 1):
            self.milliseconds[BETWEEN if begins else stage.name] += took * 1e3
        if self.forwards and stage.layer is not None and "active_count" in stage.results:
            self.experts[stage.layer].append(int(stage.results["active_count"].numpy()[0]))
        self._last = time.perf_counter()


def observers(of: Sequence[Callable[[Stage], None]]) -> Callable[[Stage], None] | None:
    """Several observers as one; None without any."""
    if not of:
        return None

    def observe(stage: Stage) -> None:
        for one in of:
            one(stage)

    return observe
