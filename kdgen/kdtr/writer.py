"""Writing KDTR files, tensor by tensor, so that a file may be far larger than memory."""

from __future__ import annotations

import contextlib
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import dtype_name
from kdgen.errors import ArtifactError, LaunchError
from kdgen.expressions import round_up
from kdgen.kdtr import format as kdtr

_CHUNK_BYTES = 16 << 20


def save(path: str | os.PathLike[str], tensors: Mapping[str, npt.ArrayLike], attributes: Mapping[str, Any] | None = None) -> None:
    """Write a file in one go, in the order of `tensors`; errors as in `Writer`."""
    with Writer(path, attributes) as writer:
        for name, values in tensors.items():
            writer.add(name, values)


class Writer:
    """Writes a file under a temporary name, which becomes `path` when the `with` block ends well, and vanishes when it does not.

    Args:
        path: the file to make or replace.
        attributes: a JSON object; `writer.attributes` may be changed until the end.
        alignment: of every tensor: 64, or 4096 for pages.

    Raises:
        ArtifactError: a name is used twice, a dtype has no code, the disk is full or read-only.
    """

    def __init__(self, path: str | os.PathLike[str], attributes: Mapping[str, Any] | None = None, alignment: int = 64):
        if alignment not in kdtr.ALIGNMENTS:
            raise ArtifactError(f"alignment {alignment}; allowed: powers of two from {kdtr.ALIGNMENTS[0]} to {kdtr.ALIGNMENTS[-1]}")
        self.path = Path(path)
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.alignment = alignment
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")
        self._tensors: dict[str, kdtr.Tensor] = {}
        self._open: TensorWriter | None = None
        self._end = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        with self._disk():
            self._file = open(self._temporary, "xb", buffering=0)
        self.write(kdtr.pack_header(self.alignment))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
            with contextlib.suppress(OSError):
                self._temporary.unlink()

    def add(self, name: str, values: npt.ArrayLike, *, int4: bool = False) -> None:
        """Write a tensor.

        Args:
            name: unique in the file.
            values: its contents; for `int4` the packed i32 words.
            int4: `values` are words of eight 4-bit integers (`pack_int4`); the recorded shape is the logical one.
        """
        found = np.asarray(values)
        if not found.dtype.isnative:
            found = found.astype(found.dtype.newbyteorder("="))
        dtype = _dtype_of(name, found)
        if int4:
            if dtype not in ("i32", "u32") or not found.ndim:
                raise ArtifactError(f"tensor '{name}': int4 is given as i32 words, got {dtype} {list(found.shape)}")
            with self.tensor(name, "int4", (*found.shape[:-1], found.shape[-1] * kdtr.INT4_PER_WORD)) as target:
                target.append(found)
            return
        with self.tensor(name, dtype, found.shape) as target:
            target.append(found)

    @contextmanager
    def tensor(self, name: str, dtype: str, shape: Sequence[int | None]) -> Iterator[TensorWriter]:
        """Write a tensor in chunks of rows: `with writer.tensor("w", "bf16", (None, 64)) as w: w.append(rows)`.

        Args:
            name: unique in the file.
            dtype: kdgen name, or `int4`.
            shape: extents; a first one of None is counted.
        """
        self._begin(name)
        self._open = target = TensorWriter(self, name, dtype, tuple(shape), self._end)
        try:
            yield target
            self._tensors[name] = target.finish()
        finally:
            self._open = None

    def _begin(self, name: str) -> None:
        if self._open is not None:
            raise ArtifactError(f"{self.path}: tensor '{name}' begun while '{self._open.name}' is being written")
        if name in self._tensors:
            raise ArtifactError(f"{self.path}: two tensors are called '{name}'")
        if not 1 <= len(name.encode("utf-8", "surrogatepass")) <= 0xFFFF:
            raise ArtifactError(f"{self.path}: a tensor's name has 1 to 65,535 bytes")
        self._pad(self.alignment)

    def _pad(self, alignment: int) -> None:
        self.write(bytes(round_up(self._end, alignment) - self._end))

    def write(self, data: Any) -> None:
        """Append bytes to the file."""
        view = memoryview(data).cast("B")
        file = self._file
        if file is None:
            raise ArtifactError(f"{self.path}: the writer is not open; use it in a `with` block")
        with self._disk():
            while view.nbytes:
                count = file.write(view)
                self._end += count
                view = view[count:]

    def _finish(self) -> None:
        self._pad(64)
        start = self._end
        try:
            index = kdtr.pack_index(list(self._tensors.values()), self.attributes)
        except (ArtifactError, UnicodeEncodeError) as error:
            raise ArtifactError(f"{self.path}: {error}") from error
        self.write(index)
        size = self._end + kdtr.EDGE_BYTES
        self.write(kdtr.pack_trailer(kdtr.Trailer(start, len(index), size, len(self._tensors), zlib.crc32(index))))
        with self._disk():
            if self._file is not None:
                os.fsync(self._file.fileno())
            os.replace(self._temporary, self.path)
            # The name is on the disk once its directory is.
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be written: {error.strerror or error}") from error


class TensorWriter:
    """One tensor being written.

    Attributes:
        name: its name.
        dtype: kdgen name, or `int4`.
    """

    def __init__(self, writer: Writer, name: str, dtype: str, shape: tuple[int | None, ...], offset: int):
        self.name = name
        self.dtype = dtype
        self._writer = writer
        self._offset = offset
        self._crc = self._bytes = self._rows = 0
        if any(extent is None for extent in shape[1:]):
            raise ArtifactError(f"tensor '{name}': only the first extent can be left open, got {list(shape)}")
        try:
            kdtr.tensor_bytes(dtype, tuple(extent or 0 for extent in shape))
        except ArtifactError as error:
            raise ArtifactError(f"tensor '{name}': {error}") from error
        self._shape = shape
        # An int4 tensor is stored as words, eight columns to a word.
        self._stored = tuple(shape)
        if dtype == "int4" and shape[-1] is not None:
            self._stored = (*shape[:-1], shape[-1] // kdtr.INT4_PER_WORD)

    def append(self, rows: npt.ArrayLike) -> None:
        """Append rows.

        Args:
            rows: of shape [any, *rest of the shape] and of the tensor's dtype; for int4 words, i32 [any, …, K/8].

        Raises:
            ArtifactError: another shape or dtype; the disk is full.
        """
        found = np.asarray(rows)
        given = _dtype_of(self.name, found)
        if given not in (("i32", "u32") if self.dtype == "int4" else (self.dtype,)):
            expected = "int4 (as i32 words)" if self.dtype == "int4" else self.dtype
            raise ArtifactError(f"tensor '{self.name}': {given} rows for a tensor of {expected}")
        if found.ndim != len(self._stored) or found.shape[1:] != self._stored[1:]:
            expected = f"[any{''.join(f', {extent}' for extent in self._stored[1:])}]" if self._stored else "no dimensions"
            raise ArtifactError(f"tensor '{self.name}': rows of shape {list(found.shape)}, expected {expected}")
        self._rows += found.shape[0] if found.ndim else 1
        # In chunks, so that a strided or mapped array is never copied as a whole.
        parts = [found] if found.flags.c_contiguous else np.array_split(found, -(-found.nbytes // _CHUNK_BYTES) or 1)
        for part in parts:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for at in range(0, data.nbytes, _CHUNK_BYTES):
                piece = data[at : at + _CHUNK_BYTES]
                self._crc = zlib.crc32(piece.data, self._crc)
                self._writer.write(piece)
                self._bytes += piece.nbytes

    def finish(self) -> kdtr.Tensor:
        """The tensor's entry; ArtifactError when rows are missing or too many."""
        wanted = self._stored[0] if self._stored else 1
        if wanted is not None and self._rows != wanted:
            raise ArtifactError(f"tensor '{self.name}': {self._rows} rows were written, its shape {list(self._shape)} has {wanted}")
        shape = tuple(self._rows if extent is None else extent for extent in self._shape)
        if self.dtype == "int4" and self._shape[-1] is None:
            shape = (self._rows * kdtr.INT4_PER_WORD,)
        return kdtr.Tensor(self.name, self.dtype, shape, self._offset, self._bytes, self._crc)


def _dtype_of(name: str, values: npt.NDArray[Any]) -> str:
    try:
        return dtype_name(values.dtype)
    except LaunchError as error:
        allowed = ", ".join(kdtr.CODES)
        raise ArtifactError(f"tensor '{name}': a KDTR file has no dtype for {values.dtype}; allowed: {allowed}") from error
