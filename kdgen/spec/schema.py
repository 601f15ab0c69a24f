"""JSON Schema of the spec files, so that editors complete and check them as they are typed.

The schema is looser than the loader in one way: wherever a scalar or a list may be derived, the text `${…}` is admitted beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from kdgen.errors import UsageError
from kdgen.kernels import families
from kdgen.spec.model import FILES, PLAIN_KEYS

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_EXPRESSION = {"$ref": "#/$defs/expression"}
_SCALAR_TYPES = ("integer", "number", "boolean")


def json_schema(kind: Literal["kernel", "engine"] | str) -> dict[str, Any]:
    """The schema of a kind of spec file, draft 2020-12; the same bytes for the same kdgen.

    Raises:
        UsageError: another kind.
    """
    if kind not in FILES:
        raise UsageError(f"no schema for '{kind}'; allowed: {', '.join(FILES)}")
    base = FILES[kind].model_json_schema()
    definitions: dict[str, Any] = base.pop("$defs", {})
    entry = base if kind == "kernel" else definitions["KernelEntry"]
    _choose_params(entry, definitions)
    schema: dict[str, Any] = {
        "$schema": DRAFT,
        "title": f"kdgen {kind} spec",
        **{key: value for key, value in base.items() if key != "title"},
    }
    for name, node in list(definitions.items()):
        definitions[name] = _admit_expressions(node)
    schema = dict(_admit_expressions(schema))
    schema = _with_inheritance(schema, definitions)
    definitions["expression"] = {"type": "string", "pattern": r"^\$\{.*\}$", "description": "a value derived from others of the spec"}
    schema["$defs"] = dict(sorted(definitions.items()))
    return schema


def _with_inheritance(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema for files with and without `base`: what a file inherits need not stand in it, at any depth."""
    head: dict[str, Any] = {key: schema.pop(key) for key in ("$schema", "title", "description") if key in schema}
    loose = {f"inherits.{name}": _loosened(node) for name, node in definitions.items()}
    loose["inherits"] = {**_loosened(schema), "required": ["kind", "name"]}
    definitions.update(loose)
    definitions["whole"] = schema
    return {**head, "if": {"required": ["base"]}, "then": {"$ref": "#/$defs/inherits"}, "else": {"$ref": "#/$defs/whole"}}


def _loosened(node: Any) -> Any:
    """A copy of a schema without demands for keys, that refers to such copies."""
    if isinstance(node, list):
        return [_loosened(item) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {}
    for key, value in node.items():
        if key == "if":  # a condition, not a demand
            copy[key] = value
        elif key == "$ref" and value != _EXPRESSION["$ref"]:
            copy[key] = value.replace("#/$defs/", "#/$defs/inherits.")
        elif key != "required" or not isinstance(value, list):
            copy[key] = _loosened(value)
    return copy


def write_schemas(directory: Path) -> tuple[Path, ...]:
    """Write `kernel.json` and `engine.json` into `directory`, where the modelines of spec files look for them."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in FILES:
        path = directory / f"{kind}.json"
        text = json.dumps(json_schema(kind), indent=1) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        paths.append(path)
    return tuple(paths)


def _choose_params(entry: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Let `family` decide what `params` must be."""
    known = families()
    entry["properties"]["family"] = {**entry["properties"]["family"], "enum": list(known)}
    entry["allOf"] = []
    for name, family in known.items():
        params = family.params.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        for inner, node in params.pop("$defs", {}).items():
            definitions[f"{name}.{inner}"] = node
        definitions[f"{name}.params"] = {**params, "title": f"{name} parameters", "description": family.summary}
        then: dict[str, Any] = {"properties": {"params": {"$ref": f"#/$defs/{name}.params"}}}
        if params.get("required"):
            then["required"] = ["params"]
        entry["allOf"].append({"if": {"properties": {"family": {"const": name}}, "required": ["family"]}, "then": then})
    if not entry["allOf"]:
        del entry["allOf"]


def _admit_expressions(node: Any, key: str = "") -> Any:
    """A copy of a schema in which `${…}` may stand for any scalar, but not for the keys that are read as written."""
    if isinstance(node, list):
        return [_admit_expressions(item) for item in node]
    if not isinstance(node, dict):
        return node
    if key in PLAIN_KEYS:
        return node
    if node.get("type") == "array" and key:
        return {"anyOf": [{**node, "items": _admit_expressions(node.get("items", {}), "items")}, _EXPRESSION]}
    if node.get("type") in _SCALAR_TYPES or "enum" in node or ("const" in node and key):
        outside = {name: node[name] for name in ("description", "default", "title") if name in node}
        inside = {name: value for name, value in node.items() if name not in outside}
        return {**outside, "anyOf": [inside, _EXPRESSION]}
    result: dict[str, Any] = {"additionalProperties": False} if "patternProperties" in node else {}
    for name, value in node.items():
        match name:
            case "properties" | "patternProperties" | "$defs":
                result[name] = {inner: _admit_expressions(item, inner if name == "properties" else "") for inner, item in value.items()}
            case "if" | "default" | "required":
                result[name] = value
            case _:
                result[name] = _admit_expressions(value, name if name in ("items", "additionalProperties") else "")
    return result
