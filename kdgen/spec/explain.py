"""Validation errors of pydantic in the words of a spec's author: `value 300, allowed an integer 0…255`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kdgen.spec.document import Document, Path, keys_of

M = TypeVar("M", bound=BaseModel)
Schema = Mapping[str, Any]


def validate(model: type[M], document: Document, base: Path, data: Any) -> M | None:
    """An instance of `model` from the mapping at `base`, or None after reporting everything wrong with it.

    Args:
        model: what the mapping must be.
        document: receives the faults.
        base: where the mapping stands in the document.
        data: the mapping, as read from YAML.
    """
    try:
        # JSON mode is strict about lossy conversions, yet takes a list for a tuple and 1 for 1.0, as YAML has no other way.
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        errors = error.errors(include_url=False)
    schema = model.model_json_schema()
    # A derived value is looked at after those it may come from, so that only the cause of a fault is reported.
    for item in sorted(errors, key=lambda item: _depth(document, (*base, *_place(item["loc"], data, False)[0]))):
        path, value = _place(item["loc"], data, missing=item["type"] == "missing")
        place = (*base, *path)
        if item["loc"][-1:] == ("[key]",):
            form = _key_form(_resolve(_schema_at(schema, path[:-1]), schema))
            document.fault(place, f"name '{path[-1]}', allowed {form}")
        elif item["type"] == "extra_forbidden":
            names = list(_resolve(_schema_at(schema, path[:-1]), schema).get("properties", {}))
            if not document.is_suspect(place[:-1]):
                document.fault(place, unknown_key(str(path[-1]), names))
        elif not document.is_suspect(place):
            document.fault(place, _message(item, value, _describe(_schema_at(schema, path), schema), document.origin_of(place)))
    return None


def unknown_key(name: str, allowed: list[str]) -> str:
    """The message about a key nobody knows."""
    near = get_close_matches(name, allowed, 1)
    guess = f"did you mean '{near[0]}'? " if near else ""
    return f"unknown key; {guess}allowed: {', '.join(allowed) or 'none'}"


def shown(value: Any) -> str:
    """A value as YAML would write it, shortened."""
    if isinstance(value, str):
        return f"'{value[:60]}…'" if len(value) > 60 else f"'{value}'"
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value, default=str)
    return f"{text[:60]}…" if len(text) > 60 else text


def _depth(document: Document, path: Path) -> int:
    """How many derivations lead to a value; they never form a circle, or they would have been reported."""
    sources = document.derived[path].sources if path in document.derived else []
    return 1 + max((_depth(document, source) for source in sources), default=0) if sources else 0


def _place(loc: tuple[int | str, ...], data: Any, missing: bool) -> tuple[Path, Any]:
    """The path in `data` that pydantic's location means: unions add parts of their own, which lead nowhere."""
    path: Path = ()
    for index, part in enumerate(loc):
        if part in keys_of(data):
            data = data[part]
        elif missing and index == len(loc) - 1:
            data = None
        else:
            continue
        path = (*path, part)
    return path, data


def _message(error: Mapping[str, Any], value: Any, allowed: str, origin: str) -> str:
    match error["type"]:
        case "missing":
            return f"missing; needs {allowed}"
        case "value_error" | "assertion_error":
            reason = str(error["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
            return reason if isinstance(value, dict) else f"value {shown(value)}{origin}: {reason}"
        case "finite_number":
            return f"value {shown(value)}{origin}, allowed finite numbers"
        case _:
            return f"value {shown(value)}{origin}, allowed {allowed}"


def _resolve(node: Schema, root: Schema) -> Schema:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return node


def _schema_at(root: Schema, path: Path) -> Schema:
    node: Schema = root
    for part in path:
        node = _step(node, part, root)
    return node


def _step(node: Schema, part: str | int, root: Schema) -> Schema:
    node = _resolve(node, root)
    for choice in node.get("anyOf", node.get("oneOf", ())):
        inner = _step(choice, part, root)
        if inner:
            return inner
    if isinstance(part, int):
        prefix = node.get("prefixItems", ())
        found = prefix[part] if part < len(prefix) else node.get("items", {})
    else:
        found = node.get("properties", {}).get(part) or next(iter(node.get("patternProperties", {}).values()), {})
    return found if isinstance(found, Mapping) else {}


def _describe(node: Schema, root: Schema) -> str:
    """What a schema allows, in words."""
    node = _resolve(node, root)
    choices = node.get("anyOf", node.get("oneOf"))
    if choices:
        return " or ".join(_describe(choice, root) for choice in choices)
    if "const" in node:
        return shown(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(str(item) if isinstance(item, str) else shown(item) for item in node["enum"])
    match node.get("type"):
        case "integer":
            return _number("an integer", node)
        case "number":
            return _number("a number", node)
        case "boolean":
            return "true or false"
        case "string":
            limit = f", at most {node['maxLength']} characters" if "maxLength" in node else ""
            form = f" of the form {node['pattern']}" if "pattern" in node else ""
            return f"text{form}{limit}"
        case "array":
            return _array(node, root)
        case "null":
            return "null"
        case "object":
            keys = ", ".join(node.get("properties", ()))
            return f"a mapping with {keys}" if keys else "a mapping"
        case _:
            return "another value"


def _key_form(node: Schema) -> str:
    """What the keys of a mapping with free names may be."""
    form = next(iter(node.get("patternProperties", {})), "")
    return _describe({"type": "string", **({"pattern": form} if form else {}), **node.get("propertyNames", {})}, {})


def _number(noun: str, node: Schema) -> str:
    if "multipleOf" in node:
        noun = f"{noun}, a multiple of {node['multipleOf']},"
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{noun} {low}…{high}"
    lower = f"from {low}" if low is not None else f"above {above}" if above is not None else ""
    upper = f"up to {high}" if high is not None else f"below {below}" if below is not None else ""
    return " ".join(part for part in (noun, lower, upper) if part).rstrip(",")


def _array(node: Schema, root: Schema) -> str:
    if "prefixItems" in node:
        return "a list of " + ", ".join(_describe(item, root) for item in node["prefixItems"])
    low, high = node.get("minItems"), node.get("maxItems")
    count = f"{low}…{high} items, " if low is not None and high is not None else f"at least {low} items, " if low else ""
    return f"a list of {count}each {_describe(node.get('items', {}), root)}"
