"""What a kernel family is: parameters, contract, template context, shared-memory layout, numpy reference, test cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from kdgen.contract import Contract
from kdgen.expressions import round_up
from kdgen.targets import Target

Arrays = Mapping[str, npt.NDArray[Any]]

ContextValue = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | tuple[tuple[int | str, ...], ...]


class FamilyParams(BaseModel):
    """Base of every family's parameters: unknown keys and lossy conversions are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class SharedLayout:
    """Places a kernel's shared-memory regions and names their offsets for the template (`{{ shared.ring }}`).

    On the host target a red zone of `RED_ZONE` bytes follows every region, so that an access past a region is found even
    though the next region lies behind it.

    Attributes:
        offsets: region name to byte offset.
        sizes: region name to bytes.
        total: dynamic shared memory of the block, in bytes.
        red_zones: (offset, bytes) that nobody may touch.
    """

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    total: int
    red_zones: tuple[tuple[int, int], ...]

    RED_ZONE = 64

    @classmethod
    def place(cls, target: Target, *regions: tuple[str, int, int]) -> SharedLayout:
        """Lay out `(name, bytes, alignment)` regions in order; alignments are powers of two, at most 1024."""
        offsets: dict[str, int] = {}
        zones: list[tuple[int, int]] = []
        end = 0
        for name, size, alignment in regions:
            offsets[name] = start = round_up(end, alignment)
            end = start + size
            if target.is_host:
                # ASan's granule is 8 bytes: a zone starts at the next one.
                zone = round_up(end, 8)
                zones.append((zone, cls.RED_ZONE))
                end = zone + cls.RED_ZONE
        return cls(offsets, {name: size for name, size, _ in regions}, round_up(end, 16), tuple(zones))


@dataclass(frozen=True)
class Tolerance:
    """How an output is compared with the reference.

    Attributes:
        relative: bound on max |got - want| / max(1e-30, max |want|); 0 means bit for bit.
        why: where the bound comes from.
    """

    relative: float = 0.0
    why: str = "integer results and fixed operation order: bit for bit"


EXACT = Tolerance()


@dataclass(frozen=True)
class Case:
    """One test input of a family.

    Attributes:
        name: short and unique within the family.
        inputs: argument name to array, for every `in` and `inout` argument; a scalar argument's value as a 0-d array.
    """

    name: str
    inputs: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Workload:
    """One thing to time, of the size and kind that the engine launches.

    Attributes:
        name: short and unique within the family: `B = 64`.
        inputs, dimensions: as in `Case`.
        moved_bytes: bytes that must be read and written at least; 0 when latency, not bandwidth, is the limit.
        flops: arithmetic operations, a multiply-add counting two; 0 when they do not matter.
        cold: the inputs come from memory in the engine, so copies of them are rotated out of the L2 cache.
        turns: inputs of calls that take turns, for workloads whose values decide what is read (routings): each replaces some of
            `inputs`, the others are shared. `moved_bytes` and `flops` are means over the turns.
    """

    name: str
    inputs: Arrays
    dimensions: Mapping[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    flops: int = 0
    cold: bool = False
    turns: tuple[Arrays, ...] = ()


@dataclass(frozen=True)
class Family:
    """A kernel family: one template and one Python module of the same name.

    Attributes:
        name: the family and the template stem.
        summary: one line.
        params: the pydantic model of its parameters.
        contract: parameters and target to the contract of the compiled kernel.
        context: parameters and target to the numbers the template may use. `p` (the parameters), `shared` (offsets) and
            `kernel(entry)` (the signature) are always there.
        shared: parameters and target to the shared-memory layout.
        reference: parameters and inputs to expected outputs, in plain numpy, from the definitions. Elements that the
            kernel may leave unspecified do not exist: every output is fully specified.
        cases: parameters and a generator to test inputs.
        tolerances: output name to tolerance; `EXACT` where absent.
        dimensions: parameters and inputs to the dimensions that no input array binds.
        workloads: parameters and a generator to what `kdgen bench` times.
        rows: the dimension whose entries may not influence each other's outputs, not in a single bit; empty if there is none.
        take_rows: parameters, inputs and row numbers to the inputs of those rows alone, in that order; None when it is enough to
            index the inputs over `rows`.
        device_runtime: it calls functions of CUDA's device runtime, so it is compiled as relocatable code.
    """

    name: str
    summary: str
    params: type[FamilyParams]
    contract: Callable[[Any, Target], Contract]
    reference: Callable[[Any, Arrays], dict[str, npt.NDArray[Any]]]
    cases: Callable[[Any, np.random.Generator], Iterator[Case]]
    context: Callable[[Any, Target], Mapping[str, ContextValue]] = lambda params, target: {}
    shared: Callable[[Any, Target], SharedLayout] = lambda params, target: SharedLayout.place(target)
    tolerances: Callable[[Any], Mapping[str, Tolerance]] = lambda params: {}
    dimensions: Callable[[Any, Arrays], Mapping[str, int]] = field(default=lambda params, inputs: {})
    workloads: Callable[[Any, np.random.Generator], Iterator[Workload]] = lambda params, rng: iter(())
    rows: str = ""
    take_rows: Callable[[Any, Arrays, npt.NDArray[np.intp]], Mapping[str, npt.NDArray[Any]]] | None = None
    device_runtime: bool = False
