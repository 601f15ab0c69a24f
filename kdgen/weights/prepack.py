"""4-bit weights in the order in which an `mma.sync` m16n8k16 kernel reads them.

Two layouts, both without padding and both exactly invertible; the names change whenever a byte would:

    `w4a16-m32k64-g32/1`          32 consecutive output rows per atom                  (`prepack`)
    `w4a16-m32k64-g32-gateup/1`   16 gate rows and the same 16 up rows per atom        (`prepack_gate_up`)

The weights are the 16-row operand A, so that a token is one column of the result and columns never mix.

Atom
====

An atom is 32 rows × 64 columns (K): two tiles of 16 rows, then their scales; 288 words of 32 bits, 1152 bytes.

    word    0 ┌───────────────────────────────────────────────┐
              │ tile 0: lane l owns words 4 l … 4 l + 3       │  512 bytes: one 16-byte load of a warp, coalesced
          128 ├───────────────────────────────────────────────┤
              │ tile 1: lane l owns words 128 + 4 l …         │  512 bytes
          256 ├───────────────────────────────────────────────┤
              │ scales: the lanes 4 g … 4 g + 3 share words   │  128 bytes: 16 per quad of lanes, one request
              │         256 + 4 g … 256 + 4 g + 3             │
          288 └───────────────────────────────────────────────┘

Lane l = 4 g + t (g = 0 … 7, t = 0 … 3), as in the fragments of `mma`.

    a lane's four words      word 2 p + h:  p = 0, 1 the group of 32 columns, h = 0, 1 the `mma` within it
    a scale quad's words     word 2 i + p:  i = 0, 1 the tile, p the group; low half bf16 of row g, high half of row g + 8

One word is all of A of one `mma` for one lane. Its 16 rows are those of the tile; with c = 32 p + 8 t + 4 h:

    bits      0…3     4…7     8…11    12…15   16…19   20…23   24…27   28…31
    row       g       g + 8   g       g + 8   g       g + 8   g       g + 8
    column    c       c       c + 2   c + 2   c + 1   c + 1   c + 3   c + 3
    register  a0 low  a1 low  a2 low  a3 low  a0 high a1 high a2 high a3 high

So register a_r is two nibbles 16 bits apart: ((word >> 4 r) & 0x000F000F) | 0x43004300 is the pair of bf16 128 + (q + 8), and
subtracting 136 from both halves leaves q, exactly.

Order of K
==========

The two `mma` of a group take its 32 columns in this order, whatever the fragment's own numbering of k says:

    columns of the group     0  1  2  3 │ 4  5  6  7 │ 8  9 10 11 │12 … 15│16 … 19│20 … 23│24 … 27│28 … 31
    `mma` h                  h = 0      │ h = 1      │ h = 0      │ h = 1 │ h = 0 │ h = 1 │ h = 0 │ h = 1
    lane t                   t = 0                   │ t = 1              │ t = 2         │ t = 3

A lane's part of B for both is then eight neighbouring activations, x[token][32 p + 8 t … + 7], 16 bytes of a plain row-major x; for
`mma` h its registers are the pairs 4 h … 4 h + 1 and 4 h + 2 … 4 h + 3 of these eight. Activations need no packing. A group's two `mma`
chain on one accumulator; its scale is applied to their sum.

Order of atoms
==============

    blocks[..., slab, step, 288]: slab = output rows / 32, step = columns / 64

A slab's atoms, all of K, follow each other in memory. In the gate/up layout slab s holds gate and up rows 16 s … 16 s + 15: rows
0 … 7 of tile i are gate rows 16 s + 8 i …, rows 8 … 15 are the same up rows. In the accumulator rows g and g + 8 belong to one thread:
SwiGLU needs neither a shuffle nor shared memory.

A layout is for groups of 32: with smaller groups one `mma` would mix scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.weights.int4 import Int4Weight

ROWS_LAYOUT = "w4a16-m32k64-g32/1"
GATE_UP_LAYOUT = "w4a16-m32k64-g32-gateup/1"

ATOM_ROWS = 32
ATOM_COLUMNS = 64
ATOM_WORDS = 288
SCALE_WORD = 256
GROUP = 32

#: Packed words worked on at a time: the temporaries of a chunk stay in a core's cache.
_CHUNK = 1 << 16
_EVEN = np.uint32(0x0F0F0F0F)
_ODD = np.uint32(0xF0F0F0F0)
_LOW = np.uint32(0x0000FFFF)
_HIGH = np.uint32(0xFFFF0000)
_4, _16 = np.uint32(4), np.uint32(16)

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]


def place(row: Any, column: Any) -> tuple[Any, Any]:
    """Where an atom keeps the weight of row 0 … 31 and column 0 … 63: (word, lowest bit). Integers, or arrays of them."""
    tile, half, g = row // 16, row // 8 % 2, row % 8
    p, t, h, c = column // 32, column // 8 % 4, column // 4 % 2, column % 4
    return 128 * tile + 4 * (4 * g + t) + 2 * p + h, 4 * (half + 2 * (c // 2) + 4 * (c % 2))


def place_scale(row: Any, group: Any) -> tuple[Any, Any]:
    """Where an atom keeps the scale of row 0 … 31 and group 0, 1: (word, lowest bit). Integers, or arrays of them."""
    return SCALE_WORD + 4 * (row % 8) + 2 * (row // 16) + group, 16 * (row // 8 % 2)


def gate_up_rows(intermediate: int) -> npt.NDArray[np.int64]:
    """Row r of what the gate/up layout holds is row `gate_up_rows(I)[r]` of gate (below I) and up (I and above) stacked."""
    rows = np.arange(2 * intermediate, dtype=np.int64)
    half, within = rows // 8 % 2, rows // 16 * 8 + rows % 8
    return within + half * intermediate


def prepack(weight: Int4Weight, out: Words | None = None) -> Words:
    """A matrix to the layout `ROWS_LAYOUT`.

    Args:
        weight: [..., N, K] in groups of 32; N a multiple of 32, K of 64. Views (a rank's rows or columns) are not copied.
        out: where to put the result, such as a part of a mapped file; it must have the result's type and shape.

    Returns:
        u32 [..., N/32, K/64, 288]; `out`, if given.

    Raises:
        ValueError: shapes or a group that the layout does not hold, or a wrong `out`.
    """
    _check(weight, ATOM_ROWS)
    blocks = _result(out, (*weight.shape[:-2], weight.rows // ATOM_ROWS, weight.columns // ATOM_COLUMNS, ATOM_WORDS))
    for lead in np.ndindex(weight.shape[:-2]):
        words, scale = _split(weight.packed[lead], 2), _split(weight.scale[lead], 2)
        _weave(words[:, :, 0], words[:, :, 1], scale[:, :, 0], scale[:, :, 1], blocks[lead])
    return blocks


def unprepack(blocks: Words) -> Int4Weight:
    """The inverse of `prepack`, bit for bit.

    Raises:
        ValueError: blocks of another type or shape, or with scales that no checkpoint has.
    """
    shape = _matrix_shape(blocks)
    packed, scale = _empty(shape)
    for lead in np.ndindex(shape[:-2]):
        words, bits = _split(packed[lead], 2), _split(scale[lead], 2)
        _unweave(blocks[lead], words[:, :, 0], words[:, :, 1], bits[:, :, 0], bits[:, :, 1])
    return _weight(packed, scale)


def prepack_gate_up(gate: Int4Weight, up: Int4Weight, out: Words | None = None) -> Words:
    """Gate and up projection to the layout `GATE_UP_LAYOUT`.

    Args:
        gate, up: [..., I, K] in groups of 32; I a multiple of 16, K of 64.
        out: as for `prepack`.

    Returns:
        u32 [..., I/16, K/64, 288]; `out`, if given.

    Raises:
        ValueError: as for `prepack`, or gate and up of different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate is {list(gate.shape)}, up {list(up.shape)}; they must have the same shape")
    for half in (gate, up):
        _check(half, ATOM_ROWS // 2)
    blocks = _result(out, (*gate.shape[:-2], gate.rows * 2 // ATOM_ROWS, gate.columns // ATOM_COLUMNS, ATOM_WORDS))
    for lead in np.ndindex(gate.shape[:-2]):
        first, second = (_split(half.packed[lead], 1)[:, :, 0] for half in (gate, up))
        first_scale, second_scale = (_split(half.scale[lead], 1)[:, :, 0] for half in (gate, up))
        _weave(first, second, first_scale, second_scale, blocks[lead])
    return blocks


def unprepack_gate_up(blocks: Words) -> tuple[Int4Weight, Int4Weight]:
    """The inverse of `prepack_gate_up`, bit for bit: gate and up; ValueError as in `unprepack`."""
    *lead_shape, rows, columns = _matrix_shape(blocks)
    gate, up = (_empty((*lead_shape, rows // 2, columns)) for _ in range(2))
    for lead in np.ndindex(*lead_shape):
        first, second = (_split(half[0][lead], 1)[:, :, 0] for half in (gate, up))
        first_scale, second_scale = (_split(half[1][lead], 1)[:, :, 0] for half in (gate, up))
        _unweave(blocks[lead], first, second, first_scale, second_scale)
    return _weight(*gate), _weight(*up)


def _split(matrix: Array, halves: int) -> Array:
    """A view of [N, columns] as [slab, tile, half, g, columns], with one or two halves of 8 rows in a tile."""
    return matrix.reshape(-1, 2, halves, 8, matrix.shape[-1])


def _weave(first: Array, second: Array, first_scale: Array, second_scale: Array, blocks: Words) -> None:
    """Fill blocks [S, steps, 288] from the rows 0 … 7 (first) and 8 … 15 (second) of each tile, [S, 2, 8, columns]."""
    steps = blocks.shape[1]
    slabs = max(1, _CHUNK // (ATOM_ROWS * 8 * steps))
    for start in range(0, len(blocks), slabs):
        part = slice(start, start + slabs)
        target = blocks[part]
        a, b = (half[part].view(np.uint32).reshape(-1, 2, 8, steps, 2, 4) for half in (first, second))
        even = (a & _EVEN) | ((b & _EVEN) << _4)  # columns 0 2 4 6 of a row's eight, rows g and g + 8 beside each other
        odd = ((a >> _4) & _EVEN) | (b & _ODD)
        tiles = target[..., :SCALE_WORD].reshape(-1, steps, 2, 8, 4, 2, 2)  # slab, step, tile, g, t, p, h
        tiles[..., 0] = ((even & _LOW) | (odd << _16)).transpose(0, 3, 1, 2, 5, 4)
        tiles[..., 1] = ((even >> _16) | (odd & _HIGH)).transpose(0, 3, 1, 2, 5, 4)
        low, high = (
            half[part].view(np.uint16).astype(np.uint32).reshape(-1, 2, 8, steps, 2).transpose(0, 3, 2, 1, 4)
            for half in (first_scale, second_scale)
        )
        target[..., SCALE_WORD:].reshape(-1, steps, 8, 2, 2)[...] = low | (high << _16)  # slab, step, g, tile, p


def _unweave(blocks: Words, first: Array, second: Array, first_scale: Array, second_scale: Array) -> None:
    """The inverse of `_weave`: fills the last four."""
    steps = blocks.shape[1]
    slabs = max(1, _CHUNK // (ATOM_ROWS * 8 * steps))
    for start in range(0, len(blocks), slabs):
        part = slice(start, start + slabs)
        source = blocks[part]
        tiles = source[..., :SCALE_WORD].reshape(-1, steps, 2, 8, 4, 2, 2).transpose(0, 2, 3, 1, 5, 4, 6)
        zeroth, other = np.ascontiguousarray(tiles[..., 0]), np.ascontiguousarray(tiles[..., 1])
        even, odd = (zeroth & _LOW) | (other << _16), (zeroth >> _16) | (other & _HIGH)
        shape = first[part].shape
        first[part] = ((even & _EVEN) | ((odd & _EVEN) << _4)).reshape(shape)
        second[part] = (((even >> _4) & _EVEN) | (odd & _ODD)).reshape(shape)
        scales = source[..., SCALE_WORD:].reshape(-1, steps, 8, 2, 2).transpose(0, 3, 2, 1, 4)
        shape = first_scale[part].shape
        first_scale[part] = (scales & _LOW).reshape(shape)
        second_scale[part] = (scales >> _16).reshape(shape)


def _empty(shape: tuple[int, ...]) -> tuple[Words, npt.NDArray[np.uint16]]:
    return np.empty((*shape[:-1], shape[-1] // 8), np.uint32), np.empty((*shape[:-1], shape[-1] // GROUP), np.uint16)


def _weight(packed: Words, scale: npt.NDArray[np.uint16]) -> Int4Weight:
    return Int4Weight(packed.view(np.int32), scale.view(numpy_dtype("bf16")), GROUP)


def _matrix_shape(blocks: Words) -> tuple[int, ...]:
    if (
        not isinstance(blocks, np.ndarray)
        or blocks.dtype != np.uint32
        or blocks.ndim < 3
        or blocks.shape[-1] != ATOM_WORDS
        or not blocks.size
    ):
        raise ValueError(f"prepacked weights are uint32 [..., slabs, steps, {ATOM_WORDS}], not empty; got {_describe(blocks)}")
    return (*blocks.shape[:-3], blocks.shape[-3] * ATOM_ROWS, blocks.shape[-2] * ATOM_COLUMNS)


def _result(out: Words | None, shape: tuple[int, ...]) -> Words:
    if out is None:
        return np.empty(shape, np.uint32)
    if not isinstance(out, np.ndarray) or out.dtype != np.uint32 or out.shape != shape or not out.flags.writeable:
        raise ValueError(f"out must be a writable array, uint32 {list(shape)}; got {_describe(out)}")
    return out


def _describe(array: Any) -> str:
    if not isinstance(array, np.ndarray):
        return f"a {type(array).__name__}"
    return f"{array.dtype.name} {list(array.shape)}{'' if array.flags.writeable else ', read-only'}"


def _check(weight: Int4Weight, rows: int) -> None:
    if weight.group != GROUP:
        raise ValueError(f"groups of {weight.group} have no prepacked layout; allowed: {GROUP}")
    if weight.rows % rows or weight.columns % ATOM_COLUMNS:
        raise ValueError(
            f"{weight.rows} rows × {weight.columns} columns have no prepacked layout: rows must be a multiple of {rows}, "
            f"columns of {ATOM_COLUMNS}"
        )
