from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdgen.weights.int4 import Int4Weight, unpack
from kdgen.weights.prepack import gate_up_rows, place, place_scale, prepack, prepack_gate_up, unprepack, unprepack_gate_up
from tests.weights.samples import BF16, Array
from tests.weights.test_int4 import peak, random_weight

shapes = {"lead": st.lists(st.integers(1, 3), max_size=2), "slabs": st.integers(1, 5), "steps": st.integers(1, 9)}
seeds = st.integers(0, 2**32 - 1)


def same(a: Int4Weight, b: Int4Weight) -> bool:
    return a.shape == b.shape and all(x.tobytes() == y.tobytes() for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True))


@settings(deadline=None, max_examples=50)
@given(**shapes, seed=seeds)
def test_unprepack_is_the_inverse(lead: list[int], slabs: int, steps: int, seed: int) -> None:
    weight = random_weight(32 * slabs, 64 * steps, seed=seed, lead=tuple(lead))
    blocks = prepack(weight)
    assert blocks.shape == (*lead, slabs, steps, 288)
    assert blocks.nbytes == weight.packed.nbytes + weight.scale.nbytes
    back = unprepack(blocks)
    assert same(back, weight)
    assert back.packed.dtype == np.int32
    assert back.scale.dtype == BF16
    assert prepack(back).tobytes() == blocks.tobytes()


@settings(deadline=None, max_examples=50)
@given(**shapes, seed=seeds)
def test_unprepack_gate_up_is_the_inverse(lead: list[int], slabs: int, steps: int, seed: int) -> None:
    gate, up = (random_weight(16 * slabs, 64 * steps, seed=seed ^ i, lead=tuple(lead)) for i in range(2))
    blocks = prepack_gate_up(gate, up)
    assert blocks.shape == (*lead, slabs, steps, 288)
    back = unprepack_gate_up(blocks)
    assert same(back[0], gate)
    assert same(back[1], up)


@settings(deadline=None, max_examples=25)
@given(slabs=st.integers(1, 3), steps=st.integers(1, 4), seed=seeds)
def test_every_weight_and_scale_is_where_place_says(slabs: int, steps: int, seed: int) -> None:
    weight = random_weight(32 * slabs, 64 * steps, seed=seed)
    blocks = prepack(weight)
    rows, columns = np.indices(weight.shape)
    word, bit = place(rows % 32, columns % 64)
    assert np.array_equal((blocks[rows // 32, columns // 64, word] >> bit.astype(np.uint32) & 15).astype(int) - 8, unpack(weight.packed))
    rows, groups = np.indices(weight.scale.shape)
    word, bit = place_scale(rows % 32, groups % 2)
    got = blocks[rows // 32, groups // 2, word] >> bit.astype(np.uint32) & 0xFFFF
    assert np.array_equal(got, weight.scale.view(np.uint16))


def test_place_uses_every_bit_once() -> None:
    used = [place(row, column) for row in range(32) for column in range(64)]
    assert sorted(used) == [(word, bit) for word in range(256) for bit in range(0, 32, 4)]
    used = [place_scale(row, group) for row in range(32) for group in range(2)]
    assert sorted(used) == [(word, bit) for word in range(256, 288) for bit in (0, 16)]


def test_gate_and_up_share_threads() -> None:
    gate, up = (random_weight(48, 128, seed=i) for i in range(2))
    rows = gate_up_rows(48)
    assert rows[:24].tolist() == [*range(8), *range(48, 56), *range(8, 16)]
    both = Int4Weight(np.concatenate([gate.packed, up.packed])[rows], np.concatenate([gate.scale, up.scale])[rows])
    assert prepack_gate_up(gate, up).tobytes() == prepack(both).tobytes()


def warp_product(atoms: Array, x: Array) -> Array:
    """What one warp computes from a slab's atoms [steps, 288] and 8 tokens x [8, K]: [32, 8], by the fragments of `mma` m16n8k16."""
    result = np.zeros((32, 8))
    lane = np.arange(32)
    g, t = lane // 4, lane % 4
    for step, atom in enumerate(atoms):
        for tile in range(2):
            mine = atom[128 * tile : 128 * tile + 128].reshape(32, 4)  # 16 bytes of each lane
            scales = atom[256:].reshape(8, 4)  # 16 bytes of each quad
            for p in range(2):
                total = np.zeros((16, 8))
                for h in range(2):
                    word = mine[:, 2 * p + h]
                    a, b = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
                    for r in range(4):
                        pair = ((word >> np.uint32(4 * r)) & np.uint32(0x000F000F)) | np.uint32(0x43004300)
                        for high in range(2):
                            value = (pair >> np.uint32(16 * high) & np.uint32(0xFFFF)).astype(np.uint16).view(BF16).astype(np.float64) - 136
                            a[g + r % 2 * 8, 2 * t + r // 2 * 8 + high] = value
                    eight = np.stack([x[g, 64 * step + 32 * p + 8 * t + i] for i in range(8)])  # 16 bytes of each lane
                    for r in range(2):
                        for high in range(2):
                            b[2 * t + 8 * r + high, g] = eight[4 * h + 2 * r + high]
                    total += a @ b
                scale = scales[:, 2 * tile + p]
                halves = [
                    (scale >> np.uint32(16 * i) & np.uint32(0xFFFF)).astype(np.uint16).view(BF16).astype(np.float64) for i in range(2)
                ]
                result[16 * tile : 16 * tile + 16] += np.concatenate(halves)[:, None] * total
    return result


def test_a_warp_of_mma_computes_the_product() -> None:
    weight = random_weight(64, 256, seed=5)
    weight = Int4Weight(weight.packed, np.exp2(np.random.default_rng(6).integers(-4, 4, size=(64, 8))).astype(BF16))
    x = np.random.default_rng(7).integers(-64, 65, size=(8, 256)).astype(np.float64)
    blocks = prepack(weight)
    got = np.concatenate([warp_product(atoms, x) for atoms in blocks])
    assert np.array_equal(got, weight.dequantize().astype(np.float64) @ x.T)  # small integers times powers of two: exact in any order


def test_slices_of_a_rank_need_no_copy() -> None:
    """Rows of gate and up, columns of down, as tensor parallelism cuts them."""
    whole = random_weight(128, 512, lead=(3,))
    rows = Int4Weight(whole.packed[:, 32:96], whole.scale[:, 32:96])
    assert prepack(rows).tobytes() == prepack(whole)[:, 1:3].tobytes()
    assert prepack_gate_up(rows, rows).tobytes() == prepack_gate_up(whole, whole)[:, 2:6].tobytes()
    columns = Int4Weight(whole.packed[..., 16:32], whole.scale[..., 4:8])
    assert prepack(columns).tobytes() == np.ascontiguousarray(prepack(whole)[:, :, 2:4]).tobytes()


def test_out_may_be_part_of_something_larger() -> None:
    weight = random_weight(64, 128)
    store = np.zeros((3, 2, 3, 288), np.uint32)
    target = store[1, :, :2]
    assert prepack(weight, target) is target
    assert store[1, :, :2].tobytes() == prepack(weight).tobytes()
    assert not store[0].any()
    assert not store[1, :, 2].any()
    assert same(unprepack(store[1, :, :2]), weight)
    prepack_gate_up(weight, weight, store[:2].reshape(4, 3, 288)[:, :2])
    assert same(unprepack_gate_up(store[:2].reshape(4, 3, 288)[:, :2])[1], weight)


@pytest.mark.parametrize("shape", [(30, 64), (16, 64), (32, 32), (32, 96)])
def test_shapes_that_do_not_fit(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]} rows × {shape[1]} columns have no prepacked layout"):
        prepack(random_weight(*shape))


def test_faults() -> None:
    weight = random_weight(32, 128)
    with pytest.raises(ValueError, match="groups of 64 have no prepacked layout; allowed: 32"):
        prepack(random_weight(32, 128, 64))
    with pytest.raises(ValueError, match="must have the same shape"):
        prepack_gate_up(weight, random_weight(32, 64))
    with pytest.raises(ValueError, match="24 rows × 64 columns"):
        prepack_gate_up(random_weight(24, 64), random_weight(24, 64))
    good = np.zeros((1, 2, 288), np.uint32)
    frozen = good.copy()
    frozen.flags.writeable = False
    for out in (good[0], good.astype(np.int32), np.zeros((2, 2, 288), np.uint32), frozen, [0]):
        with pytest.raises(ValueError, match=r"out must be a writable array, uint32 \[1, 2, 288\]; got"):
            prepack(weight, out)  # type: ignore[arg-type]
    faulty: list[Any] = [good[0], good.astype(np.int32), good[..., :256], good[:0], None]
    for blocks in faulty:
        for inverse in (unprepack, unprepack_gate_up):
            with pytest.raises(ValueError, match=r"prepacked weights are uint32 \[..., slabs, steps, 288\], not empty; got"):
                inverse(blocks)
    blocks = prepack(weight)
    blocks[0, 0, 256] = 0x7FC0
    with pytest.raises(ValueError, match="weight_scale has nan"):
        unprepack(blocks)


def test_memory_is_three_times_the_tensor_at_most() -> None:
    weight = random_weight(2048, 7168)
    size = weight.packed.nbytes + weight.scale.nbytes
    blocks = prepack(weight)
    gate_up = prepack_gate_up(weight, weight)
    assert size + peak(lambda: prepack(weight)) <= 2.5 * size
    assert size + peak(lambda: unprepack(blocks)) <= 2.5 * size
    assert 2 * size + peak(lambda: prepack_gate_up(weight, weight)) <= 2.5 * 2 * size
    assert 2 * size + peak(lambda: unprepack_gate_up(gate_up)) <= 2.5 * 2 * size
    store = np.empty_like(blocks)
    assert peak(lambda: prepack(weight, store)) <= 0.5 * size
