"""Comparison of what a kernel wrote with what its reference says.

Terms: the *error* of an output is max |got - want| / max |want|, with 1e-30 for a reference that is zero throughout. An *exact*
output must have every bit of the reference; a NaN there matches any NaN that the kernel wrote, since the GPU and numpy give
different payloads to theirs. The *fill* is the byte pattern an array held before the launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.kernels.base import Tolerance

Array = npt.NDArray[Any]

#: Bytes that outputs and workspaces hold before a launch. 0xFF is a NaN in every float format, but also -1, a value that integer
#: outputs hold for good reasons: runs alternate between the two, so that an element that was never written shows in one of them.
FILLS = (0xFF, 0xA5)


@dataclass(frozen=True)
class Difference:
    """The first place where an output differs.

    Attributes:
        output: argument name.
        index: element index.
        got, want: the values there, as text.
        note: what is known about the cause; empty if nothing is.
        count: how many elements differ.
    """

    output: str
    index: tuple[int, ...]
    got: str
    want: str
    note: str
    count: int

    def __str__(self) -> str:
        place = f"{self.output}[{', '.join(map(str, self.index))}]"
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        return f"{place}: got {self.got}, want {self.want}{more}{f': {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class Comparison:
    """Outcome for one output: its error, the bound, and the first difference if it is out of bounds."""

    error: float
    bound: float
    difference: Difference | None


def filled(shape: tuple[int, ...], dtype: npt.DTypeLike, fill: int) -> Array:
    """An array whose every byte is `fill`."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = fill
    return array


def compare(output: str, got: Array, want: Array, tolerance: Tolerance, fill: int) -> Comparison:
    """Compare one output with its reference.

    Args:
        output: name, for the message.
        got: what the kernel left in the array.
        want: the reference, of the same shape; a float reference may be wider (float64 for a bf16 output).
        tolerance: `relative` 0 asks for equal bits.
        fill: what the array held before.
    """
    if got.shape != want.shape:
        text = "the kernel's contract and the reference disagree about the shape"
        return Comparison(np.inf, tolerance.relative, Difference(output, (), str(got.shape), str(want.shape), text, 1))
    if not got.size:
        return Comparison(0.0, tolerance.relative, None)
    words = _words(got)
    untouched = words == np.full(words.itemsize, fill, np.uint8).view(words.dtype)
    if tolerance.relative == 0.0:
        want = want.astype(got.dtype, copy=False)
        wrong = words != _words(want)
        if wrong.any():
            wrong &= ~(_is_nan(got) & _is_nan(want) & ~untouched)
        error = np.inf if wrong.any() else 0.0
    else:
        wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
        scale = _largest_finite(wide_want)
        with np.errstate(invalid="ignore"):
            distance = np.where(wide_got == wide_want, 0.0, np.abs(wide_got - wide_want)) / scale
        distance = np.where(np.isnan(wide_got) & np.isnan(wide_want) & ~untouched, 0.0, distance)
        wrong = ~(distance <= tolerance.relative)  # a NaN distance is wrong too
        error = float(np.max(np.where(np.isnan(distance), np.inf, distance)))
    if not wrong.any():
        return Comparison(error, tolerance.relative, None)
    index = _first(wrong)
    note = "never written" if untouched[index] else ""
    difference = Difference(output, index, _show(got[index]), _show(want[index]), note, int(wrong.sum()))
    return Comparison(error, tolerance.relative, difference)


def first_change(output: str, first: Array, second: Array) -> Difference | None:
    """Where two runs of one launch differ in any bit; None if they do not. `want` is the first run's value."""
    wrong = _words(first) != _words(second)
    if not wrong.any():
        return None
    index = _first(wrong)
    return Difference(output, index, _show(second[index]), _show(first[index]), "", int(wrong.sum()))


def _first(mask: Array) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _words(array: Array) -> Array:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    return _bytes_of(array).view(unsigned).reshape(array.shape)


def _is_nan(array: Array) -> Array:
    # Unequal to itself: also right for bf16, a type numpy itself does not know.
    with np.errstate(invalid="ignore"):
        unequal: Array = array != array  # noqa: PLR0124
    return unequal


def _largest_finite(array: Array) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return max(1e-30, float(finite.max())) if finite.size else 1e-30


def _show(value: Any) -> str:
    return repr(float(value)) if np.dtype(value.dtype).kind not in "iub" else str(int(value))
