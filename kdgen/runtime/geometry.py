"""What a contract's formulas come to for given dimensions: array shapes, values of dimension arguments, grids.

Evaluating formulas costs more than a launch, and calls repeat the same few dimensions, so results are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kdgen.contract import DTYPE_BYTES, Contract, Launch
from kdgen.errors import ArtifactError, LaunchError
from kdgen.expressions import ExpressionError, evaluate, extent, names_in
from kdgen.runtime.array import Shape

#: Largest grid extents of every CUDA device.
GRID_LIMITS = ((1 << 31) - 1, 65_535, 65_535)
_KEPT = 512


@dataclass(frozen=True)
class Geometry:
    """A contract at given dimensions.

    Attributes:
        shapes: of every argument, in signature order; () for scalars and dimensions.
        values: of every dimension argument, in signature order; 0 for all others.
        launches: (launch, grid) of those launches that have blocks to run.
    """

    shapes: tuple[Shape, ...]
    values: tuple[int, ...]
    launches: tuple[tuple[Launch, tuple[int, int, int]], ...]


class Geometries:
    """The geometries of one kernel.

    Args:
        kernel: name, for messages.
        contract: of the kernel.

    Raises:
        ArtifactError: the contract has a formula that is none, or an unknown dtype.
    """

    def __init__(self, kernel: str, contract: Contract):
        self.kernel = kernel
        self.contract = contract
        self._kept: OrderedDict[tuple[int, ...], Geometry] = OrderedDict()
        formulas = [size for argument in contract.arguments for size in argument.shape]
        formulas += [size for launch in contract.launches for size in launch.grid]
        formulas += [launch.when for launch in contract.launches if launch.when]
        try:
            names = set(contract.capacities).union(*(names_in(text) for text in formulas if isinstance(text, str)))
        except ExpressionError as error:
            raise ArtifactError(f"kernel '{kernel}': its contract is damaged: {error}; rebuild it") from error
        if bad := next((a for a in contract.arguments if a.dtype not in DTYPE_BYTES), None):
            raise ArtifactError(f"kernel '{kernel}': argument '{bad.name}' has the unknown dtype '{bad.dtype}'; upgrade kdgen or rebuild")
        #: Every dimension, sorted; geometries are kept by their values in this order.
        self.symbols: tuple[str, ...] = tuple(sorted(names))

    def at(self, dims: Mapping[str, int]) -> Geometry:
        """The geometry at `dims`, which has a value for every one of `symbols`.

        Raises:
            LaunchError: a dimension is out of its capacity, or a grid is too large for any device.
        """
        key = tuple([dims[symbol] for symbol in self.symbols])
        found = self._kept.get(key)
        if found is None:
            found = self._make(dims)
            self._kept[key] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def check_capacity(self, symbol: str, value: int) -> None:
        """LaunchError when a dimension is out of its capacity."""
        capacity = self.contract.capacities.get(symbol)
        if value < 0 or (capacity is not None and not capacity.minimum <= value <= capacity.maximum):
            bounds = f"{self.kernel} was built for {capacity.minimum}…{capacity.maximum}" if capacity else "a dimension is at least 0"
            raise LaunchError(f"{symbol} = {value}, {bounds}")

    def shape(self, argument: int, dims: Mapping[str, int]) -> Shape:
        """The shape of argument number `argument`; LaunchError when a formula of it fails."""
        item = self.contract.arguments[argument]
        try:
            shape = tuple(extent(size, dims) for size in item.shape)
        except ExpressionError as error:
            raise LaunchError(f"{self.kernel}: shape of '{item.name}': {error}") from error
        if min(shape, default=0) < 0:
            raise LaunchError(f"{self.kernel}: '{item.name}' would have the shape {list(shape)} at {show_dims(dims)}")
        return shape

    def _make(self, dims: Mapping[str, int]) -> Geometry:
        grids = []
        try:
            for launch in self.contract.launches:
                if not launch.when or evaluate(launch.when, dims):
                    grids.append((launch, (extent(launch.grid[0], dims), extent(launch.grid[1], dims), extent(launch.grid[2], dims))))
        except ExpressionError as error:
            raise LaunchError(f"{self.kernel}: grid at {show_dims(dims)}: {error}") from error
        grids = [(launch, grid) for launch, grid in grids if 0 not in grid]
        for symbol in self.symbols:
            # An empty batch is no error as long as it leaves nothing to run: a dimension may then be 0.
            if dims[symbol] != 0 or grids:
                self.check_capacity(symbol, dims[symbol])
        for launch, grid in grids:
            if any(not 0 < size <= limit for size, limit in zip(grid, GRID_LIMITS, strict=True)):
                raise LaunchError(f"{self.kernel}: grid {grid} of '{launch.entry}' at {show_dims(dims)}; at most {GRID_LIMITS} is possible")
        values, shapes = [], []
        for index, argument in enumerate(self.contract.arguments):
            shape = self.shape(index, dims)
            values.append(shape[0] if argument.role == "dimension" else 0)
            shapes.append(() if argument.role in ("scalar", "dimension") else shape)
        return Geometry(tuple(shapes), tuple(values), tuple(grids))


def show_dims(dims: Mapping[str, int]) -> str:
    """Dimensions for a message: `S = 2, T = 9`."""
    return ", ".join(f"{name} = {value}" for name, value in sorted(dims.items())) or "no dimensions"
