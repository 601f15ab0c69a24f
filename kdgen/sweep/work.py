"""How much work each launch of a workload really is: bytes that blocks fetch, matrix instructions with their padding, its distribution.

`Workload` says what must be moved and multiplied at least. How it is cut (tiles, splits, row tiles) decides how often weights and keys
are fetched and how much of an `mma` is padding; that follows from the family's parameters and the workload's own plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdgen.contract import DTYPE_BYTES, Launch
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Workload
from kdgen.spec import KernelSpec

Grid = tuple[int, int, int]
MMA_OPERATIONS = 4096  # of one m16n8k16


@dataclass(frozen=True)
class Work:
    """What one launch does.

    Attributes:
        memory_bytes: from and to memory, at least.
        fetched_bytes: that blocks fetch and store, through L2; not less than what comes from memory.
        mma: matrix instructions (m16n8k16 of a warp), padding included.
        balance: work of the busiest block by the mean block's, 1 or more.
        steps: dependent steps of the longest chain, for work that is one after another; 0 where that does not matter.
        left_bytes: partial results for the launches that follow.
    """

    memory_bytes: float
    fetched_bytes: float
    mma: float
    balance: float = 1.0
    steps: float = 0.0
    left_bytes: float = 0.0


def works_of(kernel: KernelSpec, launches: tuple[tuple[Launch, Grid], ...], workload: Workload) -> tuple[Work, ...]:
    """The work of every launch that a workload runs, in order.

    Args:
        kernel: the configuration.
        launches: those that run at the workload's dimensions, with their grids.
        workload: what is done.
    """
    if not launches:
        return ()
    main = _FAMILIES.get(kernel.family.name, plain_work)(kernel.params, launches[0], workload)
    # What further launches read is what the first one leaves for them: it is in L2.
    return (main, *(Work(0.0, main.left_bytes, 0.0) for _ in launches[1:]))


def plain_work(params: Any, launch: tuple[Launch, Grid], workload: Workload) -> Work:
    """What the workload itself says; blocks have equal shares."""
    return Work(workload.moved_bytes, workload.moved_bytes, workload.flops / MMA_OPERATIONS)


def _gemm(p: Any, launch: tuple[Launch, Grid], workload: Workload) -> Work:
    """Weights once per row tile, x once per tile of weights, sums of slices as f32."""
    rows = len(workload.inputs["x"])
    tile = min(64, max(8, 1 << (rows - 1).bit_length()))
    passes = ceil_div(rows, tile)
    weights = workload.inputs["w"].nbytes
    few = bool(p.few_rows) and rows <= p.few_rows
    columns = p.few_tile if few else p.tile.n
    x = ceil_div(p.weight_rows, columns) * passes * tile * p.k * DTYPE_BYTES[p.x] * p.products
    sums = p.slices * rows * p.products * p.weight_rows * 4 if p.slices > 1 and not few else 0
    mma = passes * tile / 8 * ceil_div(p.weight_rows, 16) * p.products * ceil_div(p.k, 16)
    # The last tile of columns may be short.
    tiles = ceil_div(p.weight_rows, columns)
    return Work(workload.moved_bytes, weights * passes + x + sums, mma, tiles * columns / p.weight_rows, left_bytes=sums)


def _moe(p: Any, launch: tuple[Launch, Grid], workload: Workload) -> Work:
    """Each active expert's weights once per row tile; rows of x for every slab unless they are kept."""
    turns = workload.turns or (workload.inputs,)
    rows = int(workload.inputs["x"].shape[0])
    item = next(item for item in p.launches if rows <= item.rows)
    tiles = [int(np.sum(-(-np.diff(turn["expert_offsets"]) // item.row_tile))) for turn in turns]
    mean = sum(tiles) / len(tiles)
    expert = float(workload.inputs["w"][0].nbytes)
    x = mean * item.row_tile * p.k * DTYPE_BYTES[p.x_dtype] * (1 if item.resident else p.slabs)
    team = p.slices * p.parts if item.wide else p.slices
    teams = max(1, launch[1][0] * (launch[0].block // 32) // team)
    units = mean * p.slabs
    balance = ceil_div(int(units), teams) * teams / max(units, 1.0) if units > teams else 1.0
    return Work(workload.moved_bytes, mean * expert + x, mean * item.row_tile / 8 * p.weight_rows / 16 * p.k / 16, balance)


def _attention(p: Any, launch: tuple[Launch, Grid], workload: Workload) -> Work:
    """The plan's units: their tiles are fetched, for as many columns as the width of their block."""
    units = workload.inputs["units"][: int(workload.inputs["unit_counts"][0])]
    rows = len(workload.inputs["q"])
    width = next(width for width in p.widths if rows <= width.rows)
    busy = units[units[:, 2] > 0]
    tiles = busy[:, 2].astype(np.float64)
    is_tail = busy[:, 3] < 0
    step = np.clip(busy[:, 3] >> 16, 0, len(width.columns) - 1)
    columns = np.where(is_tail, p.tail_columns, np.array(width.columns)[step])
    # Scores over the whole key, values over the latent.
    mma = tiles * (p.key_tile / 16) * ceil_div(p.width + p.latent, 16) * columns
    blocks = launch[1][0]
    share = np.bincount(np.arange(len(busy)) % blocks, tiles, blocks)
    balance = float(share.max() / share.mean()) if len(busy) else 1.0
    fetched = float(tiles.sum()) * p.key_tile * p.row_bytes
    partials = float(columns.sum()) * p.latent * 8 * 4
    return Work(workload.moved_bytes, fetched + partials, float(mma.sum()), balance, left_bytes=partials)


def _tree_build(p: Any, launch: tuple[Launch, Grid], workload: Workload) -> Work:
    """One node after another, for each sequence by one warp."""
    return Work(0.0, 0.0, 0.0, 1.0, float(np.max(workload.inputs["budgets"])))


_FAMILIES: dict[str, Callable[[Any, tuple[Launch, Grid], Workload], Work]] = {
    "gemm": _gemm, "moe_gemm": _moe, "tree_attention": _attention, "tree_build": _tree_build,
}  # fmt: skip
