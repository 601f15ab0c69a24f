"""Reading KDTR files: the index when a file is opened, contents through the mapped memory when they are used."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.errors import ArtifactError
from kdgen.kdtr.format import (
    EDGE_BYTES,
    INT4_PER_WORD,
    Tensor,
    Trailer,
    gaps,
    unpack_header,
    unpack_index,
    unpack_trailer,
)  # fmt: skip

_CHUNK_BYTES = 16 << 20


class Reader(Mapping[str, npt.NDArray[Any]]):
    """A file, as a mapping from tensor names to read-only views of its contents, in the order of the file.

    bf16 tensors are arrays of `ml_dtypes.bfloat16`; int4 tensors are their i32 words (`unpack_int4` gives the values). Views stay
    valid after the reader is closed. The file must not be shortened or overwritten in place while views of it are used; replacing it
    (as `Writer` does) is safe.

    Args:
        path: the file.

    Raises:
        ArtifactError: missing, truncated, damaged in header, index or trailer, or made by a newer kdgen. Contents are checked by `check`.

    Attributes:
        path: the file.
        attributes: the JSON object that was stored with it.
        tensors: entries by name.
        alignment: of every tensor.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        where = str(self.path)
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 2 * EDGE_BYTES:
                    raise ArtifactError(f"{where}: {size} bytes; a KDTR file has at least {2 * EDGE_BYTES}: truncated, or none at all")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArtifactError(f"{where}: cannot be read: {error.strerror or error}") from error
        self.alignment = unpack_header(self._map[:EDGE_BYTES], where)
        self._trailer: Trailer = unpack_trailer(self._map[len(self._map) - EDGE_BYTES :], len(self._map), where)
        index = self._map[self._trailer.index_offset : self._trailer.index_offset + self._trailer.index_bytes]
        tensors, attributes = unpack_index(index, self._trailer, self.alignment, where)
        self.tensors: dict[str, Tensor] = {tensor.name: tensor for tensor in tensors}
        self.attributes: dict[str, Any] = attributes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file, or let the last view do so."""
        # A map with living views cannot be closed by hand.
        with contextlib.suppress(BufferError):
            self._map.close()

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        tensor = self.entry(name)
        dtype = numpy_dtype("i32" if tensor.dtype == "int4" else tensor.dtype)
        shape = tensor.shape
        if tensor.dtype == "int4":
            shape = (*shape[:-1], shape[-1] // INT4_PER_WORD)
        if not tensor.bytes:
            return _frozen(np.empty(shape, dtype))
        return np.frombuffer(self._map, dtype, tensor.bytes // dtype.itemsize, tensor.offset).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def entry(self, name: str) -> Tensor:
        """The entry of a tensor; ArtifactError (also a KeyError) when there is none of that name."""
        if name not in self.tensors:
            raise MissingTensorError(f"{self.path}: no tensor '{name}'; it has {_some(list(self.tensors))}")
        return self.tensors[name]

    def array(self, name: str, dtype: str, shape: Sequence[int | None]) -> npt.NDArray[Any]:
        """A tensor that must be of a certain kind.

        Args:
            name: of the tensor.
            dtype: kdgen name, or `int4`.
            shape: logical extents; None for any.

        Raises:
            ArtifactError: there is none, or it has another dtype or shape.
        """
        tensor = self.entry(name)
        fits = len(tensor.shape) == len(shape) and all(want is None or got == want for got, want in zip(tensor.shape, shape, strict=True))
        if tensor.dtype != dtype or not fits:
            wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
            raise ArtifactError(f"{self.path}: tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, expected {dtype} [{wanted}]")
        return self[name]

    def check(self) -> None:
        """Read everything and compare the checksums; ArtifactError naming the first damaged part."""
        for fault in self.faults():
            raise ArtifactError(fault)

    def faults(self) -> Iterator[str]:
        """Read everything; yields a line for each damaged part."""
        with memoryview(self._map) as memory:
            for tensor in self.tensors.values():
                crc = 0
                for start in range(tensor.offset, tensor.offset + tensor.bytes, _CHUNK_BYTES):
                    with memory[start : min(start + _CHUNK_BYTES, tensor.offset + tensor.bytes)] as piece:
                        crc = zlib.crc32(piece, crc)
                if crc != tensor.crc:
                    yield f"{self.path}: tensor '{tensor.name}' is damaged: CRC {crc:#010x}, the index says {tensor.crc:#010x}"
            for start, end in gaps(list(self.tensors.values()), self._trailer):
                if any(memory[start:end]):
                    yield f"{self.path}: the padding at {start:,} … {end:,} is not zero"

    def __repr__(self) -> str:
        return f"<KDTR {self.path}: {len(self)} tensors>"


class MissingTensorError(ArtifactError, KeyError):
    """A file has no tensor of that name."""

    __str__ = Exception.__str__


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
