"""`tree_attention`: MLA attention with absorbed projections, of tree nodes, decode tokens and prompt chunks, over a paged latent cache.

Definition. For row r at position p and head h, with keys k_0 … k_p of the row's own path (`latent + rope` values each, `attention_plan`
says where they are):

    out[r, h] = Σ_i softmax_i(scale · q[r, h] · k_i) · k_i[: latent]

Row-exactness: the bits of out[r] follow from q[r], p, and the keys k_0 … k_p alone. The order of operations, for a row at p:

    tiles       of `key_tile` keys, aligned to absolute positions; the last `tail_tiles` are the tail, those before it the body.
    splits      the body in parts of `splits[…].keys` keys from position 0 on; the tail is one more. Each starts from zero.
    scores      bf16: four sums over the dims 64 i + 16 g … + 15 (g = 0 … 3, i ascending), then (s0 + s1) + (s2 + s3).
                f32: four fused sums over the dims d with d mod 4 = g, added in the same way.
    softmax     2^(s · scale · log2 e − m). The reference m moves, to the largest score of the tile, when that exceeds it by more than 8.
                bf16: weights rounded to bf16, whose sum is kept per pair of key lanes and joined at the end of the split;
                f32: one sum in key order.
    values      bf16: 16 keys at a time in order; f32: fused, in key order.
    sums        partials = i16: of each split, the sums of a head over `warp_tiles` · 16 latent values, the largest of which is below
                2^(e + 1), become integers: sum · 2^(13 − e), rounded to nearest, ties to even; error 2^−14 of the largest, at most.
    combine     splits 0, 1, …, the tail last; split i is added to sum i mod 8; the eight sums are added in order; one division.

`scale` is a float of the spec; it is folded with log2 e into one float constant.
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
from kdgen.kernels import attention_plan as plan
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, SharedLayout, Tolerance, Workload
from kdgen.kernels.cache_layout import check_swizzle, swizzled
from kdgen.targets import Target

Floats = npt.NDArray[np.float32]

THREADS = 256
FRACTION_BITS = 13  #: integers of sums: a value below 2^(e + 1) becomes value · 2^(13 − e), at most 2^14
LEAST_EXPONENT = 14  #: biased; smaller sums count as if they were so large, so that no power of two over- or underflows
LAZY = 8.0  #: how far, in powers of two, a score may exceed the reference before that moves


class Params(plan.Params):
    """Shapes, tiling and pipeline; the tiling is that of `attention_plan`."""

    latent: Annotated[int, Field(ge=16, le=1024, multiple_of=16, description="values of a key that are also its value")]
    rope: Annotated[int, Field(ge=0, le=256, multiple_of=4, description="further values of a key")]
    dtype: Annotated[Literal["bf16", "f32"], Field(description="of queries, cache and result; bf16 uses the tensor cores")] = "bf16"
    scale: Annotated[float, Field(gt=0.0, le=16.0, description="factor of the scores: 1 / √(nope + rope) times any yarn correction")]
    stages: Annotated[int, Field(ge=3, le=8, description="tiles of the ring in shared memory")] = 4
    copy_method: Annotated[
        Literal["bulk", "cp_async"], Field(description="how body tiles are fetched: one bulk copy each, or by all threads")
    ] = "bulk"
    stagger: Annotated[
        bool, Field(description="half of the warps multiply values before the softmax, the others after it (blocks of 8 columns)")
    ] = True
    swizzle: Annotated[bool, Field(description="the cache is laid out as rows-xor8")] = True
    partials: Annotated[
        Literal["f32", "i16"],
        Field(description="of a split's sums on their way: i16 is half of the traffic, with an exponent per head and warp; bf16 only"),
    ] = "f32"
    wide_output: Annotated[bool, Field(description="also give the result before it is rounded, as f32")] = False
    blocks: Annotated[int, Field(ge=0, le=65535, description="blocks of a launch; 0: as many as the target's multiprocessors hold")] = 0

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if self.dtype == "bf16" and self.rope % 16:
            raise ValueError(f"rope = {self.rope} must be a multiple of 16 for bf16: mma multiplies 16 values at a time")
        if self.partials == "i16" and self.dtype != "bf16":
            raise ValueError(f"partials = i16 needs dtype = bf16; got {self.dtype}")
        if self.swizzle:
            check_swizzle(self.row_bytes, self.page_size)
        return self

    @property
    def packed(self) -> bool:
        """Sums on their way are 16-bit integers."""
        return self.partials == "i16"

    @property
    def warp_tiles(self) -> int:
        """Tiles of 16 latent values that a warp of the units' kernel owns."""
        tiles = 1
        while tiles * 8 < self.latent // 16:
            tiles *= 2
        return tiles

    @property
    def width(self) -> int:
        """Values of a key."""
        return self.latent + self.rope

    @property
    def row_bytes(self) -> int:
        """Bytes of a key in the cache."""
        return self.width * DTYPE_BYTES[self.dtype]

    @property
    def log2_scale(self) -> np.float32:
        """The scores' factor in the exponent of two."""
        return np.float32(self.scale * math.log2(math.e))

    @property
    def bulk(self) -> bool:
        """Body tiles come by bulk copies."""
        return self.copy_method == "bulk" and self.dtype == "bf16"

    @property
    def swizzled_tile(self) -> bool:
        """A tile in shared memory is laid out as rows-xor8. A bulk copy brings it as it lies in the cache."""
        return self.swizzle if self.bulk else self.row_bytes % 128 == 0

    @property
    def pitch(self) -> int:
        """Bytes from row to row of a tile: an odd number of 16-byte units where neither swizzle nor bulk copies forbid it."""
        return self.row_bytes if self.bulk or self.swizzled_tile else self.row_bytes + 16 * (1 - self.row_bytes // 16 % 2)


def entries(p: Params) -> dict[str, tuple[int, ...]]:
    """Entry point to the widths of its body units; launches with equal widths share an entry."""
    found: dict[tuple[int, ...], str] = {}
    for width in p.widths:
        if width is p.widths[0] or p.rows > p.widths[p.widths.index(width) - 1].rows:
            found.setdefault(width.columns, f"tree_attention_{'_'.join(map(str, width.columns))}")
    return {name: columns for columns, name in found.items()}


def exchange_bytes(p: Params, columns: int) -> int:
    """Shared memory through which the warps that multiplied slices of the scores meet."""
    if p.dtype == "f32":
        return columns * 8 * p.key_tile * 4  # scores, then weights
    partners, own = (3, 4) if columns == 8 else (4, 0)
    return (partners * columns + own) * (p.key_tile // 16) * 512


def combine_bytes(p: Params) -> int:
    """Shared memory of a combining block: a factor and a sum per split and head, the heads' totals, the warps' sums, and exponents."""
    return p.slots * 64 + 32 + 2 * 7 * 512 + p.packed * p.slots * 64


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block. The combining block uses the ring's place alone."""
    columns = max(p.tail_columns, *(width for columns in entries(p).values() for width in columns))
    groups = p.key_tile // 16
    return SharedLayout.place(
        target,
        ("ring", max(p.stages * p.key_tile * p.pitch, combine_bytes(p)), 1024),
        ("weights", 2 * columns * groups * 256 if p.dtype == "bf16" else 0, 128),
        ("alphas", 2 * columns * 32, 16),
        ("moved", 16, 16),
        ("full", p.stages * 8, 8),
        ("places", max(split.keys for split in p.splits) // p.key_tile * 8, 16),
        ("kept", THREADS // 32 * 32, 16),
        ("states", THREADS * 16 if p.dtype == "bf16" else 0, 16),
        ("exchange", exchange_bytes(p, columns), 16),
    )


def entry_bytes(p: Params, target: Target, columns: tuple[int, ...]) -> int:
    """Shared memory of an entry: the exchange is last, and as large as its widest unit needs."""
    layout = shared(p, target)
    needed = max(exchange_bytes(p, width) for width in (*columns, p.tail_columns))
    return layout.total if needed == layout.sizes["exchange"] else layout.offsets["exchange"] + needed


def blocks_per_sm(p: Params, target: Target, columns: tuple[int, ...]) -> int:
    """Blocks meant to share a multiprocessor: two when shared memory and registers suffice."""
    fits = 2 * (entry_bytes(p, target, columns) + target.shared_reserved) <= target.shared_per_sm
    return 2 if fits and max(columns) <= 4 and p.tail_columns <= 2 else 1


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface: units to partial results, then their combination."""
    if p.bulk and not target.bulk_copy:
        raise ValueError(f"copy_method = bulk: {target.name} has no bulk copies; allowed for it: cp_async")
    columns = f"T * {p.octets}"
    wide = (Argument("out_f32", "f32", ("T", p.heads, p.latent), "out", "the result before it is rounded"),)
    launches = []
    named = {widths: name for name, widths in entries(p).items()}
    above = 0
    for width in p.widths:
        if above < p.rows:
            # The host's blocks are few, so that a block works off several units, as on a GPU.
            blocks = p.blocks or (12 if target.is_host else target.sms * blocks_per_sm(p, target, width.columns))
            launches.append(
                Launch(
                    named[width.columns],
                    (f"min(T * {p.units_per_row}, {blocks})", 1, 1),
                    THREADS,
                    entry_bytes(p, target, width.columns),
                    when=f"T > {above} and T <= {width.rows}",
                    programmatic=target.bulk_copy,
                )
            )
        above = width.rows
    # A combining block does few slices of 16 latent values when there are few rows, so that all multiprocessors have work.
    slices = p.latent // 16
    for when, each in ((f"{columns} <= 16", 1), (f"{columns} > 16 and {columns} <= 32", 4), (f"{columns} > 32", 8)):
        launches.append(
            Launch(
                "tree_attention_combine", (columns, ceil_div(slices, each), 1), THREADS, combine_bytes(p), when=when,
                programmatic=target.bulk_copy,
            )
        )  # fmt: skip
    return Contract(
        family="tree_attention",
        arguments=(
            Argument("q", p.dtype, ("T", p.heads, p.width), doc="queries, absorbed and roped"),
            Argument("cache", p.dtype, ("P", p.page_size, p.width), doc="paged keys of one layer"),
            Argument("page_tables", "i32", ("S", p.max_pages), doc="page of each page_size positions"),
            *plan.plan_arguments(p),
            Argument("out", p.dtype, ("T", p.heads, p.latent), "out", "weighted latents; zeros for padding rows"),
            *(wide if p.wide_output else ()),
            *(
                (
                    Argument(
                        "partials", "u32", (columns, p.slots, p.latent * 4), "workspace", "unscaled sums of each column and split, in pairs"
                    ),
                )
                if p.packed
                else (Argument("partials", "f32", (columns, p.slots, p.latent * 8), "workspace", "unscaled sums of each column and split"),)
            ),
            Argument(
                "statistics",
                "f32",
                (columns, p.slots, 32 if p.packed else 16),
                "workspace",
                "reference and sum of weights, of 8 heads" + (", then exponents" if p.packed else ""),
            ),
        ),
        capacities={"S": Capacity(1, p.sequences), "T": Capacity(1, p.rows), "P": Capacity(1, (1 << 31) - 1)},
        launches=tuple(launches),
        pinned={**plan.pinned(p), "dtype": p.dtype, "scale": p.scale, "lazy": LAZY, "partials": p.partials},
        layouts={"cache": "rows-xor8" if p.swizzle else "rows"},
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {
        "threads": THREADS,
        "width": p.width,
        "octets": p.octets,
        "row_bytes": p.row_bytes,
        "pitch": p.pitch,
        "slots": p.slots,
        "tail_columns": p.tail_columns,
        "bulk": p.bulk,
        "swizzled_tile": p.swizzled_tile,
        "log2_scale": float(p.log2_scale),
        "lazy": LAZY,
        "value_tiles": p.latent // 16,
        "warp_tiles": p.warp_tiles,
        "packed": p.packed,
        "fraction_bits": FRACTION_BITS,
        "least_exponent": LEAST_EXPONENT,
        "entry_names": tuple(entries(p)),
        "entry_widths": tuple(tuple(sorted(set(columns))) for columns in entries(p).values()),
        # Which of the splits each width is for, as a condition.
        "entry_tests": tuple(
            tuple(
                " || ".join(f"head.w >> 16 == {step}" for step, width in enumerate(columns) if width == here)
                for here in sorted(set(columns))
            )
            for columns in entries(p).values()
        ),
        "entry_blocks": tuple(blocks_per_sm(p, target, columns) for columns in entries(p).values()),
    }


def logical_keys(p: Params, inputs: Arrays) -> dict[int, npt.NDArray[Any]]:
    """The keys `[position + 1, width]` of every row, in the order of its own path, found through its tail record."""
    rows = swizzled(inputs["cache"]) if p.swizzle else inputs["cache"]
    found: dict[int, npt.NDArray[Any]] = {}
    for record in plan.tails(p, inputs):
        sequence, column, plain, position = int(record[0]), int(record[4]), int(record[5]), int(record[6])
        places = np.arange(position + 1)
        path = np.ascontiguousarray(record[8:]).view(np.uint8)
        places[plain:] = plain + path[: max(0, position + 1 - plain)].astype(np.int64)
        found[column // p.octets] = rows[inputs["page_tables"][sequence, places // p.page_size], places % p.page_size]
    return found


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The definition in float64."""
    count = len(inputs["q"])
    out = np.zeros((count, p.heads, p.latent))
    for row, keys in logical_keys(p, inputs).items():
        wide = keys.astype(np.float64)
        scores = inputs["q"][row].astype(np.float64) @ wide.T * p.scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[row] = weights @ wide[:, : p.latent] / weights.sum(axis=1, keepdims=True)
    return {"out": out, "out_f32": out} if p.wide_output else {"out": out}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """Relative to the largest element."""
    if p.dtype == "bf16":
        why = "weights are rounded to bf16 (2⁻⁹ each), and so is the result"
        return {"out": Tolerance(6e-3, why), "out_f32": Tolerance(2e-3, "weights are rounded to bf16: 2⁻⁹ each, of random sign")}
    why = "fp32 sums of up to a few thousand terms, and 2 ulp of the exponential"
    return {"out": Tolerance(1e-5, why), "out_f32": Tolerance(1e-5, why)}


def dtype_of(p: Params) -> Any:
    """The numpy type of queries, cache and result."""
    return numpy_dtype(p.dtype)


def poisoned_cache(p: Params, pages: int) -> npt.NDArray[Any]:
    """A pool of `pages` pages in which every element is NaN."""
    cache = np.empty((pages, p.page_size, p.width), dtype_of(p))
    cache.view(np.uint8)[...] = 0xFF
    return cache


def random_keys(p: Params, rng: np.random.Generator, count: int) -> npt.NDArray[Any]:
    """Keys `[count, width]`; from 8,192 on they repeat, since drawing more takes longer than anything that is done with them."""
    drawn = rng.normal(size=(min(count, 8192), p.width)).astype(dtype_of(p))
    return np.resize(drawn, (count, p.width))


def make_inputs(p: Params, rng: np.random.Generator, rows: Arrays, cached: list[int]) -> dict[str, npt.NDArray[Any]]:
    """Inputs of the kernel for planned rows: random queries and keys.

    Args:
        p: the parameters.
        rng: the generator.
        rows: the inputs of `attention_plan`, without `units`.
        cached: per sequence, how many positions have a key; all others hold NaN, and pages that nobody needs have an impossible number.
    """
    count = len(rows["row_sequences"])
    blank = rng.integers(-(1 << 31), 1 << 31, size=(count * p.units_per_row, plan.RECORD), dtype=np.int64).astype(np.int32)
    planned = plan.reference(p, {**rows, "units": blank})
    needed = [ceil_div(n, p.page_size) for n in cached]
    numbers = rng.permutation(sum(needed) + 2)
    tables = np.full((len(cached), p.max_pages), (1 << 31) - 1, np.int32)
    cache = poisoned_cache(p, len(numbers))
    plain = swizzled(cache) if p.swizzle else cache
    for sequence, (positions, pages) in enumerate(zip(cached, needed, strict=True)):
        tables[sequence, :pages], numbers = numbers[:pages], numbers[pages:]
        places = np.arange(positions)
        plain[tables[sequence, places // p.page_size], places % p.page_size] = random_keys(p, rng, positions)
    return {
        "q": rng.normal(size=(count, p.heads, p.width)).astype(dtype_of(p)),
        "cache": swizzled(plain) if p.swizzle else plain,
        "page_tables": tables,
        **planned,
    }


def take_rows(p: Params, inputs: Arrays, rows: npt.NDArray[np.intp]) -> dict[str, npt.NDArray[Any]]:
    """Inputs of some rows alone, planned anew; what a row is, its tail record says."""
    sequences = np.full(len(inputs["q"]), -1, np.int32)
    depths = np.zeros(len(inputs["q"]), np.int32)
    paths = np.zeros((len(inputs["q"]), plan.path_bytes(p.depth)), np.uint8)
    starts = np.zeros(len(inputs["page_tables"]), np.int32)
    for record in plan.tails(p, inputs):
        row, sequence = int(record[4]) // p.octets, int(record[0])
        path = np.ascontiguousarray(record[8:]).view(np.uint8)[: paths.shape[1]]
        # A contiguous row may count its depth from anywhere.
        starts[sequence] = 0 if path[0] == plan.CONTIGUOUS else record[5]
        sequences[row], depths[row], paths[row] = sequence, record[6] - starts[sequence], path
    planned = plan.reference(
        p,
        {
            "starts": starts,
            "row_sequences": sequences[rows],
            "row_depths": depths[rows],
            "row_paths": paths[rows],
            "units": np.zeros((len(rows) * p.units_per_row, plan.RECORD), np.int32),
        },
    )
    return {"q": inputs["q"][rows], "cache": inputs["cache"], "page_tables": inputs["page_tables"], **planned}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Trees, chunks and single rows, every start modulo the tile, empty bodies, both sides of a step, several sequences, padding."""

    def case(name: str, shapes: list[tuple[int, int, bool]], padding: int = 0) -> Case:
        rows = plan.random_rows(p, rng, shapes, padding)
        return Case(name, make_inputs(p, rng, rows, [start + count for start, count, _ in shapes]))

    # Workspaces of many rows at a large capacity would take longer to fill than the kernel to run.
    most = max(1, min(p.rows, 33, (96 << 20) // (p.slots * p.heads * p.latent * 4)))
    tile, near = p.key_tile, min(p.splits[0].keys * 3 + 5, p.positions - most)
    yield case("an empty cache", [(0, 1, False)])
    yield case("a tree on an empty cache", [(0, min(most, 9), False)])
    for start in (tile - 1, 2 * tile, near):
        if start + most <= p.positions:
            yield case(f"a tree of {min(most, 17)} at {start}", [(start, min(most, 17), False)])
    yield case(f"one row at {near}", [(near, 1, False)])
    if near > most:
        yield case(f"a chunk of {most}", [(near - most, most, True)])
    step = p.splits[0].below
    if step and step + most <= p.positions and step <= 5000:
        yield case(f"a tree across {step}", [(step - 2, min(most, 7), False)])
    if p.sequences > 1 and most > 3:
        count = min(4, p.sequences)
        each = max(1, (most - 1) // count)
        yield case(
            "several sequences and padding",
            [(int(rng.integers(near)), int(rng.integers(1, each + 1)), i % 2 == 1) for i in range(count)],
            1,
        )
    yield case("padding alone", [(3, 0, False)], min(most, 2))


def workloads(p: Params, rng: np.random.Generator) -> Iterator[Workload]:
    """Trees of 1, 8, 16, 32 and 64 rows at contexts of 1k, 8k, 32k and 128k."""
    for context_length in (1024, 8192, 32768, 131072):
        for count in (1, 8, 16, 32, 64):
            start = context_length - 23 - p.depth
            if start + count > p.positions or count > p.rows:
                continue
            rows = plan.random_rows(p, rng, [(start, count, False)])
            inputs = make_inputs(p, rng, rows, [start + count])
            pairs = count * p.heads * (start + 1)
            yield Workload(
                f"{context_length // 1024}k, T = {count}",
                inputs,
                moved_bytes=(start + count) * p.row_bytes + inputs["q"].nbytes + count * p.heads * p.latent * 2,
                flops=2 * pairs * (p.width + p.latent),
                cold=True,
            )


FAMILY = Family(
    name="tree_attention",
    summary="MLA attention of tree nodes, decode tokens and prompt chunks over a paged latent cache, row-exact",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    workloads=workloads,
    rows="T",
    take_rows=take_rows,
)
