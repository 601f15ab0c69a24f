"""Models with random weights, the same bits on every machine, and writing models in both formats.

A tensor's values follow from the seed and the tensor's name alone. Philox, keyed by a hash of the two, gives 64-bit words; the sum of a
word's four 16-bit parts less 131,070 is an integer of 18 bits, close to normal, which is multiplied by a float32. Nothing in it depends
on a library's way of making normal numbers, and one rounding makes each value.

Scales keep a token's values of order one throughout: matrices have variance gain² / inputs. The head's gain spreads logits, the router's
bias moves choices, and norms' weights are around one, so that no factor can be forgotten unnoticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.dtypes import numpy_dtype
from kdgen.engine.config import ModelConfig
from kdgen.engine.inventory import TensorType, expected, expected_experts, faults, summary
from kdgen.engine.tensor_source import type_of_array
from kdgen.errors import ArtifactError, ToolchainError
from kdgen.kdtr import Writer
from kdgen.weights.int4 import Int4Weight

Array = npt.NDArray[Any]

#: Largest size of a file of a directory that is written, in bytes.
SHARD_BYTES = 4 << 30

#: Standard deviation of the integers: four uniform ones below 2¹⁶.
_SPREAD = math.sqrt((65536**2 - 1) / 3)
_MIDDLE = 2 * 65535

#: Of each kind of matrix; one for those not named.
_GAINS = {"lm_head": 3.0, "o_proj": 0.7, "down_proj": 1.4, "q_b_proj": 1.5, "gate": 1.5}


def random_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Array]]:
    """All tensors of a checkpoint, experts on their own and packed if the model is quantized.

    Args:
        config: of the model.
        seed: any integer; other seeds give other values everywhere.

    Yields:
        (Hugging Face's name with the wrapper's prefix, array). Norms are around 1, the router's bias around 0.
    """
    for layer, wanted in _by_layer(config):
        for name, want in wanted.items():
            yield config.prefix + name, _tensor(config, seed, name, want.shape, want.dtypes[0])
        if layer is not None:
            yield from _experts(config, seed, layer)


def _by_layer(config: ModelConfig) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """The tensors in the order of the computation, so that each shard of a directory holds neighbours."""
    groups: dict[str, dict[str, Any]] = {}
    for name, want in expected(config).items():
        parts = name.split(".")
        groups.setdefault(parts[2] if parts[1] == "layers" else parts[0] + parts[1], {})[name] = want
    for key, wanted in groups.items():
        yield (int(key) if key.isdigit() and int(key) >= config.model.dense_layers else None), wanted


def _experts(config: ModelConfig, seed: int, layer: int) -> Iterator[tuple[str, Array]]:
    for name, want in expected_experts(config, layer).items():
        if name.endswith(".weight"):
            yield config.prefix + name, _tensor(config, seed, name, want.shape, want.dtypes[0])
        elif name.endswith(".weight_packed"):
            rows, words = want.shape
            stem = name.removesuffix("_packed")
            weight = Int4Weight.quantize(_tensor(config, seed, stem, (rows, words * 8), "f32"))
            for part, array in weight.tensors().items():
                yield f"{config.prefix}{stem.removesuffix('weight')}{part}", array


def _tensor(config: ModelConfig, seed: int, name: str, shape: tuple[int, ...], dtype: str) -> Array:
    parts = name.split(".")
    kind = parts[-2] if parts[-1] == "weight" else parts[-1]
    if kind == "e_score_correction_bias":
        return normal(seed, name, shape, 0.1).astype(numpy_dtype(dtype))
    if len(shape) == 1:
        return (np.float32(1) + normal(seed, name, shape, 0.1)).astype(numpy_dtype(dtype))
    if kind == "embed_tokens":
        # A tied table is the head as well, where smaller values keep the logits apart but small.
        return normal(seed, name, shape, 1.0 if not config.tie_word_embeddings else 3 / math.sqrt(shape[1])).astype(numpy_dtype(dtype))
    return normal(seed, name, shape, _GAINS.get(kind, 1.0) / math.sqrt(shape[1])).astype(numpy_dtype(dtype))


def normal(seed: int, name: str, shape: tuple[int, ...], deviation: float) -> npt.NDArray[np.float32]:
    """Nearly normal float32 values, at most 3.5 deviations from 0, that depend on the arguments alone."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    words: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(math.prod(shape))
    sums = words.astype("<u8", copy=False).view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32) - np.int32(_MIDDLE)
    values: npt.NDArray[np.float32] = sums.astype(np.float32) * np.float32(deviation / _SPREAD)
    return values.reshape(shape)


class _Inventory:
    """Remembers what is written, so that no file is left that could not be opened."""

    def __init__(self, where: str, config: ModelConfig):
        self._where, self._config = where, config
        self._types: dict[str, TensorType] = {}

    def take(self, name: str, array: Array) -> None:
        """A tensor that is written; ArtifactError for a name that was there already or lacks the prefix."""
        prefix = self._config.prefix
        if not name.startswith(prefix) or name.removeprefix(prefix) in self._types:
            problem = f"lacks the prefix '{prefix}'" if not name.startswith(prefix) else "is given twice"
            raise ArtifactError(f"{self._where}: tensor '{name}' {problem}")
        self._types[name.removeprefix(prefix)] = type_of_array(array)

    def check(self) -> None:
        """ArtifactError naming what is missing, unexpected, or of another dtype or shape."""
        if found := list(faults(self._config, self._types)):
            raise ArtifactError(summary(self._where, found))


def write_kdtr(
    path: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Iterable[tuple[str, Array]],
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as one KDTR file, tensor by tensor.

    Args:
        path: the file to make or replace.
        config: of the model; its config.json becomes the attribute `config`.
        tensors: names with the wrapper's prefix, and arrays, as of `random_tensors`.
        attributes: others; what they mean is the caller's.

    Raises:
        ArtifactError: the tensors are not the configuration's, `attributes` has `config`, or the disk refuses. There is no file then.
    """
    if "config" in (attributes or {}):
        raise ArtifactError(f"{path}: the attribute 'config' is the model's configuration; choose another name")
    inventory = _Inventory(str(path), config)
    with Writer(path, {"config": config.to_hf(), **(attributes or {})}) as writer:
        for name, array in tensors:
            inventory.take(name, array)
            writer.add(name, array)
        inventory.check()


def write_hf(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    tensors: Iterable[tuple[str, Array]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as Hugging Face's directory: config.json, and one file, or several with an index.

    Args:
        directory: to make; it must not exist, or be empty. It gets its name when everything is written.
        config: of the model.
        tensors: names with the wrapper's prefix, and arrays, as of `random_tensors`.
        shard_bytes: largest size of a file's tensors; a larger tensor has a file of its own. As much memory is used.

    Raises:
        ArtifactError: the tensors are not the configuration's, the directory has files, or the disk refuses. Nothing is left then.
        ToolchainError: the package `safetensors` is missing.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ToolchainError("writing Hugging Face checkpoints needs the package safetensors: pip install safetensors") from error
    target = Path(directory)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    inventory = _Inventory(str(target), config)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ArtifactError(f"{target}: exists and is no empty directory; remove it, or choose another")
        temporary.mkdir()
        places: list[list[str]] = []
        total = 0
        for shard in _shards(tensors, inventory, shard_bytes):
            save_file(shard, temporary / f"part-{len(places)}", metadata={"format": "pt"})
            places.append(list(shard))
            total += sum(array.nbytes for array in shard.values())
        inventory.check()
        names = (
            [f"model-{i + 1:05}-of-{len(places):05}.safetensors" for i in range(len(places))] if len(places) > 1 else ["model.safetensors"]
        )
        for i, name in enumerate(names):
            (temporary / f"part-{i}").rename(temporary / name)
        if len(places) > 1:
            weight_map = {tensor: name for name, shard_names in zip(names, places, strict=True) for tensor in shard_names}
            _write_json(temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(temporary / "config.json", config.to_hf())
        for file in temporary.iterdir():
            _sync(file)
        os.replace(temporary, target)
        _sync(target.parent)
    except OSError as error:
        raise ArtifactError(f"{target}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)


def _shards(tensors: Iterable[tuple[str, Array]], inventory: _Inventory, limit: int) -> Iterator[dict[str, Array]]:
    """Runs of tensors of at most so many bytes."""
    shard: dict[str, Array] = {}
    size = 0
    for name, array in tensors:
        inventory.take(name, array)
        if shard and size + array.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = np.ascontiguousarray(array)
        size += array.nbytes
    if shard:
        yield shard


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
