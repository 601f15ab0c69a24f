"""`primitives`: every device primitive once, checked against its definition.

The kernel writes one row of 64 words per result; `reference` computes the same rows in numpy from what each primitive is defined to
do. A GPU run against this reference, beside a host run, shows that both bodies of each primitive agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kdgen.contract import Argument, Capacity, Contract, Launch
from kdgen.dtypes import numpy_dtype
from kdgen.kernels.base import Arrays, Case, ContextValue, Family, FamilyParams, SharedLayout, Tolerance
from kdgen.targets import Target

THREADS = 64
WORD_ROWS = 69
FLOAT_ROWS = 2

Words = npt.NDArray[np.uint32]


class Params(FamilyParams):
    """Blocks of the launch."""

    blocks: Annotated[int, Field(ge=1, le=256, description="most blocks in a launch")] = 16


def shared(p: Params, target: Target) -> SharedLayout:
    """Shared memory of a block."""
    return SharedLayout.place(
        target, ("exchange", THREADS * 4, 16), ("ring", THREADS * 36, 128), ("full", 16, 8), ("matrix", THREADS * 16, 128)
    )


def contract(p: Params, target: Target) -> Contract:
    """The compiled kernel's interface."""
    return Contract(
        family="primitives",
        arguments=(
            Argument("in_words", "u32", (THREADS,), doc="arbitrary words"),
            Argument("in_floats", "f32", (THREADS,), doc="finite, not 0"),
            Argument("scratch", "u32", ("8 * G + 8",), "inout", "eight words a block, then the count of blocks and their sum; zeros"),
            Argument("words", "u32", ("G", WORD_ROWS, THREADS), "out", "results with exact bits"),
            Argument("floats", "f32", ("G", FLOAT_ROWS, THREADS), "out", "results of approximations"),
        ),
        capacities={"G": Capacity(1, p.blocks)},
        launches=(Launch("primitives", ("G", 1, 1), THREADS, shared(p, target).total),),
    )


def context(p: Params, target: Target) -> Mapping[str, ContextValue]:
    """Numbers of the template."""
    return {"threads": THREADS, "word_rows": WORD_ROWS, "float_rows": FLOAT_ROWS, "bulk_copy": target.bulk_copy}


def _bits(values: npt.NDArray[Any]) -> Words:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def _to_bf16(values: npt.NDArray[Any]) -> Words:
    bits = np.asarray(values, np.float32).astype(numpy_dtype("bf16")).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FFF), bits)


def _bf16(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(numpy_dtype("bf16")).astype(np.float32)


def _matrix_rows(x: Words) -> list[Words]:
    """ldmatrix x4, x4 transposed, x2, x2 transposed, of each warp's 32 rows of 16 bytes."""
    thread = np.arange(THREADS)
    data = np.stack([x[(thread * 4 + i) % THREADS] + np.uint32(i) for i in range(4)], axis=1)
    halves = data.view(np.uint16).reshape(2, 4, 8, 8)  # warp, matrix, row, column
    lane = np.arange(32)
    g, t = lane // 4, lane % 4

    def fragments(matrices: npt.NDArray[np.uint16]) -> list[Words]:
        low, high = matrices[:, :, g, 2 * t].astype(np.uint32), matrices[:, :, g, 2 * t + 1].astype(np.uint32)
        both = (high << 16 | low).astype(np.uint32)  # warp, matrix, lane
        return [both[:, i].reshape(THREADS) for i in range(4)]

    straight, transposed = fragments(halves), fragments(halves.swapaxes(2, 3))
    return [*straight, *transposed, *straight[:2], *transposed[:2]]


def _movmatrix(x: Words) -> Words:
    halves = x.view(np.uint16).reshape(2, 8, 8)  # warp, row, column: lane 4g + t holds row g, columns 2t and 2t + 1
    return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(THREADS)


def _mma() -> list[Words]:
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for i in range(4):
        rows, columns = g + i % 2 * 8, 2 * t + i // 2 * 8
        a[rows, columns], a[rows, columns + 1] = (lane * 7 + i * 3) % 17 - 8, (lane * 5 + i) % 13 - 6
        c[g + i // 2 * 8, 2 * t + i % 2] = lane if i == 3 else i + 1
    for i in range(2):
        b[2 * t + 8 * i, g], b[2 * t + 8 * i + 1, g] = (lane * 3 + i * 2) % 11 - 5, (lane + i * 4) % 7 - 3
    d = c + a @ b
    return [np.tile(_bits(d[g + i // 2 * 8, 2 * t + i % 2]), 2) for i in range(4)]


def reference(p: Params, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Both outputs, and the scratch words, from the definitions."""
    x, real = inputs["in_words"], inputs["in_floats"]
    blocks = (len(inputs["scratch"]) - 8) // 8
    thread = np.arange(THREADS, dtype=np.uint32)
    lane, warp = thread % 32, thread // 32
    halves = x.reshape(2, 32)

    def per_warp(values: npt.ArrayLike) -> Words:
        return np.repeat(np.asarray(values, np.uint32), 32)

    def from_lane(values: npt.NDArray[Any], source: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(values[(warp * 32 + source).astype(np.int64)])

    zero = np.zeros(THREADS, np.uint32)
    with np.errstate(all="ignore"):
        rows: list[npt.NDArray[Any]] = [
            thread, lane << 8 | warp, zero, zero + (blocks << 16 | 1 << 8 | 1),
            from_lane(x, 31 - lane), from_lane(x, lane ^ 5), from_lane(x, np.where(lane >= 3, lane - 3, lane)),
            from_lane(x, np.where(lane < 25, lane + 7, lane)), from_lane(x, np.where(lane < 16, lane ^ 1, lane ^ 2)),
            from_lane(x, lane ^ 9), from_lane(thread, lane ^ 9), _bits(from_lane(real, lane ^ 16)),
            per_warp([(half & 1) @ (np.uint32(1) << np.arange(32, dtype=np.uint32)) for half in halves]), zero, zero + 1,
            per_warp(halves.max(axis=1)), per_warp(halves.min(axis=1)), per_warp(halves.sum(axis=1, dtype=np.uint32)),
            per_warp(np.bitwise_or.reduce(halves, axis=1)),
            x[::-1], x[(thread + 32) % THREADS] + 1, np.where(warp == 0, x[(thread + 32) % THREADS] + 2, 0),
        ]  # fmt: skip
        ring = x[(thread[:, None] % 16 * 4 + np.arange(4)) % THREADS]
        valid = np.array([4, 2, 0])[thread % 3]
        filled = np.where(np.arange(4) < valid[:, None], ring, 0)
        rows += [ring.reshape(-1)[(thread * 4 + 17) % (THREADS * 4)], filled[:, 1], filled[:, 3], x[((thread ^ 1) + 5) % THREADS]]
        rows += [x[::-1], np.concatenate([x[:32], x[:32]])[::-1]]
        rows += [*_matrix_rows(x), _movmatrix(x), *_mma()]
        rows += [x[thread ^ 3], x[thread % 16 * 4 + 2], x[thread % 32 * 2 + 1], x[thread % 16 * 4 + 3]]
        mailbox = np.array([thread.sum(), (x & 0xFFFF).max(), 77, 55, 0, _bits(np.array([1.5]))[0]], np.uint32)
        rows.append(mailbox[thread % 6])
        double = real.astype(np.float64)
        square = double * double - 1.0  # exact: 24 + 24 bits and a cancellation fit float64
        shifted = (x >> lane).astype(np.float64)
        low = x & ~lane
        selector = np.uint32(0x7140) + (lane & 7)
        pair = (~x).astype(np.uint64) << np.uint64(32) | x
        picked = zero.copy()
        for i in range(4):
            byte = pair >> (np.uint64(8) * (selector >> np.uint32(4 * i) & 7).astype(np.uint64)) & np.uint64(255)
            picked |= byte.astype(np.uint32) << np.uint32(8 * i)
        rows += [
            _bits(square), _bits(real * real - np.float32(1)), _bits(double * 3 + 1e-9), _bits(np.sqrt(np.maximum(real, np.float32(0)))),
            _bits(np.float32(1) / real), _bits(np.minimum(real, np.float32(0.25))),
            np.minimum(x, 0x80000000) ^ np.maximum(x, 7), x,
            np.bitwise_count(x).astype(np.uint32) << 16 | (32 - np.frexp(shifted)[1]).astype(np.uint32) << 8
            | np.where(low == 0, 255, np.log2(np.maximum(low & (~low + 1), 1)).astype(np.uint32)),
            picked, np.rint(np.clip(real * np.float32(1e4), 0, None)).astype(np.uint32), zero,
            np.clip(np.rint(real * np.where(lane == 0, np.float32(1e30), np.float32(1e3))).astype(np.float64), -(2.0**31), 2.0**31 - 1)
            .astype(np.int64), _to_bf16(real), (x & 0xFFFF) << 16,
            _to_bf16(-real) << 16 | _to_bf16(real),
            _to_bf16(_bf16(-real) + _bf16(real * np.float32(3))) << 16 | _to_bf16(_bf16(real) + np.float32(2)), zero + 0x7FFF, zero + 1,
        ]  # fmt: skip
        exponentials = np.stack([np.exp2(double), np.exp2((real * np.float32(40)).astype(np.float64))])
    words = np.repeat(np.stack([np.asarray(row).astype(np.uint32) for row in rows])[None], blocks, axis=0)
    words[:, 2] = np.arange(blocks, dtype=np.uint32)[:, None] << 16
    scratch = np.zeros(8 * blocks + 8, np.uint32)
    for block in range(blocks):
        scratch[8 * block : 8 * block + 7] = [*mailbox, 1000 + block]
    scratch[8 * blocks] = blocks
    scratch[8 * blocks + 1] = sum(1000 + block for block in range(blocks))
    return {"words": words, "floats": np.repeat(exponentials[None], blocks, axis=0), "scratch": scratch}


def tolerances(p: Params) -> Mapping[str, Tolerance]:
    """`exp2_approx` alone is not exact."""
    return {"floats": Tolerance(2.0**-21, "ex2.approx: 2 ulp of the largest result")}


def cases(p: Params, rng: np.random.Generator) -> Iterator[Case]:
    """Random words and floats, in one block and in many."""
    for blocks in sorted({1, min(7, p.blocks), p.blocks}):
        floats = rng.normal(size=THREADS).astype(np.float32)
        words = rng.integers(0, 1 << 32, size=THREADS, dtype=np.uint32)
        yield Case(f"{blocks} blocks", {"in_words": words, "in_floats": floats, "scratch": np.zeros(8 * blocks + 8, np.uint32)})


def dimensions(p: Params, inputs: Arrays) -> Mapping[str, int]:
    """G: no input has it as a plain extent."""
    return {"G": (len(inputs["scratch"]) - 8) // 8}


FAMILY = Family(
    name="primitives",
    summary="every device primitive once, against its definition",
    params=Params,
    contract=contract,
    context=context,
    shared=shared,
    reference=reference,
    cases=cases,
    tolerances=tolerances,
    dimensions=dimensions,
)
