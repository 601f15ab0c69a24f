"""Derived values: a scalar `${expression}` over the other values of the spec.

In an engine spec names are paths from the root (`${model.kv_lora_rank + model.qk_rope_head_dim}`); in a kernel spec they are its own
parameters (`${tile.m * 2}`). A name may itself be derived, or be left out of the file when its model has a default.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from kdgen.expressions import ExpressionError, evaluate, names_in
from kdgen.spec.document import Derivation, Document, Path, dotted
from kdgen.spec.fields import default_of
from kdgen.spec.model import PLAIN_KEYS

_WHOLE = re.compile(r"\$\{(.*)\}\Z", re.DOTALL)
_LONGEST_CHAIN = 64


class _UnresolvableError(Exception):
    """The value depends on one that is reported already."""


def derive(document: Document) -> None:
    """Replace every `${expression}` in `document.data` by its value, and note its origin in `document.derived`.

    An expression that cannot be evaluated is reported, and its path is then suspect.
    """
    _Deriver(document).run()


class _Deriver:
    def __init__(self, document: Document):
        self.document = document
        self.base: Path = ("params",) if document.data.get("kind") == "kernel" else ()
        self.texts: dict[Path, str] = {}
        self.values: dict[Path, Any] = {}
        self.sources: dict[Path, list[Path]] = {}
        self.failed: set[Path] = set()

    def run(self) -> None:
        for path, value in list(_leaves((), self.document.data)):
            if not isinstance(value, str) or "${" not in value or _is_plain(path):
                continue
            match = _WHOLE.match(value)
            if match and "${" not in match[1]:
                self.texts[path] = match[1].strip()
            else:
                self.document.fault(path, f"value '{value}': an expression must be the whole value: ${{…}}")
        for path in self.texts:
            try:
                self.resolve(path, ())
            except _UnresolvableError:
                self.document.suspects.add(path)
        for path, value in self.values.items():
            _put(self.document.data, path, value)
            self.document.derived[path] = Derivation(self.texts[path], self.sources.get(path, []))

    def resolve(self, path: Path, asking: tuple[Path, ...]) -> Any:
        """The value of the expression at `path`; `asking` are the expressions that need it."""
        if path in self.values:
            return self.values[path]
        if path in self.failed:
            raise _UnresolvableError
        if path in asking:
            chain = " → ".join(dotted(item) for item in (*asking[asking.index(path) :], path))
            raise self.fail(path, f"depends on itself: {chain}")
        if len(asking) >= _LONGEST_CHAIN:
            raise self.fail(path, f"needs a chain of more than {_LONGEST_CHAIN} derived values")
        text = self.texts[path]
        try:
            known = {name: self.look_up(name, path, (*asking, path)) for name in sorted(names_in(text))}
            value = evaluate(text, known)
        except (ExpressionError, RecursionError) as error:
            raise self.fail(path, f"'${{{text}}}': {error}") from error
        except _UnresolvableError:
            self.failed.add(path)
            raise
        if isinstance(value, float) and not math.isfinite(value):
            raise self.fail(path, f"'${{{text}}}' is {value}, not a finite number")
        self.values[path] = list(value) if isinstance(value, tuple) else value
        return self.values[path]

    def fail(self, path: Path, message: str) -> _UnresolvableError:
        self.failed.add(path)
        self.document.fault(path, message)
        return _UnresolvableError()

    def look_up(self, name: str, path: Path, asking: tuple[Path, ...]) -> Any:
        target: Path = (*self.base, *name.split("."))
        self.sources.setdefault(path, []).append(target)
        if self.document.is_suspect(target) and target not in self.texts:
            raise _UnresolvableError
        if target in self.texts:
            return self.resolve(target, asking)
        value: Any = self.document.data
        for length, part in enumerate(target, 1):
            if isinstance(value, dict) and part in value:
                value = value[part]
            elif isinstance(value, dict):
                value = default_of(self.document.data, target[:length])
            else:
                value = None
        if isinstance(value, dict):
            raise self.fail(path, f"'{name}' in '${{{self.texts[path]}}}' is a section, not a value")
        if isinstance(value, list):
            return tuple(value)
        if value is None:
            names = self.known_names()
            near = get_close_matches(name, names, 3, 0.5)
            hint = f"near: {', '.join(near)}" if near else f"known: {', '.join(names[:20])}"
            raise self.fail(path, f"unknown name '{name}' in '${{{self.texts[path]}}}'; {hint}")
        return value

    def known_names(self) -> list[str]:
        inside: Any = self.document.data
        for part in self.base:
            inside = inside.get(part) if isinstance(inside, dict) else None
        return [dotted(path) for path, _ in _leaves((), inside) if not any(isinstance(part, int) for part in path)]


def _is_plain(path: Path) -> bool:
    """True for keys that are read as written, wherever kernels may have a parameter of the same name."""
    if path[0] == "kernels":
        return len(path) > 2 and path[2] in PLAIN_KEYS
    return path[0] in PLAIN_KEYS


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    else:
        yield path, value


def _put(data: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value
