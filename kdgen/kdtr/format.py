"""The bytes of KDTR's header, index and trailer, both ways. The format itself is in the package's docstring."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kdgen.contract import DTYPE_BYTES
from kdgen.errors import ArtifactError
from kdgen.expressions import round_up

VERSION = 1
MAGIC = b"KDTR\r\n\x1a\n"
END_MAGIC = b"KDTRend\n"
EDGE_BYTES = 64  # of the header, and of the trailer
ALIGNMENTS = tuple(1 << power for power in range(6, 21))
MAX_RANK = 8
INT4_PER_WORD = 8

CODES: dict[str, int] = {
    "f64": 1, "f32": 2, "f16": 3, "bf16": 4, "i64": 5, "i32": 6, "i16": 7, "i8": 8, "u64": 9, "u32": 10, "u16": 11, "u8": 12, "int4": 13,
}  # fmt: skip
_NAMES = {code: name for name, code in CODES.items()}

_HEADER = struct.Struct("<8sIII40sI")
_TRAILER = struct.Struct("<8sQQQII20sI")
_ENTRY = struct.Struct("<QQIHBB")
_LARGEST = 1 << 62  # bytes; beyond it, 64-bit arithmetic on offsets could overflow


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        name: unique in the file.
        dtype: kdgen name, or `int4`.
        shape: logical extents.
        offset, bytes: where its contents are.
        crc: CRC-32 of its contents.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    crc: int


@dataclass(frozen=True)
class Trailer:
    """Where the index is."""

    index_offset: int
    index_bytes: int
    file_bytes: int
    tensors: int
    index_crc: int


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of a tensor; ArtifactError for an unknown dtype, too many dimensions, or an int4 row that fills no whole words."""
    if dtype not in CODES:
        raise ArtifactError(f"unknown dtype '{dtype}'; allowed: {', '.join(CODES)}")
    if len(shape) > MAX_RANK:
        raise ArtifactError(f"{len(shape)} dimensions; at most {MAX_RANK} are allowed")
    if min(shape, default=0) < 0:
        raise ArtifactError(f"shape {list(shape)}: extents are at least 0")
    count = math.prod(shape)
    if dtype == "int4":
        if not shape or shape[-1] % INT4_PER_WORD:
            raise ArtifactError(f"int4 of shape {list(shape)}: the last extent must be a multiple of {INT4_PER_WORD}")
        return count // 2
    return count * DTYPE_BYTES[dtype]


def pack_header(alignment: int) -> bytes:
    """The header."""
    head = _HEADER.pack(MAGIC, VERSION, 0, alignment, bytes(40), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def unpack_header(data: bytes, where: str) -> int:
    """The alignment; ArtifactError when the header is not one that can be read."""
    if data[: len(MAGIC)] != MAGIC:
        raise ArtifactError(f"{where}: not a KDTR file: it begins with {data[:8].hex(' ')}, not with {MAGIC.hex(' ')}")
    _, version, flags, alignment, zeros, crc = _HEADER.unpack(data)
    if zlib.crc32(data[:-4]) != crc:
        raise ArtifactError(f"{where}: the header is damaged (its CRC does not match)")
    if version > VERSION:
        raise ArtifactError(f"{where}: KDTR version {version}, made by a newer kdgen; this one reads up to {VERSION}: upgrade kdgen")
    if version < 1 or flags or any(zeros) or alignment not in ALIGNMENTS:
        raise ArtifactError(
            f"{where}: the header says version {version}, flags {flags:#x}, alignment {alignment}; "
            f"version 1 has no flags and alignments {ALIGNMENTS[0]} … {ALIGNMENTS[-1]}"
        )
    return int(alignment)


def pack_trailer(trailer: Trailer) -> bytes:
    """The trailer."""
    fields = (trailer.index_offset, trailer.index_bytes, trailer.file_bytes, trailer.tensors, trailer.index_crc)
    tail = _TRAILER.pack(END_MAGIC, *fields, bytes(20), 0)[:-4]
    return tail + struct.pack("<I", zlib.crc32(tail))


def unpack_trailer(data: bytes, file_bytes: int, where: str) -> Trailer:
    """The trailer; ArtifactError when it is none, or speaks of another file size."""
    if data[: len(END_MAGIC)] != END_MAGIC:
        raise ArtifactError(f"{where}: truncated: its {file_bytes:,} bytes do not end with a trailer; copy or write it again")
    _, index_offset, index_bytes, size, tensors, index_crc, zeros, crc = _TRAILER.unpack(data)
    if zlib.crc32(data[:-4]) != crc or any(zeros):
        raise ArtifactError(f"{where}: the trailer is damaged (its CRC does not match)")
    if size != file_bytes:
        raise ArtifactError(f"{where}: the file has {file_bytes:,} bytes, its trailer says {size:,}: truncated, or data was inserted")
    if index_offset < EDGE_BYTES or index_offset % 64 or index_offset + index_bytes != file_bytes - EDGE_BYTES:
        place = f"{index_bytes:,} bytes at {index_offset:,}"
        raise ArtifactError(f"{where}: the index ({place}) does not end where the trailer begins ({file_bytes - EDGE_BYTES:,})")
    return Trailer(index_offset, index_bytes, size, tensors, index_crc)


def pack_index(tensors: Sequence[Tensor], attributes: Mapping[str, Any]) -> bytes:
    """The index.

    Raises:
        ArtifactError: the attributes are not JSON, or a name is too long.
    """
    parts: list[bytes] = []
    for tensor in tensors:
        name = tensor.name.encode()
        entry = _ENTRY.pack(tensor.offset, tensor.bytes, tensor.crc, len(name), CODES[tensor.dtype], len(tensor.shape))
        parts.append(_padded(entry + struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape) + name))
    try:
        text = json.dumps(attributes, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"the attributes cannot be written as JSON: {error}") from error
    parts.append(_padded(struct.pack("<Q", len(text)) + text))
    return b"".join(parts)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def unpack_index(data: bytes, trailer: Trailer, alignment: int, where: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors and attributes, checked against each other and the file.

    Raises:
        ArtifactError: damaged, or it describes tensors that cannot be.
    """
    if zlib.crc32(data) != trailer.index_crc:
        raise ArtifactError(f"{where}: the index is damaged (its CRC does not match)")
    tensors: list[Tensor] = []
    at = 0
    try:
        for number in range(trailer.tensors):
            tensor, at = _entry(data, at, f"{where}: tensor {number}")
            tensors.append(tensor)
        (length,) = struct.unpack_from("<Q", data, at)
        at += 8
        if at + length > len(data) or at + length + -(at + length) % 8 != len(data) or any(data[at + length :]):
            raise ArtifactError(f"{where}: the attributes ({length:,} bytes) do not end where the index ends")
        attributes = json.loads(data[at : at + length])
    except struct.error as error:
        raise ArtifactError(f"{where}: the index ends within entry {len(tensors)} of {trailer.tensors}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: the attributes are not JSON: {error}") from error
    if not isinstance(attributes, dict):
        raise ArtifactError(f"{where}: the attributes are no JSON object")
    check_layout(tensors, trailer, alignment, where)
    return tensors, attributes


def _entry(data: bytes, at: int, where: str) -> tuple[Tensor, int]:
    offset, size, crc, name_bytes, code, rank = _ENTRY.unpack_from(data, at)
    if rank > MAX_RANK:
        raise ArtifactError(f"{where}: {rank} dimensions; at most {MAX_RANK} are allowed")
    shape = struct.unpack_from(f"<{rank}Q", data, at + _ENTRY.size)
    start = at + _ENTRY.size + 8 * rank
    end = start + name_bytes
    after = round_up(end, 8)
    if after > len(data) or any(data[end:after]):
        raise ArtifactError(f"{where}: its entry runs out of the index")
    try:
        name = data[start:end].decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{where}: its name is not UTF-8") from error
    if not name:
        raise ArtifactError(f"{where}: it has no name")
    where = f"{where} ('{name}')"
    if code not in _NAMES:
        raise ArtifactError(f"{where}: unknown dtype code {code}; upgrade kdgen")
    if math.prod(shape) >= _LARGEST or max(shape, default=0) >= _LARGEST:
        raise ArtifactError(f"{where}: absurd shape {list(shape)}")
    try:
        expected = tensor_bytes(_NAMES[code], shape)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {error}") from error
    if size != expected:
        raise ArtifactError(f"{where}: {size:,} bytes, but {_NAMES[code]} {list(shape)} has {expected:,}")
    return Tensor(name, _NAMES[code], tuple(shape), offset, size, crc), after


def check_layout(tensors: Sequence[Tensor], trailer: Trailer, alignment: int, where: str) -> None:
    """ArtifactError unless names are unique and every tensor lies exactly where the format puts it."""
    seen: set[str] = set()
    end, before = EDGE_BYTES, "the header"
    for tensor in tensors:
        if tensor.name in seen:
            raise ArtifactError(f"{where}: two tensors are called '{tensor.name}'")
        seen.add(tensor.name)
        place = f"{where}: tensor '{tensor.name}' ({tensor.bytes:,} bytes at {tensor.offset:,})"
        if tensor.offset < end:
            raise ArtifactError(f"{place} overlaps {before}, which ends at {end:,}")
        if tensor.offset + tensor.bytes > trailer.index_offset:
            raise ArtifactError(f"{place} reaches beyond the data, which end at {trailer.index_offset:,}")
        if tensor.offset != round_up(end, alignment):
            raise ArtifactError(f"{place} should begin at {round_up(end, alignment):,}, the next multiple of {alignment}")
        end, before = tensor.offset + tensor.bytes, f"tensor '{tensor.name}'"
    if trailer.index_offset != round_up(end, 64):
        raise ArtifactError(f"{where}: the index begins at {trailer.index_offset:,}, the data end at {end:,}")


def gaps(tensors: Sequence[Tensor], trailer: Trailer) -> Iterator[tuple[int, int]]:
    """(start, end) of the padding between header, tensors and index."""
    end = EDGE_BYTES
    for tensor in tensors:
        yield end, tensor.offset
        end = tensor.offset + tensor.bytes
    yield end, trailer.index_offset
