"""The shapes of a sweep: which of a family's workloads are wanted, made once for all configurations that would make the same.

Workloads are made from a configuration's parameters, and making large ones takes seconds. Which parameters they really depend on is
found by watching which ones are read: a configuration that agrees in those gets the ones that are there already.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from kdgen.contract import Contract
from kdgen.errors import SpecError
from kdgen.kernels.base import Arrays, Case, FamilyParams, Workload
from kdgen.spec import KernelSpec
from kdgen.spec.document import Document
from kdgen.sweep.model import Shapes

T = TypeVar("T")

#: Bytes of arrays that are kept for other configurations, unless somebody says otherwise.
KEPT_BYTES = 4 << 30
_NUMBERED = re.compile(r"\b([A-Za-z]\w*) = (\d+)")
_CONTEXT = re.compile(r"\b(\d+)k\b")


@dataclass(frozen=True)
class Shape:
    """A shape that is served.

    Attributes:
        name: of the workload.
        weight: in the weighted score.
        bucket: of shapes that are chosen for together.
    """

    name: str
    weight: float
    bucket: str


def facts_of(name: str) -> dict[str, Any]:
    """What a workload's name says: `8k, T = 16` is context 8192 and T 16."""
    facts: dict[str, Any] = {"name": name}
    facts |= {symbol: int(number) for symbol, number in _NUMBERED.findall(name)}
    if context := _CONTEXT.search(name):
        facts["context"] = int(context[1]) * 1024
    return facts


def choose_shapes(names: list[str], wanted: tuple[Shapes, ...], document: Document) -> tuple[Shape, ...]:
    """The workloads that the entries of `shapes` ask for.

    Args:
        names: of all workloads of the base spec.
        wanted: the entries.
        document: of the sweep file, for faults.

    Raises:
        SpecError: a value that no workload has, or a workload that two entries ask for.
    """
    facts = {name: facts_of(name) for name in names}
    chosen: dict[str, Shape] = {}
    for index, entry in enumerate(wanted):
        asked = entry.wanted()
        for key, values in asked.items():
            known = list(dict.fromkeys(found[key] for found in facts.values() if key in found))
            if absent := [value for value in values if value not in known]:
                allowed = f"allowed: {', '.join(map(str, known))}" if known else "the family's workloads have no such size"
                document.fault(("shapes", index, "names" if key == "name" else key), f"value {absent[0]}, {allowed}")
        matching = [name for name, found in facts.items() if all(found.get(key) in values for key, values in asked.items())]
        for name in matching:
            if name in chosen:
                document.fault(("shapes", index), f"asks for '{name}', which an entry above asks for already")
            # A plain 1k that is asked for without T would name many; the order is that of the family.
            chosen[name] = Shape(name, entry.weight, entry.bucket)
        if not matching and not document.is_suspect(("shapes", index)) and not any(p[:2] == ("shapes", index) for p in document.suspects):
            document.fault(("shapes", index), f"no workload is all of that; there are: {'; '.join(names)}")
    if document.faults:
        raise SpecError(document.faults)
    return tuple(shape for name in names if (shape := chosen.get(name)))


class Watched:
    """A parameter object that notes which of its fields are read."""

    def __init__(self, params: FamilyParams):
        kind = type(params)
        self.read: set[str] = set()
        read, fields = self.read, frozenset(kind.model_fields)

        def watch(instance: Any, name: str) -> Any:
            if name in fields:
                read.add(name)
            elif name in ("__dict__", "model_dump", "model_dump_json", "model_copy", "__eq__", "__hash__", "__iter__"):
                read.update(fields)
            return kind.__getattribute__(instance, name)

        watching: Any = type(kind.__name__, (kind,), {"__getattribute__": watch, "__module__": kind.__module__})
        self.params: Any = watching.model_construct(**{name: getattr(params, name) for name in kind.model_fields})


@dataclass
class _Kept(Generic[T]):
    depends: dict[str, Any]
    value: T
    size: int


class Memo(Generic[T]):
    """Results of a function of parameters, found again for all parameters that agree in what the function reads of them.

    Args:
        size_of: bytes of a result.
        limit: bytes kept; what was used longest ago goes first.
    """

    def __init__(self, size_of: Callable[[T], int] = lambda value: 0, limit: int = KEPT_BYTES):
        self._kept: OrderedDict[tuple[Any, int], _Kept[T]] = OrderedDict()
        self._size_of, self._limit, self._count = size_of, limit, 0

    def get(self, key: Any, params: FamilyParams, make: Callable[[Any], T]) -> T:
        """`make(params)`, or what it gave for parameters that it could not tell from these.

        Args:
            key: names the function, and whatever else its result depends on.
            params: the parameters.
            make: given parameters like these, which are watched; it must read nothing else that changes.
        """
        for place, kept in reversed(self._kept.items()):
            if place[0] == key and all(getattr(params, name) == value for name, value in kept.depends.items()):
                self._kept.move_to_end(place)
                return kept.value
        watched = Watched(params)
        value = make(watched.params)
        depends = {name: getattr(params, name) for name in watched.read}
        self._count += 1
        self._kept[key, self._count] = _Kept(depends, value, self._size_of(value))
        while len(self._kept) > 1 and sum(item.size for item in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return value


def array_bytes(workload: Workload) -> int:
    """Bytes of a workload's arrays, those of its turns included."""
    return sum(array.nbytes for arrays in (workload.inputs, *workload.turns) for array in arrays.values())


class WorkloadSource:
    """The workloads of configurations of one family.

    Args:
        seed: of the workloads.
        light: keep of large arrays of values only type and shape; plans and offsets (32-bit integers) stay what they are.
        limit: bytes of arrays that are kept.
    """

    def __init__(self, seed: int, *, light: bool = False, limit: int = KEPT_BYTES):
        self._seed, self._light = seed, light
        self._memo = Memo[dict[str, Workload]](lambda found: sum(array_bytes(item) for item in found.values()) * (not light), limit)

    def names(self, kernel: KernelSpec, wanted: tuple[Shapes, ...] = ()) -> list[str]:
        """Of all workloads, in order; of large ones only so many as it takes to find all that is wanted."""
        found: list[str] = []
        missing = {index: math.prod(map(len, entry.wanted().values())) for index, entry in enumerate(wanted)}
        for workload in kernel.family.workloads(kernel.params, np.random.default_rng(self._seed)):
            found.append(workload.name)
            facts = facts_of(workload.name)
            for index, entry in enumerate(wanted):
                missing[index] -= all(facts.get(key) in values for key, values in entry.wanted().items())
            if wanted and max(missing.values()) <= 0:
                break
        return found

    def get(self, kernel: KernelSpec, wanted: tuple[str, ...]) -> dict[str, Workload]:
        """The workloads called `wanted`; one that these parameters do not admit is left out."""

        def make(params: Any) -> dict[str, Workload]:
            found: dict[str, Workload] = {}
            for workload in kernel.family.workloads(params, np.random.default_rng(self._seed)):
                if workload.name in wanted:
                    found[workload.name] = lightened(workload) if self._light else workload
                    if len(found) == len(wanted):
                        break
            return found

        return self._memo.get((kernel.family.name, wanted), kernel.params, make)


def lightened(workload: Workload) -> Workload:
    """The same workload; its values are zeros that take no memory."""

    def light(arrays: Arrays) -> dict[str, Any]:
        keep = np.dtype(np.int32)
        return {
            name: array if array.dtype == keep or array.ndim == 0 else np.broadcast_to(np.zeros((), array.dtype), array.shape)
            for name, array in arrays.items()
        }

    return replace(workload, inputs=light(workload.inputs), turns=tuple(light(turn) for turn in workload.turns))


class CaseSource:
    """A family whose cases and references are made once for all configurations that would make the same."""

    def __init__(self) -> None:
        self._cases: Memo[tuple[Case, ...]] = Memo(
            lambda cases: sum(array.nbytes for case in cases for array in case.inputs.values()), 2 << 30
        )
        self._answers: Memo[dict[str, Any]] = Memo(lambda answer: sum(array.nbytes for array in answer.values()), 2 << 30)

    def wrap(self, kernel: KernelSpec) -> KernelSpec:
        """The same kernel; its family remembers."""
        family = kernel.family

        def cases(params: Any, rng: np.random.Generator) -> Iterator[Case]:
            state = str(rng.bit_generator.state)
            return iter(self._cases.get((family.name, state), params, lambda watched: tuple(family.cases(watched, rng))))

        def reference(params: Any, inputs: Arrays) -> dict[str, Any]:
            return self._answers.get((family.name, digest_of(inputs)), params, lambda watched: family.reference(watched, inputs))

        return replace(kernel, family=replace(family, cases=cases, reference=reference))


def digest_of(arrays: Mapping[str, Any]) -> str:
    """A hash over arrays: names, types, shapes, bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(value.reshape(-1).view(np.uint8).data if value.size else b"")
    return digest.hexdigest()


def dimensions_of(contract: Contract, workload: Workload) -> dict[str, int]:
    """The dimensions of a workload: those its arrays bind, and its own."""
    from kdgen.verify.kernel import bound_dimensions

    return bound_dimensions(contract, workload.inputs, workload.dimensions)
