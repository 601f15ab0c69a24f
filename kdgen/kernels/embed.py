"""`embed`: rows of a table by token id; zeros for ids that the table does not hold.

Definition. `table` holds the rows of ids first … first + V − 1: all of a vocabulary, or one rank's slice of it. Row t of the output is
the table's row for ids[t], or zeros when ids[t] is negative or outside the slice; the sum over the ranks' outputs is then the whole
vocabulary's. Values are copied, or widened from bf16 to f32, which is exact: a NaN's payload may change, nothing else.

Bytes: the row is read once and the output written once, nothing else but 4 bytes of id; at hidden = 7168 and bf16 that is 28,672 bytes
a row, half as much for an id of another rank. A row is cut among blocks so that a single one is read by several multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div, round_up
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, Workload
from kdgen.targets import Target

THREADS = 128
LOADS = 2  #: units of a thread, all in flight at once


class Params(FamilyParams):
    """Shape of the rows. How many rows the table has is a matter of the call."""

    hidden: Annotated[int, Field(ge=4, le=1 << 20, description="values of a row")]
    dtype: Annotated[Literal["bf16", "f32"], Field(description="type of the table")] = "bf16"
    out: Annotated[Literal["bf16", "f32"], Field(description="type of the output: the table's, or f32")] = "bf16"
    rows: Annotated[int, Field(ge=1, le=1 << 20, description="most ids of a launch")] = 512

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if (self.dtype, self.out) == ("f32", "bf16"):
            raise ValueError("an f32 table gives out: f32; values are never rounded here")
        if self.hidden % self.unit:
            raise ValueError(
                f"hidden = {self.hidden} is not a multiple of {self.unit}: rows are written 16 bytes at a time (out {self.out})"
            )
        return self

    @property
    def unit(self) -> int:
        """Values that a thread takes at once: 16 bytes of the output."""
        return 16 // DTYPE_BYTES[self.out]

    @property
    def units(self) -> int:
        """Units of a row."""
        return self.hidden // self.unit


def threads(p: Params) -> int:
    """Threads of a block: no more than there are units, in whole warps."""
    return min(THREADS, round_up(p.units, 32))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; blocks along x are rows, along y pieces of a row."""
    return Contract(
        family="embed",
        arguments=(
            Argument("ids", "i32", ("T",), doc="token ids; any value is allowed"),
            Argument("table", p.dtype, ("V", p.hidden), doc="the vocabulary, or a slice of it"),
            Argument("table_rows", "i32", ("V",), "dimension", "rows of the table"),
            Argument("first", "i32", (), "scalar", "the id of the table's first row"),
            Argument("out", p.out, ("T", p.hidden), "out", "the ids' rows; zeros for an id that the table does not hold"),
        ),
        capacities={"T": Capacity(1, p.rows), "V": Capacity(1, (1 << 31) - 1)},
        launches=(Launch("embed", ("T", ceil_div(p.units, threads(p) * LOADS), 1), threads(p), programmatic=target.bulk_copy),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"unit": p.unit, "units": p.units, "threads": threads(p), "loads": LOADS, "widens": p.dtype != p.out}


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The rows, from the definition; exact."""
    table = inputs["table"]
    out = np.zeros((len(inputs["ids"]), p.hidden), numpy_dtype(p.out))
    for row, token in enumerate(inputs["ids"].tolist()):
        at = token - int(inputs["first"])
        if token >= 0 and 0 <= at < len(table):
            out[row] = table[at].astype(out.dtype)
    return {"out": out}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """A whole table and a slice, every id of it and its neighbours, and ids that are none."""
    rows = 23
    table = rng.normal(size=(rows, p.hidden)).astype(numpy_dtype(p.dtype))
    top = (1 << 31) - 1
    for name, first, ids in (
        ("every id", 0, rng.permutation(rows)),
        ("one id again and again", 0, [7] * 9),
        ("a slice and its neighbours", 1000, rng.permutation(np.arange(990, 1000 + rows + 10))),
        ("ids that are none", 0, [-1, rows, -2, top, -top - 1, 0, rows - 1, -rows]),
        # The difference of the two wraps around 32 bits to a row that exists.
        ("the last slice of all", top - rows + 1, [top, top - rows, top - rows + 1, -top - 1, -top, -1, -rows, 0]),
        ("a single id", 3, [5]),
    ):
        yield Case(name, {"ids": np.asarray(ids, np.int32)[: p.rows], "table": table, "first": np.array(first, np.int32)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Distinct ids. A few rows stay in the L2 cache however many tables take turns, so only latency is measured there."""
    for count in (t for t in (1, 8, 64, 512) if t <= p.rows):
        table = np.zeros((max(count, 256), p.hidden), numpy_dtype(p.dtype))
        ids = rng.permutation(len(table))[:count].astype(np.int32)
        moved = count * p.hidden * (DTYPE_BYTES[p.dtype] + DTYPE_BYTES[p.out]) + ids.nbytes if count >= 64 else 0
        yield Workload(f"T = {count}", {"ids": ids, "table": table, "first": np.array(0, np.int32)}, moved_bytes=moved, cold=True)


FAMILY = Family(
    name="embed",
    summary="rows of a table by token id; zeros for ids outside its slice",
    params=Params,
    contract=contract,
    context=context,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="T",
)
