"""Looking at what a kernel wrote: NaN and infinity, by layer and stage."""

from __future__ import annotations

import numpy as np

from kdgen.engine.forward import Stage
from kdgen.errors import KdgenError


class NotFiniteError(KdgenError):
    """A stage of a forward wrote NaN or infinity."""


def trap(stage: Stage) -> None:
    """An observer of `kdgen.engine.Engine`: raises when a stage's floats are not finite.

    The cache and the queries' unused columns are not looked at: a cache has rows that nobody has written.

    Raises:
        NotFiniteError: with layer, stage, array, and the first row concerned.
    """
    for name, array in stage.results.items():
        if array.dtype not in ("bf16", "f32") or name == "cache" or (stage.name, name) in _PARTIAL:
            continue
        finite = np.isfinite(array.numpy().astype(np.float32)).reshape(len(array), -1)
        if not finite.all():
            row = int(np.flatnonzero(~finite.all(axis=1))[0])
            where = "" if stage.layer is None else f"layer {stage.layer}, "
            raise NotFiniteError(
                f"{where}stage {stage.name}: '{name}' has {int((~finite).sum())} values that are NaN or infinite, first in row {row}"
            )


#: Arrays that a stage fills only in part: the columns of other stages, the entries of no expert.
_PARTIAL = {("absorb", "out"), ("moe_gate_up", "out"), ("moe_down", "out")}
