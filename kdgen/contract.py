"""What a compiled kernel promises and needs: arguments, capacities, launches.

These are plain dataclasses with a JSON form. A kernel family makes them (`kdgen/kernels/`), the build writes them into
`manifest.json`, the runtime reads them back and checks every call against them. This module imports nothing but the
standard library, because the runtime does.

Terms: a *dimension* is a symbol such as `S` whose value a call binds through the shapes it passes; an *extent* is an
integer or an expression over dimensions (`"ceil_div(T, 8)"`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Extent = int | str
Role = Literal["in", "out", "inout", "workspace", "scalar", "dimension"]

#: Element sizes in bytes. `int4` is packed two to a byte by layout, and is always passed as `i32` words.
DTYPE_BYTES: dict[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u64": 8, "u32": 4, "u16": 2, "u8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One kernel argument, in signature order.

    Attributes:
        name: the name in the CUDA signature and the keyword in Python.
        dtype: a key of `DTYPE_BYTES`.
        shape: extents; empty for a scalar, one for a dimension. A bare symbol binds that dimension from the array's shape.
        role: `in`, `out`, `inout`, `workspace` (scratch, contents free before and after), `scalar` (passed by value), or
            `dimension` (an integer passed by value that the caller does not give: the extent `shape[0]`, once bound).
        doc: one line for `kdgen inspect`.
    """

    name: str
    dtype: str
    shape: tuple[Extent, ...] = ()
    role: Role = "in"
    doc: str = ""


@dataclass(frozen=True)
class Capacity:
    """The smallest and largest value of a dimension that the kernel was built for, both included."""

    minimum: int
    maximum: int


@dataclass(frozen=True)
class Launch:
    """One grid launch of a kernel's entry point. A kernel may be several launches, run in order on one stream.

    Attributes:
        entry: the `extern "C"` symbol.
        grid: three extents.
        block: threads per block.
        shared_bytes: dynamic shared memory per block; kdgen kernels have no static shared memory.
        when: condition over the dimensions (`"T <= 8"`); empty means always.
        cooperative: all blocks must be resident together (grid-wide barriers).
        programmatic: programmatic dependent launch: may start before its predecessor ends; the kernel waits itself.
    """

    entry: str
    grid: tuple[Extent, Extent, Extent]
    block: int
    shared_bytes: int = 0
    when: str = ""
    cooperative: bool = False
    programmatic: bool = False


@dataclass(frozen=True)
class Contract:
    """Everything a caller must know about one compiled kernel.

    Attributes:
        family: the kernel family's name.
        arguments: in signature order.
        capacities: dimension symbol to its allowed range.
        launches: in order.
        pinned: parameters that decide result bits; two builds with equal `pinned` are bit-compatible.
        layouts: argument name to the name of its non-plain memory layout.
    """

    family: str
    arguments: tuple[Argument, ...]
    capacities: Mapping[str, Capacity]
    launches: tuple[Launch, ...]
    pinned: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> tuple[str, ...]:
        """The distinct entry symbols, in order of first launch."""
        return tuple(dict.fromkeys(launch.entry for launch in self.launches))

    def argument(self, name: str) -> Argument:
        """The argument of that name; KeyError when there is none."""
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise KeyError(name)

    def extent(self, name: str, axis: int) -> int:
        """A fixed extent of an argument; ValueError when it depends on the launch."""
        size = self.argument(name).shape[axis]
        if not isinstance(size, int):
            raise ValueError(f"axis {axis} of argument '{name}' is {size}, which depends on the launch")
        return size

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contract:
        """Rebuild a contract from `to_json`'s output; KeyError or TypeError when the data has another shape."""
        return cls(
            family=data["family"],
            arguments=tuple(Argument(**{**item, "shape": tuple(item["shape"])}) for item in data["arguments"]),
            capacities={name: Capacity(**item) for name, item in data["capacities"].items()},
            launches=tuple(Launch(**{**item, "grid": tuple(item["grid"])}) for item in data["launches"]),
            pinned=dict(data["pinned"]),
            layouts=dict(data["layouts"]),
        )
