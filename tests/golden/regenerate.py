"""Regenerate the tracked golden bundles: `python tests/golden/regenerate.py` (with a directory as argument: there instead of here).

`ddtree.kdtr` pins what a kernel family's reference says for a few inputs. The inputs come from a hash and hold dyadic fractions, so that
they, and every sum of them, are the same bits on every machine and with every numpy.

`bundles/` has models of the toy engine specs with what the numpy engine makes of a prompt (`kdgen bundle SPEC -o FILE --no-weights`). The
logits are float64 sums rounded to float32; a test keeps every one of them far enough from the middle of two float32 that another order of
the sums rounds it alike.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.engine.bundle import write_bundle
from kdgen.kdtr import Writer
from kdgen.kernels import tree_build
from kdgen.spec import load_spec

Array = npt.NDArray[Any]

HERE = Path(__file__).parent

TREE_CASES: dict[str, tuple[tree_build.Params, int, tuple[int, ...]]] = {
    # name: (parameters, steps per nat, budgets of the sequences)
    "plain": (tree_build.Params(depth=4, top_k=6, budget=12, sequences=4), 64, (12, 12, 5, 0)),
    "ties": (tree_build.Params(depth=3, top_k=8, budget=20, sequences=4), 1, (20, 20, 7, 1)),
    "chain_seed": (tree_build.Params(depth=5, top_k=4, budget=10, sequences=2, chain_seed=True), 64, (10, 3)),
    "depth_bonus": (tree_build.Params(depth=5, top_k=4, budget=16, sequences=2, depth_bonus=0.25), 64, (16, 16)),
    "width_cap": (tree_build.Params(depth=4, top_k=8, budget=16, sequences=2, width_cap=2), 64, (16, 16)),
    "padded": (tree_build.Params(depth=2, top_k=16, budget=15, sequences=2, width_cap=1, pad=True), 64, (15, 15)),
    "nothing": (tree_build.Params(depth=3, top_k=4, budget=6, sequences=2), 64, (6, 6)),
}


def numbers(seed: str, count: int, limit: int) -> Array:
    """`count` integers 0 … limit − 1 that depend on the seed's text alone."""
    words = (hashlib.sha256(f"{seed}:{number}".encode()).digest()[:8] for number in range(count))
    return np.array([int.from_bytes(word, "little") % limit for word in words], np.int64)


def tree_inputs(name: str, p: tree_build.Params, steps: int, budgets: tuple[int, ...]) -> dict[str, Array]:
    """Inputs of `tree_build`: log-probs that fall by multiples of 1/steps from rank to rank."""
    shape = (len(budgets), p.depth, p.top_k)
    falls = numbers(f"{name} log_probs", int(np.prod(shape)), 2 if steps == 1 else steps).reshape(shape)
    log_probs = (-np.cumsum(falls, axis=-1) / steps).astype(np.float32)
    if name == "nothing":
        log_probs[0] = np.nan
        log_probs[1, 1:] = -np.inf
    return {
        "log_probs": log_probs,
        "token_ids": numbers(f"{name} tokens", int(np.prod(shape)), 163_840).reshape(shape).astype(np.int32),
        "root_tokens": numbers(f"{name} roots", len(budgets), 163_840).astype(np.int32),
        "starts": numbers(f"{name} starts", len(budgets), 262_144 - p.depth).astype(np.int32),
        "budgets": np.array(budgets, np.int32),
    }


def tree_tensors() -> Iterator[tuple[str, Array]]:
    """Inputs (`CASE/in/ARGUMENT`) and outputs (`CASE/out/ARGUMENT`) of every tree case."""
    for name, (p, steps, budgets) in TREE_CASES.items():
        inputs = tree_inputs(name, p, steps, budgets)
        for argument, values in inputs.items():
            yield f"{name}/in/{argument}", values
        for argument, values in sorted(tree_build.FAMILY.reference(p, inputs).items()):
            yield f"{name}/out/{argument}", values


def write_ddtree(path: Path) -> None:
    """The bundle of draft trees; the attributes hold the parameters of every case."""
    cases = {name: p.model_dump() for name, (p, _, _) in TREE_CASES.items()}
    with Writer(path, {"family": "tree_build", "cases": cases}) as writer:
        for name, values in tree_tensors():
            writer.add(name, values)


#: Engine spec of each model bundle to its seed; f32 and INT4 have the same weights, before they are quantized.
MODEL_SEEDS = {"tiny-narrow-f32": 4, "tiny-narrow-int4": 4, "tiny-wide-f32": 2, "tiny-wide-int4": 2}


def write_model(name: str, path: Path) -> None:
    """The bundle of a toy engine spec, without its weights."""
    spec = load_spec(HERE.parents[1] / "specs" / "engines" / f"{name}.yaml")
    write_bundle(path, spec, seed=MODEL_SEEDS[name], weights=False)


BUNDLES: dict[str, Callable[[Path], None]] = {
    "ddtree.kdtr": write_ddtree,
    **{f"bundles/{name}.kdtr": partial(write_model, name) for name in MODEL_SEEDS},
}


def main(arguments: list[str]) -> None:
    """Write every bundle."""
    directory = Path(arguments[0]) if arguments else HERE
    for name, write in BUNDLES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write(directory / name)
        print(directory / name)


if __name__ == "__main__":
    main(sys.argv[1:])
