"""`argmax`: the largest value of each row and where it stands; what greedy decoding takes as the next token.

Definition. `logits` holds the columns of ids first … first + vocab − 1: all of a vocabulary, or one rank's slice of it. For each row:

    value   the largest logit, as f32; −∞ counts like any other value, −0 equals 0 and comes out as 0
    id      the lowest id that has it
    NaN     never wins; a row of nothing but NaNs gives id = first and value = NaN

so that joining the ranks' results (`argmax_merge`) gives what one launch over the whole vocabulary would have given.

Row-exactness: (value, id) pairs are ordered totally by a 64-bit key, the value's order above the inverted column, and the largest key
wins; so it does not matter how a row is cut or in which order its parts are joined.

Bytes: the logits are read once; 4 · vocab a row in f32 (80 KiB for one of eight ranks of a vocabulary of 163,840). A row is cut into
as many parts as make about `blocks` blocks of the launch, each of at least `loads` 16-byte loads per thread; when there are parts to
join, a second launch of one warp per row does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Workload
from kdgen.targets import Target


class Params(FamilyParams):
    """Shape of the logits and of the launch; none of the latter decides a bit."""

    vocab: Annotated[int, Field(ge=4, le=1 << 30, description="columns: the vocabulary, or a rank's slice of it")]
    dtype: Annotated[Literal["f32", "bf16"], Field(description="type of the logits")] = "f32"
    rows: Annotated[int, Field(ge=1, le=65535, description="most rows of a launch")] = 512
    threads: Annotated[int, Field(ge=32, le=1024, multiple_of=32, description="threads of a block")] = 256
    loads: Annotated[Literal[1, 2, 4, 8], Field(description="16-byte loads in flight per thread")] = 4
    blocks: Annotated[int, Field(ge=1, le=65535, description="blocks that few rows are cut into; two per multiprocessor fill a GPU")] = 384

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if self.vocab % self.unit:
            raise ValueError(
                f"vocab = {self.vocab} is not a multiple of {self.unit}: rows of {self.dtype} are read 16 bytes at a time; pad them with −∞"
            )
        return self

    @property
    def unit(self) -> int:
        """Logits of a 16-byte load."""
        return 16 // DTYPE_BYTES[self.dtype]

    @property
    def units(self) -> int:
        """Loads of a row."""
        return self.vocab // self.unit

    @property
    def most_parts(self) -> int:
        """Parts of a row when it is the only one."""
        return min(self.blocks, ceil_div(self.units, self.threads * self.loads))

    @property
    def most_cut(self) -> int:
        """Most rows of a launch whose rows are cut; 0 when none are."""
        return min(self.rows, self.blocks // 2) if self.most_parts > 1 else 0


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block: the keys of its warps."""
    return SharedLayout.place(target, ("keys", p.threads // 32 * 8, 16))


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; blocks along x are rows, along y parts of a row."""
    parts: int | str = f"max(1, min({p.most_parts}, {p.blocks} // max(1, T)))" if p.most_cut else 1
    launches = [Launch("argmax", ("T", parts, 1), p.threads, shared(p, target).total, programmatic=target.bulk_copy)]
    arguments = [
        Argument("logits", p.dtype, ("T", p.vocab), doc="rows"),
        Argument("first", "i32", (), "scalar", "the id of column 0"),
        Argument("values", "f32", ("T",), "out", "the largest logit; NaN when all are"),
        Argument("ids", "i32", ("T",), "out", "the lowest id that has it"),
    ]
    if p.most_cut:
        launches.append(Launch("argmax_join", ("T", 1, 1), 32, when=f"T <= {p.most_cut}", programmatic=target.bulk_copy))
        arguments.append(Argument("keys", "u64", ("T", p.most_parts), "workspace", "the key of each part of each row"))
    return Contract(family="argmax", arguments=tuple(arguments), capacities={"T": Capacity(1, p.rows)}, launches=tuple(launches))


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        "unit": p.unit,
        "units": p.units,
        "warps": p.threads // 32,
        "cut": p.most_cut > 0,
        "most_parts": p.most_parts,
        "blocks": p.blocks,
    }


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The outputs, from the definition; exact."""
    logits = inputs["logits"].astype(np.float32)
    values, ids = np.full(len(logits), np.nan, np.float32), np.zeros(len(logits), np.int32)
    for row, line in enumerate(logits):
        numbers = np.flatnonzero(~np.isnan(line))
        if len(numbers):
            largest = line[numbers].max()
            values[row] = largest + np.float32(0)
            ids[row] = numbers[line[numbers] == largest][0]
    return {"values": values, "ids": ids + inputs["first"]}


def special_rows(vocab: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Rows `[…, vocab]` that go wrong easily: ties, zeros of both signs, infinities, NaNs, and the extremes of the columns."""
    plain = rng.normal(size=(14, vocab)).astype(np.float32)
    nan, infinity = np.float32(np.nan), np.float32(np.inf)
    plain[0] = np.round(plain[0])
    plain[1] = 0.5
    plain[2] = np.where(rng.random(vocab) < 0.5, np.float32(0), np.float32(-0.0))
    plain[2, 0] = -0.0
    plain[3] = -np.abs(plain[3]) - 1
    plain[4, 0], plain[5, -1] = 99, 99
    plain[6] = -infinity
    plain[7] = nan
    plain[8] = np.where(rng.random(vocab) < 0.5, nan, -infinity)
    plain[8, 0], plain[8, -1] = nan, -infinity
    plain[9] = np.where(rng.random(vocab) < 0.3, nan, plain[9])
    plain[10] = nan
    plain[10, vocab // 2] = -3
    plain[11, rng.integers(vocab, size=2)] = infinity
    # A NaN with its sign set has the smallest bits of all in one order, and the largest in another.
    plain[12] = np.where(rng.random(vocab) < 0.3, -nan, -infinity)
    plain[12, -1] = np.finfo(np.float32).min
    plain[13] = np.float32(1e-42) * rng.integers(-9, 9, size=vocab).astype(np.float32)
    return plain


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """One row, cut as fine as can be; rows that go wrong easily; as many rows as are cut at most, and one more."""
    dtype = numpy_dtype(p.dtype)
    special = special_rows(p.vocab, rng)
    yield Case("one row", {"logits": rng.normal(size=(1, p.vocab)).astype(dtype), "first": np.array(0, np.int32)})
    for name, first in (("special rows", 0), ("special rows of a slice", (1 << 31) - p.vocab)):
        for start in range(0, len(special), p.rows):
            part = special[start : start + p.rows]
            yield Case(f"{name}, from {start}", {"logits": part.astype(dtype), "first": np.array(first, np.int32)})
    for rows in sorted({min(p.rows, p.most_cut, 64), min(p.rows, p.most_cut + 1), min(p.rows, 33)} - {0}):
        if rows * p.vocab <= 1 << 23:
            logits = rng.normal(size=(rows, p.vocab)).astype(dtype)
            yield Case(f"T = {rows}", {"logits": logits, "first": np.array(p.vocab, np.int32)})


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Random logits; those of the product before are still in the L2 cache, or mostly."""
    for rows in (t for t in (1, 8, 64, 512) if t <= p.rows and t * p.vocab <= 1 << 27):
        logits = rng.normal(size=(rows, p.vocab)).astype(numpy_dtype(p.dtype))
        yield Workload(f"T = {rows}", {"logits": logits, "first": np.array(0, np.int32)}, moved_bytes=logits.nbytes)


FAMILY = Family(
    name="argmax",
    summary="the largest value of each row and the lowest id that has it",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    workloads=workloads,
    rows="T",
)
