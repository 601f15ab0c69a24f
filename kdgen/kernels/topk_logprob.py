"""`topk_logprob`: the most probable tokens of each row and their log-probs; what the draft tree is built from.

Definition. `logits` holds the columns of ids first … first + vocab − 1: all of a vocabulary, or one rank's slice of it. Logits are taken
as f32; a NaN counts as −∞, so it never enters a sum, and −0 equals 0. For each row:

    ids        of the `top_k` largest logits, descending, of equal ones the lowest id first. Decided on the logits, never on
               rounded log-probs; −∞ is a logit like any other, so a row always has `top_k` different ids
    log-prob   (logit − top) − ln Σ e^(x − top), over all logits x of the row; top is the largest of them. Never above 0
               −∞ where the logit is −∞, and so throughout a row of nothing but −∞ and NaN: `tree_build` takes these for no tokens
               n logits of +∞ share all of the probability: −ln n, and −∞ for the others

With `slice` the row is one rank's part, whose log-probs nobody can know yet. The outputs are then the logits themselves, `maxima` = top and
`sums` = Σ, 0 in a row of −∞; `topk_logprob_merge` makes log-probs of those of all ranks.

Order of the sum, a function of `vocab`, `chunk`, `threads` and the logits' type alone; so a row's bits depend on nothing but the row.
e^(x − top) is 2^((x − top) · log2 e) by `exp2_approx`, 1 when x = top; all in f32, every operation rounded:

    chunk     `chunk` columns with a top of their own; the last may be shorter: what is missing adds 0
    thread    t of N takes units (16 bytes) t, t + N, t + 2N, … of its chunk, adding their logits' terms by column
    warp      lanes l and l ^ 1, then l ^ 2, l ^ 4, l ^ 8, l ^ 16
    block     the warps' sums in ascending order
    row       Σ · e^(top − row's top) of chunks: lane l adds chunks l, l + 32, … in this order, then lanes as in a warp

The logarithm is computed from multiplications, additions and a division that are each rounded in a defined way: the same bits everywhere.

Bytes: the logits are read once, into registers: 4 · vocab a row in f32 (640 KiB at a vocabulary of 163,840, 4.4 MiB for seven draft
positions). A block has a chunk: seven rows are 280 blocks. It hands on `top_k` keys of 8 bytes, and a second launch of a block per
row picks among those of the row's chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from kdgen.contract import DTYPE_BYTES, Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.expressions import ceil_div
from kdgen.kernels.argmax import special_rows
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance, Workload
from kdgen.targets import Target

Floats = npt.NDArray[np.float32]

#: Logits that a thread holds in registers.
MOST_HELD = 32

#: Chunks of a row: the second launch has two numbers of each in shared memory.
MOST_CHUNKS = 2048

#: Keys of candidates that shared memory has room for: 64 KiB.
MOST_CANDIDATES = 8192


class Params(FamilyParams):
    """Shape of the logits, and how a row is cut."""

    vocab: Annotated[int, Field(ge=4, le=1 << 24, description="columns: the vocabulary, or a rank's slice of it")]
    top_k: Annotated[int, Field(ge=1, le=64, description="tokens of a row")]
    dtype: Annotated[Literal["f32", "bf16"], Field(description="type of the logits")] = "f32"
    slice: Annotated[bool, Field(description="columns are a rank's: give logits and sums for `topk_logprob_merge`")] = False
    rows: Annotated[int, Field(ge=1, le=65535, description="most rows of a launch")] = 448
    chunk: Annotated[int, Field(ge=256, le=16384, description="columns of a block; decides the order of the sum")] = 4096
    threads: Annotated[Literal[64, 128, 256, 512, 1024], Field(description="threads of a block; decides the order of the sum")] = 256

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if self.vocab % self.unit:
            raise ValueError(
                f"vocab = {self.vocab} is not a multiple of {self.unit}: rows of {self.dtype} are read 16 bytes at a time; pad them with −∞"
            )
        if self.top_k > self.vocab:
            raise ValueError(f"top_k = {self.top_k} of vocab = {self.vocab} columns: there are not as many")
        if self.chunk % (self.threads * self.unit):
            raise ValueError(
                f"chunk = {self.chunk} is not a multiple of {self.threads * self.unit}: "
                f"{self.unit} columns for each of {self.threads} threads"
            )
        if self.chunk > self.threads * MOST_HELD:
            raise ValueError(
                f"chunk = {self.chunk} leaves {self.chunk // self.threads} logits to each of {self.threads} threads; "
                f"allowed {MOST_HELD}: give more threads"
            )
        if self.chunks > MOST_CHUNKS:
            raise ValueError(f"vocab = {self.vocab} is {self.chunks} chunks of {self.chunk}; allowed {MOST_CHUNKS}: give a larger chunk")
        # A chunk itself never needs more: half of its columns, or all of the few that 64 threads can hold.
        if self.most_candidates > MOST_CANDIDATES:
            raise ValueError(
                f"{self.chunks} chunks of {self.chunk} with top_k = {self.top_k} may need {self.most_candidates} candidates at once; "
                f"allowed {MOST_CANDIDATES}: give a larger chunk"
            )
        return self

    @property
    def unit(self) -> int:
        """Logits of a 16-byte load."""
        return 16 // DTYPE_BYTES[self.dtype]

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return ceil_div(self.vocab, self.chunk)

    @property
    def most_candidates(self) -> int:
        """Keys that can be candidates at the same time, in either launch."""
        return max(capacity(self.top_k, self.threads, self.chunk), capacity(self.top_k, self.threads, self.top_k * self.chunks))


def groups(top_k: int, threads: int) -> int:
    """Groups of threads whose maxima decide the bar: `top_k` at least, and about twice as many for a high bar."""
    return min(threads, max(32, 1 << (2 * top_k - 1).bit_length()))


def capacity(top_k: int, threads: int, keys: int) -> int:
    """Most candidates among `keys` spread over `threads`: all keys of `top_k` groups."""
    return min(keys, top_k * (threads // groups(top_k, threads)) * ceil_div(keys, threads))


def selection_shared(target: Target, top_k: int, threads: int, candidates: int, pairs: int) -> SharedLayout:
    """What the selection needs in shared memory, and the sums."""
    return SharedLayout.place(
        target,
        ("groups", groups(top_k, threads) * 8, 16),
        ("candidates", candidates * 8, 16),
        ("found", 16, 16),
        ("joined", 8, 8),
        ("pairs", pairs * 8, 16),
        ("sums", threads // 32 * 4, 16),
    )


def selection_context(top_k: int, threads: int, candidates: int) -> Mapping[str, ContextValue]:
    """Numbers of the templates that select and sum."""
    return {
        "threads": threads,
        "groups": groups(top_k, threads),
        "group_threads": threads // groups(top_k, threads),
        "capacity": candidates,
        "log2_e": math.log2(math.e),
        "ln_2": math.log(2),
    }


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block, in either launch."""
    return selection_shared(target, p.top_k, p.threads, p.most_candidates, p.chunks)


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface; blocks along x are chunks, along y rows."""
    chosen, size = ("T", p.top_k), shared(p, target).total
    ids = Argument("ids", "i32", chosen, "out", "their ids")
    outputs: tuple[Argument, ...]
    if p.slice:
        outputs = (
            Argument("values", "f32", chosen, "out", "the largest logits, descending"),
            ids,
            Argument("maxima", "f32", ("T",), "out", "the largest logit of the slice"),
            Argument("sums", "f32", ("T",), "out", "Σ e^(x − maximum) of the slice; 0 in a row of −∞"),
        )
    else:
        outputs = (Argument("log_probs", "f32", chosen, "out", "log-probs of the most probable tokens, descending"), ids)
    return Contract(
        family="topk_logprob",
        arguments=(
            Argument("logits", p.dtype, ("T", p.vocab), doc="rows"),
            Argument("first", "i32", (), "scalar", "the id of column 0"),
            *outputs,
            Argument("keys", "u64", ("T", p.top_k, p.chunks), "workspace", "the largest of each chunk"),
            Argument("chunk_sums", "f32", ("T", 2, p.chunks), "workspace", "maximum and sum of each chunk"),
        ),
        capacities={"T": Capacity(1, p.rows)},
        launches=(
            Launch("topk_logprob", (p.chunks, "T", 1), p.threads, size, programmatic=target.bulk_copy),
            Launch("topk_logprob_join", ("T", 1, 1), p.threads, size, programmatic=target.bulk_copy),
        ),
        pinned={"chunk": p.chunk, "threads": p.threads, "unit": p.unit},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        **selection_context(p.top_k, p.threads, p.most_candidates),
        "unit": p.unit,
        "units": p.vocab // p.unit,
        "chunks": p.chunks,
        "loads": p.chunk // p.unit // p.threads,
        "ahead": min(8, ceil_div(p.top_k * p.chunks, p.threads)),
        "nothing": "0xff80ff80u" if p.dtype == "bf16" else "0xff800000u",
        "logs": not p.slice,
    }


def log_sum(logits: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Largest value of each row, and the sum of e^(x − largest): 0 in a row of −∞. No NaNs."""
    top = logits.max(axis=1)
    with np.errstate(invalid="ignore"):
        terms = np.where(logits == top[:, None], np.where(np.isneginf(top), 0.0, 1.0)[:, None], np.exp(logits - top[:, None]))
    return top, terms.sum(axis=1)


def log_probs(values: Floats, top: npt.NDArray[np.float64], sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln(e^value / Σ) of each row's values, with infinities as defined."""
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.where(values == top[:, None], 0.0, values - top[:, None]) - np.log(sums)[:, None]
    return np.where(np.isneginf(values), -np.inf, result)


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The outputs, from the definition; sums in f64."""
    logits = inputs["logits"].astype(np.float32)
    logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    columns = np.argsort(-logits, axis=1, kind="stable")[:, : p.top_k]
    values = np.take_along_axis(logits, columns, axis=1) + np.float32(0)
    ids = (columns + inputs["first"]).astype(np.int32)
    top, sums = log_sum(logits.astype(np.float64))
    if p.slice:
        return {"values": values, "ids": ids, "maxima": values[:, 0], "sums": sums}
    return {"log_probs": log_probs(values, top, sums), "ids": ids}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """Ids and logits are exact."""
    if p.slice:
        return {"sums": Tolerance(2.0**-19, "ex2.approx: 2 ulp; its operand, to 2^-24 of up to 100; sums of some hundred terms in f32")}
    return {"log_probs": Tolerance(2.0**-19, "that of the sum, which the logarithm makes absolute; log-probs of some nats")}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """A row; rows that go wrong easily; rows whose largest logits are all in one place, sorted, or tied; a launch of many."""
    dtype = numpy_dtype(p.dtype)

    def case(name: str, logits: npt.NDArray[Any], first: int = 0) -> Case:
        return Case(name, {"logits": np.ascontiguousarray(logits[: p.rows]).astype(dtype), "first": np.array(first, np.int32)})

    yield case("one row", 3 * rng.normal(size=(1, p.vocab)))
    special = special_rows(p.vocab, rng)
    for start in range(0, len(special), p.rows):
        yield case(f"special rows, from {start}", special[start:], (1 << 31) - p.vocab if start else 0)
    columns = np.arange(p.vocab)
    places = np.full((7, p.vocab), -5.0)
    places[0] = columns / p.vocab
    places[1] = -columns / p.vocab
    places[2, -2 * p.top_k :] = np.arange(min(2 * p.top_k, p.vocab))
    start = min(p.chunk, p.vocab) // 2
    places[3, start : start + 2 * p.top_k] = 4
    # Whole groups of threads are above the bar, as many candidates as there can be; then one column of each, as few as there can be.
    together = p.threads // groups(p.top_k, p.threads)
    group = columns // p.unit % p.threads // together
    places[4] = np.where(group < p.top_k, group, -9)
    places[6, : p.top_k * together * p.unit : together * p.unit] = 3
    places[5] = np.round(rng.normal(size=p.vocab) * 2)
    for start in range(0, len(places), p.rows):
        yield case(f"sorted, tied and crowded rows, from {start}", places[start:], 7)
    yield case("slice of the last ids", rng.normal(size=(2, p.vocab)), (1 << 31) - p.vocab)
    if min(p.rows, 40) * p.vocab <= 1 << 22:
        yield case("many rows", 4 * rng.normal(size=(min(p.rows, 40), p.vocab)), p.vocab)


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Random logits of draft positions: seven a sequence. Those of the product before are still in the L2 cache, or mostly."""
    for rows in (t for t in (1, 7, 56, 448) if t <= p.rows and t * p.vocab <= 1 << 27):
        logits = (3 * rng.standard_normal(size=(rows, p.vocab), dtype=np.float32)).astype(numpy_dtype(p.dtype))
        yield Workload(f"T = {rows}", {"logits": logits, "first": np.array(0, np.int32)}, moved_bytes=logits.nbytes)


FAMILY = Family(
    name="topk_logprob",
    summary="the most probable tokens of each row and their log-probs",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    workloads=workloads,
    rows="T",
)
