from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from kdgen.errors import UsageError
from kdgen.kdtr import Writer, pack_int4
from kdgen.kdtr.cli import app, parse_slice

RUN = CliRunner()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.kdtr"
    with Writer(path, {"model": "demo"}) as writer:
        writer.add("w", np.arange(12, dtype=np.int32).reshape(3, 4))
        writer.add("b", np.array([1.5, 2.5], ml_dtypes.bfloat16))
        writer.add("q", pack_int4(np.arange(-8, 8).reshape(2, 8)), int4=True)
    return path


def test_ls(file: Path) -> None:
    lines = RUN.invoke(app, ["ls", str(file)]).stdout.splitlines()
    assert lines[0].split() == ["name", "dtype", "shape", "offset", "bytes", "crc32"]
    assert lines[1].split()[:5] == ["w", "i32", "[3,", "4]", "64"]
    assert lines[-1] == 'model = "demo"'


def test_ls_json(file: Path) -> None:
    found = json.loads(RUN.invoke(app, ["ls", "--json", str(file)]).stdout)
    assert found["attributes"] == {"model": "demo"}
    assert [(t["name"], t["dtype"], t["shape"], t["bytes"]) for t in found["tensors"]] == [
        ("w", "i32", [3, 4], 48), ("b", "bf16", [2], 4), ("q", "int4", [2, 8], 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["w", "--slice", "1:,0"], "[4 8]"),
        (["w", "--slice", "-1"], "[ 8  9 10 11]"),
        (["b"], "[1.5 2.5]"),
        (["q", "--slice", "1,::2"], "[0 2 4 6]"),
        (["q", "--slice", ":,0"], "[-8  0]"),
    ],
)
def test_cat(file: Path, arguments: list[str], output: str) -> None:
    assert RUN.invoke(app, ["cat", str(file), *arguments]).stdout.strip() == output


@pytest.mark.parametrize("part", ["1:2:3:4", "a", "::0", "1,,2", "1.5"])
def test_slices_that_are_none(part: str) -> None:
    with pytest.raises(UsageError, match="not a slice"):
        parse_slice(part)


@pytest.mark.parametrize(("part", "message"), [("0,0,0", "3 axes, but 'w' has 2"), ("3", "index 3 of axis 0, which has 3 elements")])
def test_slices_that_do_not_fit(file: Path, part: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RUN.invoke(app, ["cat", str(file), "w", "--slice", part], catch_exceptions=False)


def test_check(file: Path) -> None:
    good = RUN.invoke(app, ["check", str(file)])
    assert (good.exit_code, good.stdout) == (0, f"{file}: ok, 3 tensors, 60 bytes\n")
    data = bytearray(file.read_bytes())
    data[64] ^= 1
    file.with_name("bad.kdtr").write_bytes(data)
    bad = RUN.invoke(app, ["check", str(file), str(file.with_name("bad.kdtr"))])
    assert bad.exit_code == 1
    assert "tensor 'w' is damaged" in bad.stdout
    assert f"{file}: ok" in bad.stdout
