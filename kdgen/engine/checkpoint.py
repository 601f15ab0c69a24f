"""Opening a model: a Hugging Face directory, a KDTR file, or arrays in memory.

    with open_checkpoint("Kimi-K2.6") as checkpoint:
        checkpoint.tensor("model.layers.0.self_attn.q_a_proj.weight")
        checkpoint.expert(1, 17, "down_proj")

A directory has config.json and either model.safetensors or model.safetensors.index.json with the files it names. A KDTR file has the
contents of config.json as the attribute `config`, and the same tensors under the same names.

Opening reads headers alone and compares every tensor with the configuration. Contents are read when they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from kdgen.engine.config import ModelConfig
from kdgen.engine.inventory import MATRICES, TensorType, expert_name, faults, fused_name, skipped, summary
from kdgen.engine.tensor_source import KdtrFile, Memory, SafetensorsDirectory, TensorSource
from kdgen.errors import ArtifactError
from kdgen.kdtr.reader import MissingTensorError
from kdgen.weights.int4 import Int4Weight

Array = npt.NDArray[Any]


def open_checkpoint(path: str | os.PathLike[str], *, latent_norm_eps: float | None = None) -> Checkpoint:
    """Open a model and check that it is complete.

    Args:
        path: a directory, or a KDTR file.
        latent_norm_eps: as in `ModelConfig.from_hf`.

    Raises:
        ArtifactError: something is missing, truncated, damaged, or differs from the configuration: all tensors concerned in one message.
        SpecError: a model that is not supported.
        ToolchainError: the package `safetensors` is missing (directories only).
    """
    path = Path(path)
    with ExitStack() as undo:
        source: TensorSource
        if path.is_dir():
            config = ModelConfig.from_hf(path, latent_norm_eps=latent_norm_eps)
            source = SafetensorsDirectory(path)
            undo.callback(source.close)
        else:
            source = KdtrFile(path)
            undo.callback(source.close)
            if not isinstance(values := source.attributes.get("config"), dict):
                raise ArtifactError(f"{path}: has no attribute 'config', the contents of a model's config.json")
            config = ModelConfig.from_mapping(values, f"{path}: config", latent_norm_eps=latent_norm_eps)
        checkpoint = Checkpoint(str(path), config, source)
        undo.pop_all()
    return checkpoint


def open_tensors(config: ModelConfig, tensors: Mapping[str, Array], where: str = "tensors") -> Checkpoint:
    """A model in memory, checked like one in a file; names as in a file, so with the wrapper's prefix if there is one."""
    return Checkpoint(where, config, Memory(tensors))


class Checkpoint:
    """A model's configuration and weights; a context manager. Made by `open_checkpoint` and `open_tensors`.

    Attributes:
        where: the file or directory, for messages.
        config: the model's.
        attributes: what a KDTR file says beside the configuration; empty for others.
        names: of all tensors that are used, without the wrapper's prefix.
    """

    def __init__(self, where: str, config: ModelConfig, source: TensorSource):
        self.where, self.config, self._source = where, config, source
        self.attributes = {key: value for key, value in source.attributes.items() if key != "config"}
        self._types = {bare: kind for name, kind in source.types.items() if not skipped(config, bare := _bare(config, name))}
        if found := list(faults(config, self._types)):
            raise ArtifactError(summary(where, found))
        self.names: tuple[str, ...] = tuple(self._types)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; arrays that were read stay valid."""
        self._source.close()

    def type_of(self, name: str) -> TensorType:
        """Dtype and shape of a tensor; ArtifactError (also a KeyError) when there is none of that name."""
        if name not in self._types:
            raise MissingTensorError(f"{self.where}: no tensor '{name}'")
        return self._types[name]

    def tensor(self, name: str) -> Array:
        """A tensor as it is stored, read-only; a tied `lm_head.weight` is the embedding's.

        Args:
            name: Hugging Face's, without the wrapper's prefix.

        Raises:
            ArtifactError: there is none (also a KeyError), or the file became unreadable.
        """
        name = self._stored_name(name)
        self.type_of(name)
        return _frozen(self._source.read(self.config.prefix + name))

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Rows start … stop − 1 of a tensor, without reading the others.

        Raises:
            ArtifactError: as in `tensor`.
            ValueError: the tensor has no such rows.
        """
        name = self._stored_name(name)
        shape = self.type_of(name).shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"{self.where}: rows {start} … {stop - 1} of tensor '{name}'; it is {list(shape)}")
        return _frozen(self._source.read_rows(self.config.prefix + name, start, stop))

    def _stored_name(self, name: str) -> str:
        return "model.embed_tokens.weight" if name == "lm_head.weight" and self.config.tie_word_embeddings else name

    def expert(self, layer: int, expert: int, matrix: str) -> Int4Weight | Array:
        """A matrix [out, in] of a routed expert, however the file stores it.

        Args:
            layer: of the model; not a dense one.
            expert: within the layer.
            matrix: `gate_proj`, `up_proj` or `down_proj`.

        Returns:
            An `Int4Weight` when the model is quantized, else an array of the model's dtype.

        Raises:
            ArtifactError: there is no such matrix (also a KeyError), or its packed form is inconsistent.
        """
        m = self.config.model
        if not (m.dense_layers <= layer < m.layers and 0 <= expert < m.experts and matrix in MATRICES):
            allowed = f"layers {m.dense_layers} … {m.layers - 1}, experts 0 … {m.experts - 1}, {', '.join(MATRICES)}"
            raise MissingTensorError(f"{self.where}: no {matrix} of expert {expert} in layer {layer}; there are {allowed}")
        name = expert_name(layer, expert, matrix)
        if m.quantization is not None:
            parts = {part: self.tensor(f"{name}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")}
            try:
                return Int4Weight.from_tensors(parts, m.quantization.group)
            except ValueError as error:
                raise ArtifactError(f"{self.where}: tensor '{name}': {error}") from error
        if f"{name}.weight" in self._types:
            return self.tensor(f"{name}.weight")
        found: Array = self.rows(fused_name(layer, matrix), expert, expert + 1)[0]
        if matrix != "down_proj":
            start = 0 if matrix == "gate_proj" else m.moe_intermediate
            found = found[start : start + m.moe_intermediate]
        return found

    def __repr__(self) -> str:
        return f"<Checkpoint {self.where}: {len(self.names)} tensors>"


def _bare(config: ModelConfig, name: str) -> str:
    """A name without the wrapper's prefix; one that lacks the prefix where it belongs is none of the language model's."""
    if not config.prefix or name.startswith(("vision_tower.", "mm_projector.")):
        return name
    return name.removeprefix(config.prefix) if name.startswith(config.prefix) else f"(without {config.prefix}) {name}"


def _frozen(array: Array) -> Array:
    view: Array = array[...]
    view.flags.writeable = False
    return view
