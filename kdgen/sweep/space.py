"""The space of configurations: parameters with their values, conditions and constraints, addressed by a number.

A *point* is a number below `size`: the parameters' choices as digits, the first parameter the most significant. Nothing is enumerated
to find one, so a space may be far larger than anything that is tried.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kdgen.expressions import ExpressionError, evaluate

_LABEL = 20


@dataclass(frozen=True)
class Axis:
    """One parameter.

    Attributes:
        path: its dotted path in the kernel's `params`; a number is an index of a list (`launches.0.stages`).
        values: that it takes, in order.
        when: condition under which it varies; "" for always.
        otherwise: its value where it does not vary.
    """

    path: str
    values: tuple[Any, ...]
    when: str = ""
    otherwise: Any = None

    @property
    def name(self) -> str:
        """What expressions call it: the path, with `_` for dots where a part is a number."""
        return expression_name(self.path)

    def label(self, value: Any) -> str:
        """A value in few characters: itself, or its number in the file (`#2`) when it is long."""
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) <= _LABEL:
            return text
        return f"#{self.values.index(value) + 1}" if value in self.values else f"{text[: _LABEL - 1]}…"


@dataclass(frozen=True)
class Rule:
    """A constraint: an expression that must hold, and why."""

    need: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.need} ({self.why})" if self.why else self.need


def expression_name(path: str) -> str:
    """A parameter's name in expressions: `tile.n` as it is, `launches.0.stages` as `launches_0_stages`."""
    return path.replace(".", "_") if any(part.isdigit() for part in path.split(".")) else path


@dataclass(frozen=True)
class Space:
    """All points.

    Attributes:
        axes: in the order of the file.
        rules: that a configuration must satisfy.
        fixed: what else expressions may name: the base spec's parameters and the target's facts.
    """

    axes: tuple[Axis, ...]
    rules: tuple[Rule, ...] = ()
    fixed: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """How many points there are; different ones may be the same configuration, where an axis does not vary."""
        return math.prod(len(axis.values) for axis in self.axes)

    def choices(self, point: int) -> tuple[int, ...]:
        """The digits of a point: which value each axis takes."""
        digits = []
        for axis in reversed(self.axes):
            point, digit = divmod(point, len(axis.values))
            digits.append(digit)
        return tuple(reversed(digits))

    def point_of(self, choices: tuple[int, ...]) -> int:
        """The inverse of `choices`."""
        point = 0
        for axis, choice in zip(self.axes, choices, strict=True):
            point = point * len(axis.values) + choice
        return point

    def values(self, point: int) -> dict[str, Any]:
        """Path to value of every axis, conditions applied.

        Raises:
            ExpressionError: a condition cannot be evaluated with these values.
        """
        known = dict(self.fixed or {})
        found: dict[str, Any] = {}
        for axis, choice in zip(self.axes, self.choices(point), strict=True):
            varies = not axis.when or bool(evaluate(axis.when, known))
            found[axis.path] = known[axis.name] = axis.values[choice] if varies else axis.otherwise
        return found

    def broken_rule(self, values: Mapping[str, Any]) -> str:
        """The first constraint that these values do not satisfy, with its reason; "" when they satisfy all."""
        known = {**(self.fixed or {}), **{expression_name(path): value for path, value in values.items()}}
        for rule in self.rules:
            try:
                if not evaluate(rule.need, known):
                    return str(rule)
            except ExpressionError as error:
                return f"{rule}: {error}"
        return ""


def configuration_id(values: Mapping[str, Any]) -> str:
    """The name of a configuration: a hash over its parameters' values, 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


def nested(params: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`params`, as JSON data, with the values put in at their paths.

    Raises:
        KeyError: a path leads nowhere.
    """
    result: dict[str, Any] = json.loads(json.dumps(params))
    for path, value in values.items():
        *way, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place: Any = result
        try:
            for part in way:
                place = place[part]
            if isinstance(place, list):
                place[int(last)] = value
            elif isinstance(place, dict) and last in place:
                place[last] = value
            else:
                raise KeyError(path)
        except (IndexError, TypeError, ValueError, KeyError) as error:
            raise KeyError(path) from error
    return result


def paths_of(params: Any, before: str = "") -> dict[str, Any]:
    """Every dotted path of JSON data to its value; of mappings and lists themselves, too."""
    found: dict[str, Any] = {}
    items = params.items() if isinstance(params, dict) else enumerate(params) if isinstance(params, list) else ()
    for key, value in items:
        path = f"{before}.{key}" if before else str(key)
        found[path] = value
        found |= paths_of(value, path)
    return found
