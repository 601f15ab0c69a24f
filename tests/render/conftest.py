"""A made-up kernel family over a private templates directory with the real device headers."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from kdgen.contract import Argument, Contract, Launch
from kdgen.kernels.base import Family, FamilyParams, SharedLayout
from kdgen.render import Source, render_kernel
from kdgen.spec import KernelSpec
from kdgen.targets import TARGETS

DEVICE = Path(__file__).parents[2] / "templates" / "device"


class Tile(FamilyParams):
    n: int = 8


class Params(FamilyParams):
    tile: Tile = Tile()
    scale: float = 0.1
    chain: bool = True
    mode: Literal["add", "mul"] = "add"
    sizes: tuple[int, ...] = (1, 2)
    note: str = "plain"


ARGUMENTS = (
    Argument("x", "bf16", ("T", 8)),
    Argument("y", "f32", ("T",), "out"),
    Argument("scratch", "u8", (64,), "workspace"),
    Argument("count", "i32", (), "scalar"),
    Argument("rows_of_x", "i64", ("T",), "dimension"),
)


class Workshop:
    """Writes templates and renders them."""

    def __init__(self, root: Path):
        self.root = root
        self.context: Mapping[str, Any] = {"rows": 4, "half": 0.5}
        self.launches = (Launch("toy", ("T", 1, 1), 64, 512),)
        self.arguments = ARGUMENTS

    def write(self, name: str, text: str) -> None:
        path = self.root / "templates" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def kernel(self, **params: Any) -> KernelSpec:
        family = Family(
            name="toy",
            summary="a family for tests",
            params=Params,
            contract=lambda p, target: Contract("toy", self.arguments, {}, self.launches),
            context=lambda p, target: self.context,
            shared=lambda p, target: SharedLayout.place(target, ("ring", 100, 16), ("flags", 8, 8)),
            reference=lambda p, inputs: {},
            cases=lambda p, rng: iter(()),
        )
        return KernelSpec("toy", family, Params(**params))

    def render(self, text: str | None = None, target: str = "host", marks: bool = False, **params: Any) -> Source:
        if text is not None:
            self.write("toy.cu.j2", text)
        return render_kernel(self.kernel(**params), TARGETS[target], marks)

    def body(self, expression: str, **params: Any) -> str:
        """What `{{ expression }}` renders as."""
        text = self.render('{{ kernel("toy") }} {}\n=<{{ ' + expression + " }}>=\n", **params).text
        return text.split("=<")[1].split(">=")[0]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    shutil.copytree(DEVICE, tmp_path / "templates" / "device")
    monkeypatch.setattr("kdgen.render.data.data_dir", lambda: tmp_path)
    return Workshop(tmp_path)
