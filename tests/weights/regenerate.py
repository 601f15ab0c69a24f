"""Writes golden.json with `compressed-tensors` and torch installed: `python -m tests.weights.regenerate`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.weights.samples import Array, library_results, sample

GOLDEN = Path(__file__).with_name("golden.json")
CASES = [("bf16", 4, 128, 32), ("f32", 4, 128, 32), ("bf16", 3, 96, 16), ("f32", 2, 96, 48), ("bf16", 2, 256, 128)]


def to_json(array: Array) -> dict[str, object]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "hex": array.tobytes().hex()}


def main() -> None:
    cases = []
    for number, (dtype, rows, columns, group) in enumerate(CASES):
        weight = sample(dtype, rows, columns, group, number)
        results = {"weight": weight, **library_results(weight, group)}
        cases.append({"group": group, **{name: to_json(np.ascontiguousarray(array)) for name, array in results.items()}})
    made_with = {name: version(name) for name in ("compressed-tensors", "torch")}
    GOLDEN.write_text(json.dumps({"made_with": made_with, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
