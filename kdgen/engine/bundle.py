"""Bundles: a random model with a prompt and what an independent engine makes of it, in one KDTR file.

Everything follows from an engine spec and a seed, byte for byte. A bundle may leave the weights out: they are made again when it is
opened. Their hash is checked either way.

    attributes   config (Hugging Face's), spec (name of the engine spec), activations (their type, as the golden results are rounded),
                 seed, weights_sha256
    tensors      golden.prompt i32 [n], golden.tokens i32 [m], golden.logits f32 [m, vocab]; those of the model, with Hugging Face's names
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.engine.checkpoint import Checkpoint, open_checkpoint, open_tensors
from kdgen.engine.config import ModelConfig
from kdgen.engine.random_model import random_tensors
from kdgen.errors import ArtifactError, Fault, SpecError, UsageError
from kdgen.kdtr.reader import Reader
from kdgen.kdtr.writer import Writer
from kdgen.spec.spec import Spec

Array = npt.NDArray[Any]

#: Every attribute, and its type.
ATTRIBUTES: dict[str, type] = {"config": dict, "spec": str, "activations": str, "seed": int, "weights_sha256": str}
ACTIVATIONS = ("bf16", "f32")


@dataclass(frozen=True)
class Golden:
    """What the reference makes of a prompt.

    Attributes:
        prompt: token ids.
        tokens: that follow, greedily.
        logits: f32 `[len(tokens), vocab]`, of the position before each of them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bundle:
    """An open bundle; close its checkpoint after use.

    Attributes:
        checkpoint: the model.
        spec: name of the engine spec it was made from.
        activations: type of the activations, bf16 or f32, for which the golden results are.
        golden: what must come out.
    """

    checkpoint: Checkpoint
    spec: str
    activations: str
    golden: Golden


def config_of(spec: Spec) -> ModelConfig:
    """The configuration of a random model of an engine spec; token 0 stops nothing."""
    if spec.engine is None:
        raise UsageError(f"{spec.path}: a kernel spec; a bundle is made from an engine spec")
    engine = spec.engine
    if engine.ranks != 1:
        raise UsageError(f"{spec.path}: ranks is {engine.ranks}; a bundle is made from a spec for one rank")
    check_types(spec)
    return ModelConfig(model=engine.model, dtype=engine.types.weights, rope_interleave=True)


def check_types(spec: Spec) -> None:
    """SpecError when an engine spec's weights and activations have other types: norms are of the type of what they norm."""
    types = spec.engine.types if spec.engine is not None else None
    if types is not None and types.activations != types.weights:
        message = f"value {types.activations}, but types.weights is {types.weights}; allowed is the same type for both"
        raise SpecError([Fault(spec.path, 0, "types.activations", message)])


def write_bundle(
    path: str | os.PathLike[str], spec: Spec, *, seed: int = 0, prompt: int = 12, tokens: int = 24, weights: bool = True
) -> None:
    """Make a bundle; the file appears when it is complete.

    Args:
        path: the file to make or replace.
        spec: an engine spec.
        seed: of weights and prompt.
        prompt, tokens: how many.
        weights: keep them in the file.

    Raises:
        UsageError: the spec is not an engine spec for one rank, or its model has fewer positions.
    """
    from kdgen.engine.reference import Reference

    config = config_of(spec)
    if prompt < 1 or tokens < 1 or prompt + tokens > config.model.max_position:
        raise UsageError(f"{prompt} + {tokens} tokens; allowed are at least 1 each, together {config.model.max_position}")
    made = dict(random_tensors(config, seed))
    ids = np.random.Generator(np.random.PCG64(seed)).integers(0, config.model.vocab, prompt, dtype=np.int64)
    activations = spec.engine.types.activations if spec.engine is not None else "f32"
    reference = Reference(open_tensors(config, made), rounding="bf16" if activations == "bf16" else "none")
    new, logits = reference.generate([int(token) for token in ids], tokens, stop=False)
    hashed = weights_hash(made.items())
    attributes = {"config": config.to_hf(), "spec": spec.name, "activations": activations, "seed": seed, "weights_sha256": hashed}
    with Writer(path, attributes) as writer:
        writer.add("golden.prompt", ids.astype(np.int32))
        writer.add("golden.tokens", np.array(new, np.int32))
        writer.add("golden.logits", logits.astype(np.float32))
        for name, array in made.items() if weights else ():
            writer.add(name, array)


def is_bundle(path: Path) -> bool:
    """Whether a file is a KDTR file with golden tensors; errors of a damaged one are raised."""
    if not path.is_file():
        return False
    with Reader(path) as reader:
        return "golden.tokens" in reader


def open_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Open a bundle; weights that it leaves out are made again.

    Raises:
        ArtifactError: it is damaged or incomplete, or its weights are not those it was made with.
    """
    with Reader(path) as reader:
        attributes = dict(reader.attributes)
        if missing := [name for name in (*ATTRIBUTES, *GOLDEN) if name not in attributes and name not in reader]:
            raise ArtifactError(f"{path}: not a bundle: {', '.join(missing)} is missing; make one with: kdgen bundle SPEC -o FILE")
        if wrong := [*_wrong_attributes(attributes)]:
            raise ArtifactError(f"{path}: {'; '.join(wrong)}; make the bundle again")
        config = ModelConfig.from_mapping(attributes["config"], f"{path}: config")
        reader.check()
        golden = _golden(reader, config.model.vocab)
        stored = [name for name in reader if name not in GOLDEN]
        found = weights_hash((name, reader[name]) for name in stored) if stored else ""
    spec, activations = str(attributes["spec"]), str(attributes["activations"])
    if stored:
        checkpoint = open_checkpoint(path)
    else:
        tensors = dict(random_tensors(config, int(attributes["seed"])))
        found = weights_hash(tensors.items())
        checkpoint = open_tensors(config, tensors, str(path))
    if found != attributes["weights_sha256"]:
        checkpoint.close()
        whose = "in it" if stored else f"made from its seed {attributes['seed']}"
        raise ArtifactError(
            f"{path}: the weights {whose} have the hash {found[:16]}…, those it was made with {attributes['weights_sha256'][:16]}…; "
            f"make the bundle again"
        )
    return Bundle(checkpoint, spec, activations, golden)


#: Tensors of the golden results.
GOLDEN = ("golden.prompt", "golden.tokens", "golden.logits")


def _wrong_attributes(attributes: dict[str, Any]) -> Iterator[str]:
    for name, kind in ATTRIBUTES.items():
        if not isinstance(attributes[name], kind) or isinstance(attributes[name], bool):
            yield f"attribute {name} is {str(attributes[name])[:40]!r}, it must be {'an object' if kind is dict else kind.__name__}"
    if attributes["activations"] not in ACTIVATIONS:
        yield f"attribute activations is {attributes['activations']!r}, allowed are {', '.join(ACTIVATIONS)}"


def _golden(reader: Reader, vocab: int) -> Golden:
    prompt, tokens = (reader.array(name, "i32", (None,)) for name in GOLDEN[:2])
    logits = reader.array(GOLDEN[2], "f32", (len(tokens), vocab))
    for name, ids in zip(GOLDEN, (prompt, tokens), strict=False):
        if not len(ids):
            raise ArtifactError(f"{reader.path}: tensor '{name}' is empty")
        if ids.min() < 0 or ids.max() >= vocab:
            token = ids.min() if ids.min() < 0 else ids.max()
            raise ArtifactError(f"{reader.path}: tensor '{name}' has token {token}; the vocabulary has {vocab}")
    return Golden(tuple(int(token) for token in prompt), tuple(int(token) for token in tokens), np.array(logits, np.float32))


def weights_hash(tensors: Iterable[tuple[str, Array]]) -> str:
    """SHA-256 over names, types, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for name, array in tensors:
        digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
