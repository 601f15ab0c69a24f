"""The models of a sweep file: a base spec, a space of parameters, the shapes to serve, and what is to be small."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from kdgen.spec.model import Description, Name, Strict

#: Most values of one parameter: more is a mistake, not a space that anybody explores.
MOST_VALUES = 4096

Expression = Annotated[str, Field(min_length=1, max_length=500, description="an expression over parameters and `target.…`")]
Number = Annotated[int, Field(ge=-(1 << 40), le=1 << 40)]


class Values(Strict):
    """One parameter: the values it takes, as a list or as a range, and when it varies at all.

    `from`, `to` and `step` are an arithmetic range with both ends; `from`, `to` and `times` a geometric one.
    """

    values: Annotated[tuple[Any, ...] | None, Field(max_length=MOST_VALUES, description="its values, in order")] = None
    start: Annotated[Number | None, Field(alias="from", description="first value of a range")] = None
    stop: Annotated[Number | None, Field(alias="to", description="last value of a range, included")] = None
    step: Annotated[int | None, Field(ge=1, le=1 << 40, description="distance of the values of a range")] = None
    times: Annotated[int | None, Field(ge=2, le=1 << 20, description="factor between the values of a range")] = None
    when: Annotated[Expression | None, Field(description="it varies only where this holds, otherwise it is `otherwise`")] = None
    otherwise: Annotated[Any, Field(description="its value where `when` does not hold; left out: the base spec's")] = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ranged = self.start is not None or self.stop is not None
        if (self.values is None) is not ranged:
            raise ValueError("a parameter needs either values, or from and to")
        if ranged and (self.start is None or self.stop is None or (self.step is not None and self.times is not None)):
            raise ValueError("a range needs from and to, and step or times or neither")
        if self.times is not None and (self.start or 0) < 1:
            raise ValueError("a range with times must start at 1 or more")
        return self

    @property
    def size(self) -> int:
        """How many values, without making them."""
        if self.values is not None or self.times is not None:
            return len(self.expanded())
        return max(0, ((self.stop or 0) - (self.start or 0)) // (self.step or 1) + 1)

    def expanded(self) -> tuple[Any, ...]:
        """The values, in order."""
        if self.values is not None:
            return self.values
        first, last = self.start or 0, self.stop or 0
        if self.times is None:
            return tuple(range(first, last + 1, self.step or 1))
        found = []
        while first <= last:
            found.append(first)
            first *= self.times
        return tuple(found)


class Constraint(Strict):
    """What every configuration must satisfy."""

    need: Expression
    why: Annotated[str, Field(max_length=500, description="shown when a configuration is turned down for it")] = ""


class Shapes(Strict):
    """Some of the family's workloads: those whose facts have one of the values listed for them."""

    T: Annotated[tuple[int, ...] | None, Field(min_length=1, max_length=64, description="rows of a launch")] = None
    context: Annotated[tuple[int, ...] | None, Field(min_length=1, max_length=64, description="keys in the cache")] = None
    B: Annotated[tuple[int, ...] | None, Field(min_length=1, max_length=64, description="nodes of a draft tree")] = None
    names: Annotated[tuple[str, ...] | None, Field(min_length=1, max_length=64, description="workloads by their whole name")] = None
    weight: Annotated[float, Field(gt=0, le=1e6, description="of each of them, in the weighted score")] = 1.0
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=32, description="shapes chosen for together")] = "all"

    @model_validator(mode="after")
    def _names_something(self) -> Self:
        if not self.wanted():
            raise ValueError("shapes need at least one of T, context, B, names")
        return self

    def wanted(self) -> dict[str, tuple[Any, ...]]:
        """Fact to the values that are wanted."""
        facts = {"T": self.T, "context": self.context, "B": self.B, "name": self.names}
        return {name: values for name, values in facts.items() if values is not None}


class Objective(Strict):
    """What the chosen configuration has least of."""

    score: Annotated[
        Literal["relative", "total"],
        Field(description="relative: weighted geometric mean of time / the base spec's time; total: weighted sum of times"),
    ] = "relative"
    noise: Annotated[float, Field(ge=0, le=0.1, description="scores closer than this share are equal")] = 0.01


class SweepFile(Strict):
    """A sweep file, after `written_out`."""

    kind: Literal["sweep"]
    name: Name
    description: Description = ""
    base: Annotated[str, Field(min_length=1, max_length=1000, description="a kernel spec, from this file's directory")]
    space: Annotated[dict[str, Values], Field(min_length=1, max_length=64, description="parameter to its values")]
    constraints: Annotated[tuple[Constraint, ...], Field(max_length=64)] = ()
    shapes: Annotated[tuple[Shapes, ...], Field(min_length=1, max_length=64)]
    objective: Objective = Objective()


def written_out(data: dict[str, Any]) -> dict[str, Any]:
    """A sweep file's content with its short forms written out: a list of values, a constraint that is only an expression."""
    space, rules = data.get("space"), data.get("constraints")
    result = dict(data)
    if isinstance(space, dict):
        result["space"] = {path: {"values": given} if isinstance(given, list) else given for path, given in space.items()}
    if isinstance(rules, list):
        result["constraints"] = [{"need": rule} if isinstance(rule, str) else rule for rule in rules]
    return result
