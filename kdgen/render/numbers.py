"""The values a template sees, and how they are written as C++: exactly, or not at all."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from jinja2 import Undefined
from pydantic import BaseModel


class Numbers:
    """A named, closed set of values that a template reads as attributes (`p.tile.m`, `shared.ring`)."""

    def __init__(self, name: str, values: Mapping[str, Any]):
        self.__dict__.update(values)
        self.__dict__["__name"] = name

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"'{name}' cannot be set: a template only reads its values")


def name_of(numbers: Numbers) -> str:
    """What the template calls it."""
    return str(vars(numbers)["__name"])


def names_of(numbers: Numbers) -> list[str]:
    """The attributes it has."""
    return sorted(name for name in vars(numbers) if name != "__name")


def parameters(model: BaseModel, name: str = "p") -> Numbers:
    """A family's parameters; nested models become nested `Numbers`."""
    return Numbers(name, {key: _inner(getattr(model, key), f"{name}.{key}") for key in type(model).model_fields})


def _inner(value: Any, name: str) -> Any:
    if isinstance(value, BaseModel):
        return parameters(value, name)
    if isinstance(value, list | tuple):
        return tuple(_inner(item, f"{name}[{index}]") for index, item in enumerate(value))
    return value


def checked(name: str, value: Any) -> Any:
    """`value`, when it is one a template may have; TypeError or ValueError saying what is allowed otherwise."""
    if type(value) in (int, bool, str):
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"'{name}' is {value}, which has no C++ literal")
        return value
    if type(value) is tuple:
        return tuple(checked(f"{name}[{index}]", item) for index, item in enumerate(value))
    raise TypeError(f"'{name}' is a {type(value).__name__}; allowed: int, float, bool, str, or a tuple of these")


def literal(value: Any) -> Any:
    """What `{{ value }}` writes: C++'s `true` and `false`, the shortest text that reads back as the same double."""
    if isinstance(value, Undefined):
        return str(value)  # raises, and names what is undefined
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int | str):
        return str(value)
    if isinstance(value, float):
        return repr(checked("value", value))
    raise TypeError(f"a {type(value).__name__} cannot be written into C++ text; pick one of its values")


def f64(value: float) -> str:
    """A `double` literal with exactly this value."""
    number = checked("f64", float(value))
    return _signed(repr(number))


def f32(value: float) -> str:
    """The shortest `float` literal of the float nearest to `value`; ValueError when it is beyond a float's range."""
    number = checked("f32", float(value))
    nearest = _float_of(number)
    if nearest is None:
        raise ValueError(f"{number!r} is beyond the range of a float")
    text = next(text for digits in range(1, 18) if _float_of(float(text := f"{nearest:.{digits}g}")) == nearest)
    if not set(".e") & set(text):
        text += ".0"
    return _signed(f"{text}f")


def _float_of(number: float) -> float | None:
    """The 32-bit float nearest to a double, or None beyond its range."""
    try:
        value: float = struct.unpack("<f", struct.pack("<f", number))[0]
    except OverflowError:
        return None
    return value


def _signed(text: str) -> str:
    # In parentheses, so that `x -{{ value }}` does not become a decrement.
    return f"({text})" if text.startswith("-") else text
