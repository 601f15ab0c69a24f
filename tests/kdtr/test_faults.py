from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kdgen.errors import ArtifactError
from kdgen.kdtr import Reader, Writer, save
from kdgen.kdtr.format import Tensor, Trailer, pack_header, pack_index, pack_trailer
from kdgen.kdtr.reader import MissingTensorError


def read_all(path: Path) -> None:
    with Reader(path) as reader:
        reader.check()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.kdtr"
    save(path, {"a": np.arange(5, dtype=np.int16), "b": np.ones((2, 3), np.float32), "none": np.zeros((0, 2))}, {"kind": "test", "n": 3})
    read_all(path)
    return path


def test_every_flipped_byte_is_found(small: Path) -> None:
    data = small.read_bytes()
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= mask
            small.write_bytes(damaged)
            with pytest.raises(ArtifactError, match=r"small\.kdtr"):
                read_all(small)


def test_every_truncation_and_extension_is_found(small: Path) -> None:
    data = small.read_bytes()
    for length in range(len(data)):
        small.write_bytes(data[:length])
        with pytest.raises(ArtifactError, match=r"small\.kdtr"):
            read_all(small)
    for extra in (b"\0", data):
        small.write_bytes(data + extra)
        with pytest.raises(ArtifactError):
            read_all(small)


def test_random_bytes_are_never_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 63, 64, 127, 128, 1000):
        (tmp_path / "noise").write_bytes(rng.bytes(size))
        with pytest.raises(ArtifactError):
            Reader(tmp_path / "noise")


def craft(path: Path, tensors: list[Tensor], data: bytes = bytes(256), *, count: int | None = None, header: bytes | None = None) -> Path:
    """A file whose checksums are right and whose index says what it is told to."""
    index = pack_index(tensors, {})
    head = header or pack_header(64)
    start = len(head) + len(data)
    trailer = Trailer(start, len(index), start + len(index) + 64, len(tensors) if count is None else count, zlib.crc32(index))
    path.write_bytes(head + data + index + pack_trailer(trailer))
    return path


def entry(name: str = "t", dtype: str = "u8", shape: tuple[int, ...] = (64,), offset: int = 64, size: int = 64) -> Tensor:
    return Tensor(name, dtype, shape, offset, size, zlib.crc32(bytes(min(size, 1 << 20))))


CRAFTED: dict[str, tuple[list[Tensor], str]] = {
    "overlap": ([entry("a"), entry("b", offset=64)], "tensor 'b' .* overlaps tensor 'a'"),
    "inside the header": ([entry(offset=0)], "overlaps the header"),
    "gap": ([entry(offset=128)], "should begin at 64"),
    "unaligned": ([entry(shape=(10,), size=10), entry("b", offset=80)], "should begin at 128, the next multiple of 64"),
    "beyond the file": ([entry(shape=(1 << 20,), size=1 << 20)], "reaches beyond the data"),
    "far away": ([entry(offset=(1 << 64) - 64)], "reaches beyond the data"),
    "two of a name": ([entry("a"), entry("a", offset=128)], "two tensors are called 'a'"),
    "wrong size": ([entry(shape=(65,))], r"64 bytes, but u8 \[65\] has 65"),
    "overflow": ([entry(dtype="f32", shape=(1 << 33, 1 << 31), size=0)], "absurd shape"),
    "negative": ([entry(shape=((1 << 64) - 1,))], "absurd shape"),
    "negative beside zero": ([entry(shape=(0, (1 << 64) - 1), size=0)], "absurd shape"),
    "int4 of odd rows": ([entry(dtype="int4", shape=(4, 9), size=18)], "multiple of 8"),
    "data unaccounted for": ([entry(), entry("b", offset=128)], "the data end at 192"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, case: str) -> None:
    tensors, message = CRAFTED[case]
    with pytest.raises(ArtifactError, match=message):
        Reader(craft(tmp_path / "crafted.kdtr", tensors))


def test_the_crafted_files_differ_from_a_good_one_only_in_their_index(tmp_path: Path) -> None:
    read_all(craft(tmp_path / "good.kdtr", [entry(), entry("b", shape=(192,), offset=128, size=192)]))


@pytest.mark.parametrize(
    ("count", "message"), [(3, "ends within|runs out|no name"), (1, "attributes"), (0xFFFFFFFF, "ends within|runs out|no name")]
)
def test_a_wrong_number_of_tensors_is_refused(tmp_path: Path, count: int, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Reader(craft(tmp_path / "crafted.kdtr", [entry(), entry("b", shape=(192,), offset=128, size=192)], count=count))


def header_with(version: int = 1, flags: int = 0, alignment: int = 64) -> bytes:
    head = struct.pack("<8sIII40s", b"KDTR\r\n\x1a\n", version, flags, alignment, bytes(40))
    return head + struct.pack("<I", zlib.crc32(head))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (header_with(version=2), "version 2, made by a newer kdgen; this one reads up to 1: upgrade"),
        (header_with(flags=1), "flags 0x1"),
        (header_with(alignment=0), "alignment 0"),
        (header_with(alignment=96), "alignment 96"),
        (b"PK\3\4" + bytes(60), "not a KDTR file"),
        (header_with().replace(b"\r\n", b"\n\n"), "not a KDTR file"),
    ],
)
def test_headers_that_cannot_be_read_are_refused(tmp_path: Path, header: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Reader(craft(tmp_path / "crafted.kdtr", [entry(shape=(256,), size=256)], header=header))


def test_missing_files_and_tensors(small: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        Reader(small.with_name("absent"))
    with pytest.raises(ArtifactError, match="cannot be read"):
        Reader(small.parent)
    with Reader(small) as reader:
        with pytest.raises(MissingTensorError, match="no tensor 'x'; it has a, b, none"):
            reader["x"]
        assert reader.get("x") is None
        with pytest.raises(ArtifactError, match=r"'b' is f32 \[2, 3\], expected bf16 \[2, any\]"):
            reader.array("b", "bf16", (2, None))
        with pytest.raises(ArtifactError, match=r"expected f32 \[2, 4\]"):
            reader.array("b", "f32", (2, 4))
        assert reader.array("b", "f32", (None, 3)).shape == (2, 3)


def _twice(writer: Writer) -> None:
    writer.add("a", np.zeros(3))
    writer.add("a", np.zeros(3))


def _short(writer: Writer) -> None:
    with writer.tensor("a", "f32", (4, 2)) as target:
        target.append(np.zeros((3, 2), np.float32))


def _wide(writer: Writer) -> None:
    with writer.tensor("a", "f32", (None, 2)) as target:
        target.append(np.zeros((3, 3), np.float32))


def _other_dtype(writer: Writer) -> None:
    with writer.tensor("a", "f32", (None, 2)) as target:
        target.append(np.zeros((3, 2)))


def _nested(writer: Writer) -> None:
    with writer.tensor("a", "f32", (None, 2)):
        writer.add("b", np.zeros(3))


def _interrupted(writer: Writer) -> None:
    writer.add("a", np.zeros(3))
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (_twice, ArtifactError, "two tensors are called 'a'"),
        (_short, ArtifactError, r"3 rows were written, its shape \[4, 2\] has 4"),
        (_wide, ArtifactError, r"rows of shape \[3, 3\], expected \[any, 2\]"),
        (_other_dtype, ArtifactError, "f64 rows for a tensor of f32"),
        (_nested, ArtifactError, "'b' begun while 'a'"),
        (_interrupted, KeyboardInterrupt, None),
        (lambda w: w.add("a", np.zeros(3, complex)), ArtifactError, "no dtype for complex128"),
        (lambda w: w.add("", np.zeros(3)), ArtifactError, "name"),
        (lambda w: w.add("a", np.zeros((1,) * 9)), ArtifactError, "at most 8"),
        (lambda w: w.attributes.update(x=float("nan")), ArtifactError, "cannot be written as JSON"),
        (lambda w: w.attributes.update(x=object()), ArtifactError, "cannot be written as JSON"),
    ],
)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, body: Callable[[Writer], None], error: type[BaseException], message: str | None
) -> None:
    path = tmp_path / "a.kdtr"
    save(path, {"old": np.arange(3)})
    before = path.read_bytes()
    with pytest.raises(error, match=message), Writer(path) as writer:
        body(writer)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.kdtr"]


def test_an_unwritable_place_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written: No such file or directory"):
        save(tmp_path / "absent" / "a.kdtr", {})


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        save(tmp_path / "a.kdtr", {"w": np.zeros(3)})
    assert os.listdir(tmp_path) == []


def test_readers_never_see_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.kdtr"
    save(path, {"w": np.zeros(1000)})
    old = Reader(path)
    with Writer(path) as writer:
        writer.add("w", np.ones(1000))
        assert Reader(path)["w"][0] == 0
    assert Reader(path)["w"][0] == 1
    assert old["w"][999] == 0
