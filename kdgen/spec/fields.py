"""What keys a spec may have at a path, and what they default to: questions about the models, asked with the file in hand."""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kdgen.kernels import families
from kdgen.spec.document import Path
from kdgen.spec.model import FILES, KernelEntry


def model_at(data: dict[str, Any], path: Path) -> type[BaseModel] | None:
    """The model of the mapping at `path`, or None where there is none (a plain value, an unknown kind or family)."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in FILES:
        return None
    entry, inner = _entry(data, path)
    if inner is not None and inner[:1] == ("params",):
        family = entry.get("family") if isinstance(entry, dict) else None
        known = families().get(family) if isinstance(family, str) else None
        return _descend(known.params, inner[1:]) if known else None
    if path[:1] == ("kernels",):
        return _descend(KernelEntry, path[2:]) if len(path) > 1 else None
    return _descend(FILES[kind], path)


def _entry(data: dict[str, Any], path: Path) -> tuple[Any, Path | None]:
    """The kernel entry that `path` leads into, and the rest of the path."""
    if data.get("kind") == "kernel":
        return data, path
    if path[:1] == ("kernels",) and len(path) > 1:
        kernels = data.get("kernels")
        return kernels.get(path[1]) if isinstance(kernels, dict) else None, path[2:]
    return None, None


def _descend(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    for part in path:
        if not isinstance(part, str) or part not in model.model_fields:
            return None
        inner = _model_of(model.model_fields[part].annotation)
        if inner is None:
            return None
        model = inner
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) is Annotated:
        return _model_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for item in get_args(annotation) if (found := _model_of(item))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def fields_at(data: dict[str, Any], path: Path) -> dict[str, FieldInfo]:
    """Key to field of the mapping at `path`; empty where no model is known."""
    model = model_at(data, path)
    return dict(model.model_fields) if model else {}


def default_of(data: dict[str, Any], path: Path) -> Any:
    """The value a left-out key has, as YAML would give it; None where it is required or unknown."""
    field = fields_at(data, path[:-1]).get(str(path[-1])) if path else None
    if field is None or field.is_required():
        return None
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value
