"""Bundles: a random model with a prompt and what an independent engine makes of it, in one KDTR file.

Everything follows from an engine spec and a seed, byte for byte. A bundle may leave the weights out: they are made again when it is
opened, and their hash is checked.

    attributes   config (Hugging Face's), spec (name of the engine spec), seed, weights_sha256
    tensors      golden.prompt i32 [n], golden.tokens i32 [m], golden.logits f32 [m, vocab]; those of the model, with Hugging Face's names
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kdgen.engine.checkpoint import Checkpoint, open_checkpoint, open_tensors
from kdgen.engine.config import ModelConfig
from kdgen.engine.random_model import random_tensors
from kdgen.errors import ArtifactError, UsageError
from kdgen.kdtr.reader import Reader
from kdgen.kdtr.writer import Writer
from kdgen.spec.spec import Spec

Array = npt.NDArray[Any]


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
        golden: what must come out.
    """

    checkpoint: Checkpoint
    spec: str
    golden: Golden


def config_of(spec: Spec) -> ModelConfig:
    """The configuration of a random model of an engine spec; token 0 stops nothing."""
    if spec.engine is None:
        raise UsageError(f"{spec.path}: a kernel spec; a bundle is made from an engine spec")
    engine = spec.engine
    if engine.ranks != 1:
        raise UsageError(f"{spec.path}: ranks is {engine.ranks}; a bundle is made from a spec for one rank")
    return ModelConfig(model=engine.model, dtype=engine.types.weights, rope_interleave=True)


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
    rounding: Literal["bf16", "none"] = "bf16" if spec.engine is not None and spec.engine.types.activations == "bf16" else "none"
    reference = Reference(open_tensors(config, made), rounding=rounding)
    new, logits = reference.generate([int(token) for token in ids], tokens, stop=False)
    attributes = {"config": config.to_hf(), "spec": spec.name, "seed": seed, "weights_sha256": weights_hash(made.items())}
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
        ArtifactError: it is damaged, incomplete, or its weights come out differently.
    """
    with Reader(path) as reader:
        attributes = dict(reader.attributes)
        missing = [name for name in ("config", "spec", "seed", "weights_sha256") if name not in attributes]
        missing += [name for name in ("golden.prompt", "golden.tokens", "golden.logits") if name not in reader]
        if missing:
            raise ArtifactError(f"{path}: not a bundle: {', '.join(missing)} is missing; make one with: kdgen bundle SPEC -o FILE")
        golden = Golden(
            tuple(int(token) for token in reader["golden.prompt"]),
            tuple(int(token) for token in reader["golden.tokens"]),
            np.array(reader["golden.logits"], np.float32),
        )
        complete = any(not name.startswith("golden.") for name in reader)
    if complete:
        return Bundle(open_checkpoint(path), str(attributes["spec"]), golden)
    config = ModelConfig.from_mapping(attributes["config"], f"{path}: config")
    tensors = dict(random_tensors(config, int(attributes["seed"])))
    if weights_hash(tensors.items()) != attributes["weights_sha256"]:
        raise ArtifactError(f"{path}: the weights made from its seed are not those it was made with; make the bundle again")
    return Bundle(open_tensors(config, tensors, str(path)), str(attributes["spec"]), golden)


def weights_hash(tensors: Iterable[tuple[str, Array]]) -> str:
    """SHA-256 over names, types, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for name, array in tensors:
        digest.update(f"{name} {array.dtype.name} {list(array.shape)}\n".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
