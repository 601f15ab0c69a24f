"""From the arguments of a call to launches: binding, and every check that keeps a wrong call from becoming a wrong result."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from kdgen.contract import DTYPE_BYTES, Argument, Contract
from kdgen.dtypes import accepts
from kdgen.errors import LaunchError
from kdgen.runtime.array import Array, Shape
from kdgen.runtime.device import Device, Prepared, Program
from kdgen.runtime.geometry import Geometries, show_dims
from kdgen.runtime.views import View

#: Kernels load 16 bytes at a time.
ALIGNMENT = 16
_FLOAT_FORMATS = {"f64": ("<d", "<Q"), "f32": ("<f", "<I"), "f16": ("<e", "<H")}


class BoundCall:
    """A checked call, ready to be launched again and again; it keeps its arrays alive.

    One bound call is for one thread at a time.

    Attributes:
        kernel: name.
        dims: value of every dimension.
    """

    def __init__(self, kernel: str, device: Device, dims: Mapping[str, int], launches: Sequence[Prepared]):
        self.kernel = kernel
        self.device = device
        self.dims = dict(dims)
        self._launches = tuple(launches)

    def launch(self, stream: Any = None, **options: Any) -> None:
        """Launch on `stream` without checking anything again.

        Args:
            stream: as in `Kernel.__call__`.
            options: the device's own launch options (host: order, copies, seed, threads).
        """
        handle = self.device.stream_handle(stream)
        for prepared in self._launches:
            prepared.launch(handle, **options)

    def __len__(self) -> int:
        """Number of grid launches; 0 when the dimensions leave nothing to do."""
        return len(self._launches)

    def __repr__(self) -> str:
        return f"<{self.kernel} at {show_dims(self.dims)}: {len(self)} launches>"


class _Parameter:
    """What the binder must know about one argument, looked up once."""

    __slots__ = ("argument", "dtype", "is_array", "name", "rank", "role", "symbols", "writes")

    def __init__(self, argument: Argument):
        self.argument = argument
        self.name = argument.name
        self.dtype = argument.dtype
        self.role = argument.role
        self.rank = len(argument.shape)
        self.is_array = argument.role not in ("scalar", "dimension")
        self.writes = argument.role in ("out", "inout", "workspace")
        self.symbols = [(axis, size) for axis, size in enumerate(argument.shape) if isinstance(size, str) and size.isidentifier()]


class Binder:
    """Binds calls of one kernel.

    Args:
        kernel: name, for messages.
        contract: what it takes.
        device: where it runs.
    """

    def __init__(self, kernel: str, contract: Contract, device: Device):
        self.kernel = kernel
        self.device = device
        self.geometries = Geometries(kernel, contract)
        self._parameters = [_Parameter(argument) for argument in contract.arguments]
        self._given = [parameter.name for parameter in self._parameters if parameter.role != "dimension"]
        self._known = set(self._given)
        self._dimensions = [index for index, parameter in enumerate(self._parameters) if parameter.role == "dimension"]

    def bind(
        self, program: Program, positional: Sequence[Any], named: Mapping[str, Any], extra: Mapping[str, int] | None, stream: int
    ) -> BoundCall:
        """Check a call and make its launches ready; arguments and errors as in `Kernel.bind`."""
        given = self._match(positional, named)
        dims: dict[str, int] = {}
        if extra:
            self._check_extra(extra)
            dims.update(extra)
        device = self.device
        values: list[int] = []
        arrays: list[tuple[str, Any]] = []
        shapes: list[Shape] = []
        for parameter in self._parameters:
            if not parameter.is_array:
                # A dimension's value is known at the end.
                values.append(0 if parameter.role == "dimension" else self._scalar(parameter, given[parameter.name]))
                shapes.append(())
                continue
            value = given[parameter.name]
            if isinstance(value, Array) and value.device is device and value.dtype == parameter.dtype:
                # An own array is aligned, contiguous, writable and here: nothing of that needs a check.
                pointer, shape, keep = value.pointer, value.shape, value
            else:
                view = self._view(parameter, value, stream)
                pointer, shape, keep = view.pointer, view.shape, view.keep
            if len(shape) != parameter.rank:
                raise self._wrong(parameter, f"has the shape {list(shape)}, expected {parameter.rank} dimensions: {_formula(parameter)}")
            for axis, symbol in parameter.symbols:
                if dims.setdefault(symbol, shape[axis]) != shape[axis]:
                    raise self._conflict(symbol, parameter, shape, dims[symbol], shapes)
            values.append(pointer)
            arrays.append((parameter.name, keep))
            shapes.append(shape)
        if len(dims) < len(self.geometries.symbols):
            raise self._unbound(dims)
        geometry = self.geometries.at(dims)
        if tuple(shapes) != geometry.shapes:
            raise self._misshapen(shapes, geometry.shapes, dims)
        for index in self._dimensions:
            values[index] = self._scalar(self._parameters[index], geometry.values[index])
        return BoundCall(self.kernel, device, dims, [program.prepare(launch, grid, values, arrays) for launch, grid in geometry.launches])

    def allocate(self, dims: Mapping[str, int]) -> dict[str, Array]:
        """New arrays for every output and workspace; arguments and errors as in `Kernel.allocate`."""
        self._check_extra(dims)
        for symbol, value in dims.items():
            if value != 0:
                self.geometries.check_capacity(symbol, value)
        return {
            parameter.name: self.device.empty(self.geometries.shape(index, dims), parameter.dtype)
            for index, parameter in enumerate(self._parameters)
            if parameter.role in ("out", "workspace")
        }

    def complete(self, given: Mapping[str, Any], extra: Mapping[str, int], fresh: Collection[str]) -> dict[str, Any]:
        """`given` and new arrays for every other output and workspace; as in `Kernel.complete`."""
        dims = dict(extra)
        for parameter in self._parameters:
            value = given.get(parameter.name)
            if parameter.is_array and value is not None:
                shape = value.shape if isinstance(value, Array) else self._view(parameter, value, 0).shape
                dims.update((symbol, shape[axis]) for axis, symbol in parameter.symbols if axis < len(shape) and symbol not in dims)
        for symbol, value in dims.items():
            if value != 0:
                self.geometries.check_capacity(symbol, value)
        return dict(given) | {
            parameter.name: self.device.empty(self.geometries.shape(index, dims), parameter.dtype)
            for index, parameter in enumerate(self._parameters)
            if (parameter.role in ("out", "workspace") or parameter.name in fresh) and parameter.name not in given
        }

    def _match(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        if len(positional) > len(self._given):
            raise LaunchError(
                f"{self.kernel}: got {len(positional)} positional arguments; it takes {len(self._given)}: {', '.join(self._given)}"
            )
        given = dict(zip(self._given, positional, strict=False))
        for name, value in named.items():
            if name in given:
                raise LaunchError(f"{self.kernel}: argument '{name}' is given twice, by position and by name")
            if name not in self._known:
                raise LaunchError(f"{self.kernel}: no argument '{name}'; it takes {', '.join(self._given)}")
            given[name] = value
        if len(given) < len(self._given):
            raise self._missing([name for name in self._given if name not in given])
        return given

    def _missing(self, names: Sequence[str]) -> LaunchError:
        roles = {parameter.name: parameter.role for parameter in self._parameters}
        listed = ", ".join(f"'{name}' ({roles[name]})" for name in names)
        hint = ""
        if any(roles[name] in ("out", "workspace") for name in names):
            hint = f"; outputs and workspaces are made by kernel.allocate({', '.join(f'{s}=…' for s in self.geometries.symbols)})"
        return LaunchError(f"{self.kernel}: missing {listed}{hint}")

    def _view(self, parameter: _Parameter, value: Any, stream: int) -> View:
        """An array of another library, or an own one that is not what it should be."""
        try:
            view = self.device.view(value, stream)
        except LaunchError as error:
            raise self._wrong(parameter, f": {error}") from error
        if not accepts(parameter.dtype, view.dtype):
            raise self._wrong(parameter, f"is {view.dtype}, expected {parameter.dtype} {_formula(parameter)}")
        if not view.contiguous:
            raise self._wrong(parameter, f"({view.dtype} {list(view.shape)}) is not C-contiguous; pass a contiguous copy")
        if parameter.writes and view.readonly:
            raise self._wrong(parameter, f"is read-only, and the kernel writes it (role {parameter.role})")
        if 0 not in view.shape:
            if not view.pointer:
                raise self._wrong(parameter, "has no memory (a null pointer)")
            if view.pointer % ALIGNMENT:
                place = f"starts at address {view.pointer:#x}, which is no multiple of {ALIGNMENT}"
                raise self._wrong(parameter, f"{place}; pass an aligned copy, such as device.array(…)")
        return view

    def _scalar(self, parameter: _Parameter, value: Any) -> int:
        """A scalar's bits."""
        dtype = parameter.dtype
        if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
            value = value.item()
        if dtype[0] in "iu":
            bits = DTYPE_BYTES[dtype] * 8
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if dtype[0] == "i" else (0, (1 << bits) - 1)
            if isinstance(value, float) and value.is_integer():
                raise self._wrong(parameter, f"is the float {value!r}, expected an integer ({dtype})")
            if not isinstance(value, int) or not low <= value <= high:
                raise self._wrong(parameter, f"is {value!r}, expected {dtype}: an integer from {low} to {high}")
            return value & (1 << bits) - 1
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(parameter, f"is {value!r}, expected a number ({dtype})")
        return float_bits(float(value), dtype)

    def _wrong(self, parameter: _Parameter, what: str) -> LaunchError:
        return LaunchError(f"{self.kernel}: argument '{parameter.name}'{'' if what.startswith(':') else ' '}{what}")

    def _conflict(self, symbol: str, parameter: _Parameter, shape: Shape, bound: int, shapes: Sequence[Shape]) -> LaunchError:
        # Say which argument had bound the symbol first; `dims=` had, if none did.
        source = f"dims={{'{symbol}': {bound}}}"
        for other, known in zip(self._parameters, shapes, strict=False):
            if other.is_array and any(s == symbol and known[axis] == bound for axis, s in other.symbols):
                source = f"'{other.name}' {list(known)}"
                break
        axis = next(axis for axis, s in parameter.symbols if s == symbol and shape[axis] != bound)
        return self._wrong(parameter, f"{list(shape)}: {symbol} = {shape[axis]} (axis {axis}), but {symbol} = {bound} by {source}")

    def _misshapen(self, shapes: Sequence[Shape], expected: Sequence[Shape], dims: Mapping[str, int]) -> LaunchError:
        for parameter, shape, wanted in zip(self._parameters, shapes, expected, strict=True):
            if shape != wanted:
                return self._wrong(parameter, f"has the shape {list(shape)}, expected {list(wanted)} ({show_dims(dims)})")
        return LaunchError(f"{self.kernel}: the shapes do not fit together")

    def _check_extra(self, dims: Mapping[str, int]) -> None:
        for name, value in dims.items():
            if name not in self.geometries.symbols:
                raise LaunchError(f"{self.kernel}: no dimension '{name}'; it has {', '.join(self.geometries.symbols) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise LaunchError(f"{self.kernel}: dimension {name} = {value!r}; a dimension is an integer")

    def _unbound(self, dims: Mapping[str, int]) -> LaunchError:
        missing = [symbol for symbol in self.geometries.symbols if symbol not in dims]
        example = ", ".join(f"'{symbol}': …" for symbol in missing)
        return LaunchError(f"{self.kernel}: no array's shape gives the dimension {', '.join(missing)}; pass dims={{{example}}}")


def float_bits(value: float, dtype: str) -> int:
    """The bits of a float scalar, rounded to nearest even."""
    if dtype == "bf16":
        bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
        if value != value:  # noqa: PLR0124 -- NaN: rounding must not carry it into an infinity
            return 0x7FC0
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    packed, unsigned = _FLOAT_FORMATS[dtype]
    result: int = struct.unpack(unsigned, struct.pack(packed, value))[0]
    return result


def _formula(parameter: _Parameter) -> str:
    return f"[{', '.join(map(str, parameter.argument.shape))}]"
