from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdgen.dtypes import numpy_dtype
from kdgen.errors import ArtifactError
from kdgen.kdtr import Reader, Writer, pack_int4, save, unpack_int4
from kdgen.kdtr.format import CODES

RNG = np.random.default_rng(0)


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    target = numpy_dtype(dtype)
    return RNG.integers(0, 256, size=(*shape, target.itemsize), dtype=np.uint8).reshape(-1).view(target).reshape(shape)


@pytest.mark.parametrize("dtype", [name for name in CODES if name != "int4"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    values = {
        "matrix": sample(dtype, (3, 5)),
        "scalar": sample(dtype, ()),
        "empty": sample(dtype, (0, 7)),
        "deep": sample(dtype, (1, 2, 1, 3, 1, 2, 1, 2)),
    }
    save(tmp_path / "a.kdtr", values)
    with Reader(tmp_path / "a.kdtr") as reader:
        assert list(reader) == list(values)
        for name, want in values.items():
            got = reader[name]
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            assert got.tobytes() == want.tobytes()
            assert not got.flags.writeable
        reader.check()


def test_bf16_is_ml_dtypes(tmp_path: Path) -> None:
    save(tmp_path / "a.kdtr", {"w": np.array([1.5, -2.0], ml_dtypes.bfloat16)})
    assert Reader(tmp_path / "a.kdtr")["w"].dtype == ml_dtypes.bfloat16


def test_big_endian_and_bool_arrays_are_stored_as_what_they_mean(tmp_path: Path) -> None:
    save(tmp_path / "a.kdtr", {"w": np.array([1, 2, 300], ">i4"), "b": np.array([True, False])})
    with Reader(tmp_path / "a.kdtr") as reader:
        assert reader["w"].tolist() == [1, 2, 300]
        assert reader["b"].tolist() == [1, 0]


def test_strided_arrays_are_stored_in_row_major_order(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.int32).reshape(3, 4, 5).transpose(2, 0, 1)
    save(tmp_path / "a.kdtr", {"w": values})
    np.testing.assert_array_equal(Reader(tmp_path / "a.kdtr")["w"], values)


@given(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=2), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_int4_round_trip(seed: int, lead: list[int], words: int) -> None:
    values = np.random.default_rng(seed).integers(-8, 8, size=(*lead, 8 * words)).astype(np.int8)
    np.testing.assert_array_equal(unpack_int4(pack_int4(values)), values)


def test_int4_layout_is_lowest_column_in_lowest_nibble() -> None:
    assert pack_int4(np.array([-8, -7, -6, -5, -4, -3, -2, -1])).view(np.uint32).tolist() == [0x76543210]
    with pytest.raises(ArtifactError, match="−8 … 7"):
        pack_int4(np.array([8] * 8))
    with pytest.raises(ArtifactError, match="multiple of 8"):
        pack_int4(np.zeros(7, int))


def test_int4_records_the_logical_shape(tmp_path: Path) -> None:
    values = RNG.integers(-8, 8, size=(3, 16)).astype(np.int8)
    with Writer(tmp_path / "a.kdtr") as writer:
        writer.add("w", pack_int4(values), int4=True)
        writer.add("row", pack_int4(values[0]), int4=True)
        with writer.tensor("streamed", "int4", (None, 16)) as target:
            target.append(pack_int4(values[:1]))
            target.append(pack_int4(values[1:]))
        with writer.tensor("vector", "int4", (None,)) as target:
            target.append(pack_int4(values[0]))
    with Reader(tmp_path / "a.kdtr") as reader:
        assert [(t.dtype, t.shape, t.bytes) for t in reader.tensors.values()] == [
            ("int4", (3, 16), 24), ("int4", (16,), 8), ("int4", (3, 16), 24), ("int4", (16,), 8),
        ]  # fmt: skip
        np.testing.assert_array_equal(unpack_int4(reader.array("streamed", "int4", (3, None))), values)


def test_streaming_in_chunks_gives_the_same_bytes_as_writing_at_once(tmp_path: Path) -> None:
    values = sample("f32", (7, 3))
    save(tmp_path / "whole.kdtr", {"w": values, "v": values[0]}, {"a": 1})
    with Writer(tmp_path / "parts.kdtr") as writer:
        with writer.tensor("w", "f32", (None, 3)) as target:
            for rows in (values[:2], values[2:2], values[2:]):
                target.append(rows)
        writer.add("v", values[0])
        writer.attributes["a"] = 1
    assert (tmp_path / "parts.kdtr").read_bytes() == (tmp_path / "whole.kdtr").read_bytes()


def test_attribute_order_does_not_change_bytes(tmp_path: Path) -> None:
    save(tmp_path / "a.kdtr", {}, {"x": 1, "y": "ü"})
    save(tmp_path / "b.kdtr", {}, {"y": "ü", "x": 1})
    assert (tmp_path / "a.kdtr").read_bytes() == (tmp_path / "b.kdtr").read_bytes()
    assert Reader(tmp_path / "a.kdtr").attributes == {"x": 1, "y": "ü"}


@pytest.mark.parametrize("alignment", [64, 4096])
def test_tensors_are_aligned(tmp_path: Path, alignment: int) -> None:
    with Writer(tmp_path / "a.kdtr", alignment=alignment) as writer:
        for i in range(3):
            writer.add(f"t{i}", np.zeros(i * 7 + 1, np.uint8))
    with Reader(tmp_path / "a.kdtr") as reader:
        assert all(tensor.offset % alignment == 0 for tensor in reader.tensors.values())
        assert reader.alignment == alignment
        assert reader["t1"].__array_interface__["data"][0] % 64 == 0


def test_views_outlive_the_reader(tmp_path: Path) -> None:
    save(tmp_path / "a.kdtr", {"w": np.arange(5)})
    with Reader(tmp_path / "a.kdtr") as reader:
        view = reader["w"]
    del reader
    assert view.tolist() == [0, 1, 2, 3, 4]


def test_opening_reads_no_contents(tmp_path: Path) -> None:
    # A sparse file of 64 GB: reading it through would take minutes.
    rows = 1 << 30
    with Writer(tmp_path / "a.kdtr") as writer:
        writer.add("small", np.arange(3))
    data = bytearray((tmp_path / "a.kdtr").read_bytes())
    offset = 128
    end = offset + rows * 64
    with open(tmp_path / "big.kdtr", "wb") as file:
        file.write(data[:64])
        file.seek(end)
        index = (
            struct.pack("<QQIHBB2Q", offset - 64, rows * 64, 0, 1, 12, 2, rows, 64)
            + b"w"
            + bytes(7)
            + struct.pack("<Q", 2)
            + b"{}"
            + bytes(6)
        )
        file.seek(offset - 64 + rows * 64)
        file.write(index)
        tail = b"KDTRend\n" + struct.pack(
            "<QQQII20x", offset - 64 + rows * 64, len(index), offset + rows * 64 + len(index), 1, zlib.crc32(index)
        )
        file.write(tail + struct.pack("<I", zlib.crc32(tail)))
    with Reader(tmp_path / "big.kdtr") as reader:
        assert reader["w"].shape == (rows, 64)
        assert reader["w"][rows - 1, 63] == 0


def test_the_documented_format_can_be_read_without_the_reader(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save(tmp_path / "a.kdtr", {"first": np.zeros(5, np.uint8), "grün": values}, {"kind": "test"})
    data = (tmp_path / "a.kdtr").read_bytes()
    assert data[:8] == bytes.fromhex("4b4454520d0a1a0a")
    assert struct.unpack_from("<III", data, 8) == (1, 0, 64)
    assert zlib.crc32(data[:60]) == struct.unpack_from("<I", data, 60)[0]
    magic, index_at, index_size, size, count, index_crc = struct.unpack_from("<8sQQQII", data, len(data) - 64)
    assert (magic, size, count) == (b"KDTRend\n", len(data), 2)
    index = data[index_at : index_at + index_size]
    assert zlib.crc32(index) == index_crc
    at, seen = 0, {}
    for _ in range(count):
        offset, nbytes, crc, name_bytes, code, rank = struct.unpack_from("<QQIHBB", index, at)
        shape = struct.unpack_from(f"<{rank}Q", index, at + 24)
        name = index[at + 24 + 8 * rank :][:name_bytes].decode()
        assert zlib.crc32(data[offset : offset + nbytes]) == crc
        seen[name] = (code, shape, data[offset : offset + nbytes])
        at = (at + 24 + 8 * rank + name_bytes + 7) // 8 * 8
    assert seen["grün"] == (2, (2, 3), values.tobytes())
    (length,) = struct.unpack_from("<Q", index, at)
    assert json.loads(index[at + 8 : at + 8 + length]) == {"kind": "test"}
