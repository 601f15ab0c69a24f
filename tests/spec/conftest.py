"""A made-up kernel family, and ways to load a spec from text and to see its faults."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from kdgen.contract import Contract, Launch
from kdgen.errors import Fault, SpecError
from kdgen.kernels.base import Family, FamilyParams, SharedLayout
from kdgen.spec import Spec, load_spec


class Tile(FamilyParams):
    m: Annotated[int, Field(ge=1, le=256)]
    n: Annotated[int, Field(ge=8, le=256, multiple_of=8)] = 64


class Params(FamilyParams):
    tile: Tile
    stages: Annotated[int, Field(ge=1, le=8)] = 2
    mode: Literal["fast", "exact"] = "exact"
    scale: Annotated[float, Field(gt=0)] = 1.0
    chain: bool = False
    splits: Annotated[tuple[int, ...], Field(max_length=4)] = ()

    @model_validator(mode="after")
    def stages_fit(self) -> Params:
        if self.stages > self.tile.m:
            raise ValueError(f"stages = {self.stages} must not exceed tile.m = {self.tile.m}")
        return self


def contract(p: Params, target: Any) -> Contract:
    if p.tile.n == 24:
        raise ValueError("tile.n = 24 does not divide the warp's work; use a power of two")
    return Contract("toy", (), {}, (Launch("toy", (1, 1, 1), 4 * p.tile.m),))


TOY = Family(
    name="toy",
    summary="a family for tests",
    params=Params,
    contract=contract,
    shared=lambda p, target: SharedLayout.place(target, ("ring", p.stages * p.tile.m * p.tile.n * 4, 16)),
    reference=lambda p, inputs: {},
    cases=lambda p, rng: iter(()),
)


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("load", "fields", "schema"):
        monkeypatch.setattr(f"kdgen.spec.{module}.families", lambda: {"toy": TOY})


class Loader:
    """Loads specs from text; `faults` gives what is wrong as (line, key, message)."""

    def __init__(self, directory: Path):
        self.path = directory / "spec.yaml"

    def load(self, text: str | bytes, *overrides: str) -> Spec:
        data = text if isinstance(text, bytes) else textwrap.dedent(text).encode()
        self.path.write_bytes(data)
        return load_spec(str(self.path), overrides)

    def faults(self, text: str | bytes, *overrides: str) -> list[Fault]:
        with pytest.raises(SpecError) as caught:
            self.load(text, *overrides)
        assert all(fault.file == str(self.path) for fault in caught.value.faults)
        return list(caught.value.faults)

    def fault(self, text: str | bytes, *overrides: str) -> Fault:
        """The only fault."""
        found = self.faults(text, *overrides)
        assert len(found) == 1, [str(item) for item in found]
        return found[0]


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


KERNEL = """\
kind: kernel
name: toy
family: toy
targets: [sm_120, host]
params:
  tile:
    m: 16
    n: 32
"""


@pytest.fixture
def kernel_text() -> str:
    return KERNEL


@pytest.fixture
def engine_text() -> str:
    shipped = Path(__file__).parents[2] / "specs" / "engines" / "tiny.yaml"
    head = shipped.read_text().split("\nkernels:")[0]
    return head + "\nkernels:\n  probe:\n    family: toy\n    params:\n      tile: {m: 16, n: 32}\n"
