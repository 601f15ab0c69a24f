"""Row-exactness: a row's outputs have the same bits alone, among others, and in any order.

It is what makes speculative output bitwise the plain output: a token is a row among the tree's rows in one step, and alone in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from kdgen.contract import Contract
from kdgen.kernels.base import Arrays
from kdgen.verify.compare import Array, first_change

Rows = npt.NDArray[np.intp]


def row_count(contract: Contract, symbol: str, inputs: Arrays) -> int:
    """How many rows a case has: the first dimension of the inputs over `symbol`."""
    return next(len(inputs[a.name]) for a in contract.arguments if a.name in inputs and a.shape[:1] == (symbol,))


def regroupings(count: int, rng: np.random.Generator, most: int) -> Iterator[tuple[str, Rows]]:
    """Up to `most` selections of a case's rows: all shuffled, then some rows alone and random halves by turns."""
    if count < 2:
        return
    for i in range(most):
        if i == 0:
            yield "shuffled", rng.permutation(count)
        elif i % 2:
            row = int(rng.integers(count))
            yield f"row {row} alone", np.array([row])
        else:
            rows = rng.permutation(count)[: max(1, count // 2)]
            yield f"{len(rows)} of {count} rows", rows


def take_rows(contract: Contract, symbol: str, inputs: Arrays, rows: Rows) -> dict[str, Array]:
    """The inputs of some rows: those over `symbol` indexed, the others as they are."""
    over = {a.name for a in contract.arguments if a.shape[:1] == (symbol,)}
    return {name: np.ascontiguousarray(value[rows]) if name in over else value for name, value in inputs.items()}


def differing_row(contract: Contract, symbol: str, whole: Mapping[str, Array], part: Mapping[str, Array], rows: Rows) -> str:
    """What differs between rows computed among all and the same rows computed as `part`; empty when nothing does."""
    for a in contract.arguments:
        if a.name in part and a.shape[:1] == (symbol,):
            change = first_change(a.name, whole[a.name][rows], part[a.name])
            if change:
                place = ", ".join(map(str, (int(rows[change.index[0]]), *change.index[1:])))
                return f"{a.name}[{place}] is {change.want} among all rows but {change.got}"
    return ""
