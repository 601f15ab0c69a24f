"""The JSON Schema: valid itself, admits what the loader admits, refuses what an editor should underline."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kdgen.errors import UsageError
from kdgen.spec import json_schema, write_schemas

jsonschema = pytest.importorskip("jsonschema")
SPECS = Path(__file__).parents[2] / "specs"


def validator(kind: str) -> Any:
    schema = json_schema(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_deterministic():
    assert json.dumps(json_schema("engine")) == json.dumps(json_schema("engine"))
    with pytest.raises(UsageError, match="allowed: kernel, engine"):
        json_schema("spec")


@pytest.mark.parametrize("path", sorted(SPECS.glob("[ek]*/*.yaml")), ids=lambda path: path.stem)
def test_shipped_specs_are_admitted(path, monkeypatch):
    monkeypatch.undo()  # the real families
    data = yaml.safe_load(path.read_text())
    assert [error.message for error in validator(data["kind"]).iter_errors(data)] == []


def test_kernel_spec(kernel_text):
    check = validator("kernel")
    good = yaml.safe_load(kernel_text)
    assert check.is_valid(good)
    for path, value, valid in (
        (("params", "tile", "n"), "${tile.m * 2}", True),
        (("params", "chain"), "${tile.m > 2}", True),
        (("params", "mode"), "${'fast'}", True),
        (("params", "splits"), [1, "${tile.m}"], True),
        (("params", "splits"), "${(1, tile.m)}", True),
        (("params", "splits"), [1, "2"], False),
        (("allow_spill",), "${params.chain}", True),
        (("params", "tile", "n"), 12, False),
        (("params", "tile", "n"), "12", False),
        (("params", "tile", "q"), 1, False),
        (("params", "mode"), "quick", False),
        (("params", "tile"), None, False),
        (("family",), "other", False),
        (("family",), "${x}", False),
        (("name",), "../x", False),
        (("kind",), "engine", False),
        (("targets",), ["sm_1"], False),
        (("targets",), [], False),
        (("tragets",), ["host"], False),
    ):
        data: Any = copy.deepcopy(good)
        inner = data
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = value
        assert check.is_valid(data) == valid, (path, value)
    del good["params"]
    assert not check.is_valid(good)


def test_engine_spec(engine_text):
    check = validator("engine")
    good = yaml.safe_load(engine_text)
    assert [error.message for error in check.iter_errors(good)] == []
    for change in (
        lambda data: data["kernels"]["probe"]["params"]["tile"].update(n=3),
        lambda data: data["kernels"].update({"Bad-name": {"family": "toy", "params": {"tile": {"m": 1}}}}),
        lambda data: data["kernels"]["probe"].update(family="none"),
        lambda data: data["model"].update(hidden=0),
        lambda data: data["model"].pop("rope"),
        lambda data: data["model"]["quantization"].update(bits=5),
        lambda data: data["tree"].update(budget=256),
    ):
        data = copy.deepcopy(good)
        change(data)
        assert not check.is_valid(data)


def test_written_where_the_modelines_look(tmp_path):
    paths = write_schemas(tmp_path / "schema")
    assert [path.name for path in paths] == ["kernel.json", "engine.json"]
    assert json.loads(paths[1].read_text()) == json_schema("engine")
    before = paths[0].stat().st_mtime_ns
    write_schemas(tmp_path / "schema")
    assert paths[0].stat().st_mtime_ns == before


def test_a_spec_with_a_base_may_leave_things_out(kernel_text):
    check = validator("kernel")
    assert check.is_valid({"base": "other.yaml", "kind": "kernel", "name": "own", "params": {"tile": {"n": 32}}})
    assert not check.is_valid({"base": "other.yaml", "kind": "kernel", "params": {}})
    assert not check.is_valid({"base": "other.yaml", "kind": "kernel", "name": "own", "unknown": 1})
    assert not check.is_valid({"kind": "kernel", "name": "own", "params": {"tile": {"n": 32}}})
