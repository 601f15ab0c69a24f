"""`attention_plan`: rows, trees and lengths to the list of units that `tree_attention` works off.

One launch serves all layers of a round: which keys a row sees, and how its work is cut, is the same in every layer.

Terms:
    position p     of a row: start of its sequence + its depth. It sees the keys at positions 0 … p of its own path.
    column         8 heads of one row: what fills one 8-wide `mma` operand. Row r has the columns r · octets + 0, 1, ….
    tile           `key_tile` keys, aligned to absolute positions.
    tail           the last `tail_tiles` tiles up to and with p's own. It holds every key that may belong to the tree, so its keys are
                   gathered along the row's path, for this row alone.
    body           the tiles before the tail: committed keys only, shared by every row of the sequence.
    part           `keys` consecutive body keys from a multiple of `keys` on. The size is a function of p alone, by the table `splits`.
    unit           what a block works off at a time: one part for up to 8 columns, or one row's tail.

Everything that decides bits (tile, tail, parts) follows from p alone; which columns share a unit follows from the launch and decides
no bit.

A row whose path is contiguous (a prompt chunk, a chain) is marked by the first byte of its path, 255: its ancestor at depth d is node
d, so each key up to p lies at its own place of the cache, nothing has to be gathered, and its depth may be anything.

Order of units: bodies first, then tails (the shorter work fills the gaps at the end). Bodies go by sequence and size of part; of these
by part first, so that blocks that run at the same time read the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target

#: 32-bit words of a unit's record:
#:   0 sequence    1 first tile    2 tiles (0: nothing to do)    3 slot of the result | index into `splits` << 16, or −1 − slot for a tail
#:   body: 4 … 11 columns (−1: none)    12 … 15 tiles that each column takes part in, 16 bits each
#:   tail: 4 first column    5 keys below this position lie at their own place    6 p    7 zero    8 … 15 path, a byte per depth
RECORD = 16
CONTIGUOUS = 255
MOST_COLUMNS = 8


class Split(FamilyParams):
    """One step of the table that sizes the parts."""

    below: Annotated[int, Field(ge=0, description="for rows at positions below this; 0: for all further ones")] = 0
    keys: Annotated[int, Field(ge=16, le=8192, description="keys of a part")]


class Width(FamilyParams):
    """How many columns share a block, for launches of a size."""

    rows: Annotated[int, Field(ge=1, le=65536, description="for launches of up to this many rows")]
    columns: Annotated[
        tuple[int, ...], Field(min_length=1, max_length=8, description="columns of a block (1, 2, 4, 8), one for each of splits")
    ]


class Params(FamilyParams):
    """How attention is cut into units."""

    heads: Annotated[int, Field(ge=8, le=1024, multiple_of=8, description="query heads of this rank")]
    rows: Annotated[int, Field(ge=1, le=1024, description="most rows of a launch")]
    sequences: Annotated[int, Field(ge=1, le=4096, description="most sequences in a launch")]
    page_size: Annotated[int, Field(ge=16, le=65536, description="rows of a page; a multiple of key_tile")]
    max_pages: Annotated[int, Field(ge=1, le=1 << 20, description="columns of the page table")]
    depth: Annotated[int, Field(ge=1, le=31, description="deepest node of a tree; contiguous rows may lie deeper")]
    key_tile: Annotated[Literal[16, 32, 64], Field(description="keys of a tile")] = 16
    splits: Annotated[tuple[Split, ...], Field(min_length=1, max_length=8, description="size of a part by the row's own position")] = (
        Split(below=4096, keys=64),
        Split(below=16384, keys=256),
        Split(below=65536, keys=512),
        Split(keys=1024),
    )
    widths: Annotated[tuple[Width, ...], Field(min_length=1, max_length=8, description="columns of a block by the rows of a launch")] = (
        Width(rows=1, columns=(1, 1, 1, 1)),
        Width(rows=8, columns=(2, 2, 4, 8)),
        Width(rows=16, columns=(4, 4, 8, 8)),
        Width(rows=32, columns=(4, 8, 8, 8)),
        Width(rows=65536, columns=(8, 8, 8, 8)),
    )

    @model_validator(mode="after")
    def _tables_fit(self) -> Self:
        if self.page_size % self.key_tile:
            raise ValueError(f"page_size = {self.page_size} is not a multiple of key_tile = {self.key_tile}")
        bounds = [split.below for split in self.splits]
        if bounds[-1] != 0 or any(low <= high for low, high in zip(bounds[1:-1], bounds, strict=False)) or 0 in bounds[:-1]:
            raise ValueError(f"the steps of splits must ascend and the last must have no bound; got below = {bounds}")
        for split in self.splits:
            if split.keys % self.key_tile:
                raise ValueError(f"splits: keys = {split.keys} is not a multiple of key_tile = {self.key_tile}")
        sizes = [width.rows for width in self.widths]
        if sizes != sorted(set(sizes)) or sizes[-1] < self.rows:
            raise ValueError(f"the steps of widths must ascend and reach rows = {self.rows}; got rows = {sizes}")
        for width in self.widths:
            if len(width.columns) != len(self.splits) or not set(width.columns) <= {1, 2, 4, 8}:
                raise ValueError(
                    f"widths: columns = {list(width.columns)} must name 1, 2, 4 or 8 for each of the {len(self.splits)} splits"
                )
        if self.most_parts >= 1 << 15:
            raise ValueError(f"{self.most_parts} parts of a row; at most {(1 << 15) - 1} are possible, so give splits larger parts")
        return self

    @property
    def octets(self) -> int:
        """Columns of a row."""
        return self.heads // 8

    @property
    def tail_tiles(self) -> int:
        """Tiles of the tail: enough for every node of a tree, wherever its start lies in a tile."""
        return ceil_div(self.depth, self.key_tile) + 1

    @property
    def positions(self) -> int:
        """Positions that the page table can hold."""
        return self.max_pages * self.page_size

    @property
    def most_parts(self) -> int:
        """Most body parts that a row can have."""
        return max(self.parts(p) for step in self.splits for p in {min(step.below or self.positions, self.positions) - 1})

    @property
    def slots(self) -> int:
        """Partial results of a column: its parts, and its tail in the last slot."""
        return self.most_parts + 1

    @property
    def tail_columns(self) -> int:
        """Columns of a tail unit: those of one row that can share it."""
        return gcd(self.octets, 4)

    @property
    def units_per_row(self) -> int:
        """Records that suffice per row, when no two rows share a unit."""
        sharing = min(gcd(self.octets, columns) for width in self.widths for columns in width.columns)
        return self.most_parts * (self.octets // sharing) + self.octets // self.tail_columns

    def step_of(self, position: int) -> int:
        """Index into `splits` for a row at `position`."""
        return next(i for i, split in enumerate(self.splits) if position < split.below or not split.below)

    def body_tiles(self, position: int) -> int:
        """Tiles before the tail of a row at `position`."""
        return max(0, position // self.key_tile + 1 - self.tail_tiles)

    def parts(self, position: int) -> int:
        """Parts of the body of a row at `position`."""
        return ceil_div(self.body_tiles(position) * self.key_tile, self.splits[self.step_of(position)].keys)

    def columns(self, rows: int) -> tuple[int, ...]:
        """Columns of a block for each of `splits`, in a launch of `rows` rows."""
        return next(width.columns for width in self.widths if rows <= width.rows)


def path_bytes(depth: int) -> int:
    """Bytes of a row of `row_paths`: one per depth, the root's included, in whole 16-byte units (as `tree_build` writes them)."""
    return round_up(depth + 1, 16)


def plan_arguments(p: Params) -> tuple[Argument, Argument, Argument]:
    """The plan as arguments of a kernel that reads it."""
    return (
        Argument("units", "i32", (f"T * {p.units_per_row}", RECORD), doc="one record per unit"),
        Argument(
            "unit_counts", "i32", (4,), doc="units; of these, parts of bodies, which come first; tails that take as long as a part; 0"
        ),
        Argument("row_parts", "i32", ("T",), doc="body parts of each row; −1 for a padding row"),
    )


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; one block."""
    units, count, parts = plan_arguments(p)
    return Contract(
        family="attention_plan",
        arguments=(
            Argument("starts", "i32", ("S",), doc="position of node 0 of each sequence: keys below it are committed"),
            Argument("sequences", "i32", ("S",), "dimension", "sequences"),
            Argument("row_sequences", "i32", ("T",), doc="sequence of each row; −1 for padding"),
            Argument("row_depths", "i32", ("T",), doc="depth of each row in its tree"),
            Argument("row_paths", "u8", ("T", path_bytes(p.depth)), doc="node at each depth, the row's own last; 255 first: contiguous"),
            Argument("row_count", "i32", ("T",), "dimension", "rows"),
            Argument(units.name, units.dtype, units.shape, "inout", "one record per unit; those past the count keep what they held"),
            Argument(count.name, count.dtype, count.shape, "out", count.doc),
            Argument(parts.name, parts.dtype, parts.shape, "out", parts.doc),
        ),
        capacities={"S": Capacity(1, p.sequences), "T": Capacity(1, p.rows)},
        launches=(Launch("attention_plan", (1, 1, 1), threads(p), shared(p, target).total),),
        pinned=pinned(p),
    )


def pinned(p: Params) -> dict[str, Any]:
    """What decides the bits of a row's result."""
    return {"key_tile": p.key_tile, "tail_tiles": p.tail_tiles, "splits": [[split.below, split.keys] for split in p.splits]}


def threads(p: Params) -> int:
    """Threads of the block: one per row, in whole warps."""
    return min(256, round_up(p.rows, 32))


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of the block: facts of every row, and of the groups that rows lead."""
    words = p.rows * 4
    return SharedLayout.place(
        target,
        ("keys", words, 16),
        ("bodies", words, 16),
        ("key_body", words, 16),
        ("key_groups", words, 16),
        ("group_body", words, 16),
        ("group_number", words, 16),
        ("first_rows", words, 16),
        ("key_units", words, 16),
        ("unit_base", words, 16),
        ("members", p.rows * MOST_COLUMNS * 2, 16),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        "threads": threads(p),
        "octets": p.octets,
        "tail_tiles": p.tail_tiles,
        "tail_columns": p.tail_columns,
        "slots": p.slots,
        "path_words": path_bytes(p.depth) // 4,
    }


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The plan by its definition; exact."""
    sequences, depths, paths = inputs["row_sequences"], inputs["row_depths"], inputs["row_paths"]
    count = len(sequences)
    units = inputs["units"].copy()
    columns = p.columns(count)
    real = [row for row in range(count) if 0 <= sequences[row] < len(inputs["starts"])]
    position = {row: int(inputs["starts"][sequences[row]]) + int(depths[row]) for row in real}
    parts = np.full(count, -1, np.int32)
    alike: dict[tuple[int, int], list[int]] = {}
    for row in real:
        parts[row] = p.parts(position[row])
        alike.setdefault((int(sequences[row]), p.step_of(position[row])), []).append(row)

    records: list[npt.NDArray[np.int32]] = []
    for (sequence, step), rows in alike.items():
        octets = gcd(p.octets, columns[step])
        together = columns[step] // octets
        groups = [rows[i : i + together] for i in range(0, len(rows), together)]
        tiles = p.splits[step].keys // p.key_tile
        for part in range(max(p.parts(position[row]) for row in rows)):
            first = part * tiles
            for group in groups:
                active = [min(max(p.body_tiles(position[row]) - first, 0), tiles) for row in group]
                for octet in range(0, p.octets, octets):
                    record = np.zeros(RECORD, np.int32)
                    record[:4] = sequence, first, max(active), part | step << 16
                    record[4:12] = -1
                    record[4 : 4 + len(group) * octets] = [row * p.octets + octet + i for row in group for i in range(octets)]
                    record[12:].view(np.uint16)[: len(group) * octets] = np.repeat(active, octets)
                    records.append(record)
    bodies = len(records)
    tails_per_part = [p.splits[p.step_of(position[row])].keys // p.key_tile // p.tail_tiles for row in real]
    for row in real:
        first = p.body_tiles(position[row])
        for column in range(row * p.octets, (row + 1) * p.octets, p.tail_columns):
            record = np.zeros(RECORD, np.int32)
            contiguous = paths[row, 0] == CONTIGUOUS
            plain = position[row] + 1 if contiguous else int(inputs["starts"][sequences[row]])
            record[:7] = sequences[row], first, position[row] // p.key_tile + 1 - first, -p.slots, column, plain, position[row]
            record[8 : 8 + paths.shape[1] // 4] = paths[row].view(np.int32)
            records.append(record)
    counts = [len(records), bodies, min(tails_per_part, default=0), 0]
    units[: len(records)] = np.reshape(records, (-1, RECORD))
    return {"units": units, "unit_counts": np.array(counts, np.int32), "row_parts": parts}


def tails(p: Params, planned: Arrays) -> Iterator[npt.NDArray[np.int32]]:
    """The records of a plan that stand for a row's tail, one for each of its `tail_columns`."""
    for record in planned["units"][: int(planned["unit_counts"][0])]:
        if record[3] < 0:
            yield record


def random_rows(p: Params, rng: np.random.Generator, shapes: list[tuple[int, int, bool]], padding: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Rows of several sequences in any order.

    Args:
        p: the parameters.
        rng: the generator.
        shapes: (start, rows, contiguous) of each sequence; a sequence that is not contiguous is a random tree.
        padding: rows of no sequence, strewn among the others.

    Returns:
        The inputs of `attention_plan`.
    """
    rows: list[tuple[int, int, npt.NDArray[np.uint8]]] = [(-1, 0, np.zeros(path_bytes(p.depth), np.uint8))] * padding
    for sequence, (_, count, contiguous) in enumerate(shapes):
        paths: list[list[int]] = []
        for node in range(count):
            path = np.full(path_bytes(p.depth), CONTIGUOUS, np.uint8)
            if not contiguous:
                parents = [other for other in paths if len(other) <= p.depth]
                paths.append([*(parents[rng.integers(len(parents))] if paths else []), node])
                path[: len(paths[-1])] = paths[-1]
            rows.append((sequence, node if contiguous else len(paths[-1]) - 1, path))
    order = rng.permutation(len(rows))
    return {
        "starts": np.array([start for start, _, _ in shapes], np.int32),
        "row_sequences": np.array([rows[i][0] for i in order], np.int32),
        "row_depths": np.array([rows[i][1] for i in order], np.int32),
        "row_paths": np.stack([rows[i][2] for i in order]),
    }


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """One row, trees and chunks, several sequences, rows on both sides of every step, padding alone."""

    def case(name: str, shapes: list[tuple[int, int, bool]], padding: int = 0) -> Case:
        rows = random_rows(p, rng, shapes, padding)
        units = rng.integers(-(1 << 31), 1 << 31, size=(len(rows["row_depths"]) * p.units_per_row, RECORD), dtype=np.int64)
        return Case(name, {**rows, "units": units.astype(np.int32)})

    most = min(p.rows, 256)
    last = p.positions - most
    steps = [min(split.below, last) for split in p.splits if split.below]
    for start in sorted({0, 1, p.key_tile - 1, p.key_tile, 5 * p.key_tile + 3, last, *steps}):
        if 0 <= start <= last:
            yield case(f"one row at {start}", [(start, 1, False)])
    for count in sorted({min(most, n) for n in (2, 7, 8, 9, 33, most)}):
        yield case(f"a tree of {count}", [(int(rng.integers(last)), count, False)])
    for start in steps:
        yield case(f"a tree across {start}", [(max(0, start - p.depth // 2 - 1), min(most, 24), False)])
        yield case(f"a chunk across {start}", [(max(0, start - 9), min(most, 40), True)])
    count = min(p.sequences, 5, p.rows)
    each = max(1, most // count - 1)
    yield case(
        "several sequences",
        [(int(rng.integers(last)), int(rng.integers(1, each + 1)), bool(i % 2)) for i in range(count)],
        most - each * count,
    )
    yield case("padding alone", [(3, 0, False)], min(most, 3))


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """One tree at 8k, by its size."""
    for count in (n for n in (1, 8, 16, 32, 64, 256) if n <= p.rows):
        rows = random_rows(p, rng, [(min(8192, p.positions - p.rows) - 23, count, False)])
        yield Workload(f"T = {count}", {**rows, "units": np.zeros((count * p.units_per_row, RECORD), np.int32)})


FAMILY = Family(
    name="attention_plan",
    summary="rows, trees and lengths to the units that tree_attention works off, once for all layers",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
)
