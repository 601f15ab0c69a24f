"""Specs on top of others: what is inherited, what is replaced, where faults are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdgen.errors import SpecError
from kdgen.spec import load_spec

BASE = """\
kind: kernel
name: base
description: of the base alone
family: toy
params:
  tile: {m: 8, n: 32}
  stages: 2
  splits: [1, 2]
targets: [sm_90]
"""


@pytest.fixture
def write(tmp_path: Path):
    def put(name: str, text: str) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    put("base.yaml", BASE)
    return put


def faults_of(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    return [str(fault) for fault in caught.value.faults]


def test_what_a_spec_says_replaces_what_it_inherits(write):
    path = write("own.yaml", "base: base.yaml\nkind: kernel\nname: own\nparams:\n  tile: {n: 64}\n  splits: [3]\n")
    spec = load_spec(path)
    assert (spec.name, spec.targets) == ("own", ("sm_90",))
    params = spec.kernels[0].params
    assert (params.tile.m, params.tile.n, params.stages, params.splits) == (8, 64, 2, (3,))
    assert load_spec(path, ["tile.m=16"]).kernels[0].params.tile.m == 16


def test_an_equal_spec_in_one_file_has_the_same_digest(write):
    own = write("own.yaml", "base: base.yaml\nkind: kernel\nname: own\nparams: {stages: 4}\n")
    whole = write(
        "whole.yaml",
        BASE.replace("name: base\n", "name: own\n").replace("description: of the base alone\n", "").replace("stages: 2", "stages: 4"),
    )
    assert load_spec(own).digest == load_spec(whole).digest


def test_bases_have_bases_and_other_directories(write):
    write("deep/middle.yaml", "base: ../base.yaml\nkind: kernel\nname: middle\nparams: {stages: 3}\n")
    path = write("own.yaml", "base: deep/middle.yaml\nkind: kernel\nname: own\nparams: {mode: fast}\n")
    params = load_spec(path).kernels[0].params
    assert (params.stages, params.mode, params.tile.n) == (3, "fast", 32)


def test_a_fault_in_an_inherited_value_names_the_line_of_the_base(write):
    write("base.yaml", BASE.replace("stages: 2", "stages: 99"))
    write("middle.yaml", "base: base.yaml\nkind: kernel\nname: middle\n")
    path = write("own.yaml", "base: middle.yaml\nkind: kernel\nname: own\nparams: {scale: -1.0}\n")
    found = faults_of(path)
    assert any("base.yaml:7: params.stages: value 99, allowed an integer 1…8" in fault for fault in found)
    assert any(f"{path}:4: params.scale: value -1.0" in fault for fault in found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("base: nowhere.yaml", "nowhere.yaml"),
        ("base: own.yaml", "it builds on itself"),
        ("base: 3", "value 3, allowed: the path of a spec file"),
        ("base: [base.yaml]", "allowed: the path of a spec file"),
    ],
)
def test_a_base_that_cannot_be_used(write, line, message):
    path = write("own.yaml", f"{line}\nkind: kernel\nname: own\n")
    assert any(message in fault for fault in faults_of(path))


def test_bases_in_a_circle(write):
    write("a.yaml", "base: b.yaml\nkind: kernel\nname: a\n")
    path = write("b.yaml", "base: a.yaml\nkind: kernel\nname: b\n")
    assert any("it builds on itself" in fault for fault in faults_of(path))


def test_faults_of_a_base_that_cannot_be_read_are_reported_there(write):
    write("base.yaml", "kind: kernel\nkind: kernel\n")
    path = write("own.yaml", "base: base.yaml\nkind: kernel\nname: own\n")
    assert any("base.yaml:2" in fault for fault in faults_of(path))


def test_a_base_is_not_chosen_by_an_override(write):
    path = write("own.yaml", "base: base.yaml\nkind: kernel\nname: own\n")
    assert any("a base is chosen in the file" in fault for fault in faults_of(path, "base=other.yaml"))
