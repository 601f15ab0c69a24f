"""Where a model's tensors lie: arrays in memory, a KDTR file, or a directory of safetensors files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt

from kdgen.dtypes import dtype_name
from kdgen.engine.inventory import TensorType, summary
from kdgen.errors import ArtifactError, LaunchError, ToolchainError
from kdgen.kdtr.reader import Reader

Array = npt.NDArray[Any]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class TensorSource(Protocol):
    """Where tensors come from."""

    attributes: dict[str, Any]
    types: dict[str, TensorType]

    def read(self, name: str) -> Array:
        """A tensor's contents."""

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Entries start … stop − 1 of a tensor's first extent, without reading the others."""

    def close(self) -> None:
        """Let go of files."""


class Memory:
    """Arrays by name."""

    def __init__(self, tensors: Mapping[str, Array]):
        self.attributes: dict[str, Any] = {}
        self._tensors = tensors
        self.types = {name: type_of_array(array) for name, array in tensors.items()}

    def read(self, name: str) -> Array:
        """A tensor's contents."""
        return self._tensors[name][...]

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Some of a tensor's rows."""
        found: Array = self._tensors[name][start:stop]
        return found

    def close(self) -> None:
        """Nothing to let go of."""


class KdtrFile:
    """The tensors of a KDTR file; ArtifactError as in `Reader`."""

    def __init__(self, path: Path):
        self._reader = Reader(path)
        self.attributes = self._reader.attributes
        self.types = {tensor.name: TensorType(tensor.dtype, tensor.shape) for tensor in self._reader.tensors.values()}

    def read(self, name: str) -> Array:
        """A view of a tensor."""
        return self._reader[name]

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """A view of some of a tensor's rows."""
        found: Array = self._reader[name][start:stop]
        return found

    def close(self) -> None:
        """Unmap the file when no views are left."""
        self._reader.close()


class SafetensorsDirectory:
    """The tensors of a directory's safetensors files; ArtifactError when a file or the index is unusable."""

    def __init__(self, directory: Path):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ToolchainError("reading Hugging Face checkpoints needs the package safetensors: pip install safetensors") from error
        self.attributes: dict[str, Any] = {}
        self.types: dict[str, TensorType] = {}
        self._place: dict[str, tuple[Path, Any]] = {}
        self._open = ExitStack()
        self._safe_open = safe_open
        with ExitStack() as undo:
            undo.callback(self._open.close)
            self._read_headers(directory)
            undo.pop_all()

    def _read_headers(self, directory: Path) -> None:
        single, index = directory / _SINGLE, directory / _INDEX
        if single.exists():
            self._add(single, None)
            return
        if not index.exists():
            raise ArtifactError(f"{directory}: has neither {_SINGLE} nor {_INDEX}")
        problems: list[str] = []
        for file, names in _shards(index).items():
            try:
                problems += self._add(directory / file, names)
            except ArtifactError as error:
                problems.append(str(error))
        if problems:
            raise ArtifactError(summary(str(index), problems))

    def _add(self, file: Path, names: set[str] | None) -> list[str]:
        """Take a file's tensors, which must be those that the index promises; returns what is wrong."""
        try:
            if not file.is_file():
                raise ArtifactError(f"{file}: is missing" if not file.exists() else f"{file}: is no file")
            handle = self._open.enter_context(self._safe_open(str(file), framework="numpy"))
            found = {name: _type_of_slice(handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
        except ArtifactError:
            raise
        except Exception as error:  # the library's own class, OSError, and what its bindings raise
            raise ArtifactError(f"{file}: truncated, damaged or unreadable: {error}") from error
        problems = []
        if names is not None:
            problems += [f"{file}: has no tensor '{name}', which the index says it has" for name in sorted(names - found.keys())]
            problems += [f"{file}: has a tensor '{name}' that the index does not name" for name in sorted(found.keys() - names)]
        self.types |= found
        self._place |= dict.fromkeys(found, (file, handle))
        return problems

    def read(self, name: str) -> Array:
        """A tensor, copied out of its file."""
        file, handle = self._place[name]
        with _reading(file, name):
            found: Array = handle.get_tensor(name)
        return found

    def read_rows(self, name: str, start: int, stop: int) -> Array:
        """Some of a tensor's rows, copied out of its file."""
        file, handle = self._place[name]
        with _reading(file, name):
            found: Array = handle.get_slice(name)[start:stop]
        return found

    def close(self) -> None:
        """Close the files."""
        self._place.clear()
        self._open.close()


@contextlib.contextmanager
def _reading(file: Path, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # as in `_add`
        raise ArtifactError(f"{file}: tensor '{name}' cannot be read: {error}") from error


def _shards(index: Path) -> dict[str, set[str]]:
    """The names of the tensors of every file that an index names."""
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{index}: cannot be read as JSON: {error}") from error
    mapping = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(file, str) for file in mapping.values()):
        raise ArtifactError(f"{index}: weight_map must be an object from tensor names to file names")
    shards: dict[str, set[str]] = {}
    for name, file in mapping.items():
        # An index may not lead out of its directory.
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ArtifactError(f"{index}: weight_map: '{name}' is in '{file[:100]}'; allowed: a .safetensors file beside the index")
        shards.setdefault(file, set()).add(name)
    return shards


_DTYPES = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "I64": "i64", "I32": "i32", "I16": "i16", "I8": "i8", "U64": "u64",
    "U32": "u32", "U16": "u16", "U8": "u8",
}  # fmt: skip


def _type_of_slice(header: Any) -> TensorType:
    dtype = header.get_dtype()
    return TensorType(_DTYPES.get(dtype, dtype), tuple(header.get_shape()))


def type_of_array(array: Array) -> TensorType:
    """Dtype and shape of an array; a dtype that kdgen does not know has numpy's name."""
    try:
        return TensorType(dtype_name(array.dtype), array.shape)
    except LaunchError:
        return TensorType(str(array.dtype), array.shape)
