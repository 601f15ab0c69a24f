"""`--set a.b=value`: values of a spec replaced from the command line, before expressions are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from kdgen.errors import Fault
from kdgen.spec.document import Document, Path, dotted, keys_of
from kdgen.spec.fields import default_of, fields_at
from kdgen.spec.yaml_marks import read_value


def apply_overrides(document: Document, texts: Sequence[str]) -> None:
    """Put the values of `texts` into `document.data`; the last one wins where two name the same key.

    What is wrong with a text is added to the document's faults; later faults about its value name the `--set`.
    """
    for text in texts:
        _apply(document, text)


def _apply(document: Document, text: str) -> None:
    def refuse(message: str) -> None:
        document.faults.append(Fault(document.file, 0, f"--set {text}", message))

    name, equals, value_text = text.partition("=")
    name = name.strip()
    if not equals or not name:
        refuse("must have the form key=value, such as tree.budget=32")
        return
    written = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    path = _find(document, written)
    if path is None:
        known = _known_names(document)
        near = get_close_matches(name, known, 3, 0.5) or get_close_matches(name.rsplit(".", 1)[-1], known, 3, 0.5)
        refuse(f"no such key; {'near: ' + ', '.join(near) if near else 'known: ' + ', '.join(known[:40])}")
        return
    if path == ("base",):
        refuse("a base is chosen in the file, before its values can be replaced")
        return
    value, problems = read_value(value_text)
    for problem in problems:
        refuse(problem)
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict | list) for item in value)):
        refuse("a value must be a scalar, or a list of scalars")
        return
    _store(document.data, path, value)
    # Whatever stood here in the file no longer matters, its faults included: they are about a value nobody uses.
    key = dotted(path)
    document.faults = [fault for fault in document.faults if fault.key != key or "given twice" in fault.message]
    document.suspects = {suspect for suspect in document.suspects if suspect[: len(path)] != path}
    document.labels[path] = f"--set {key}={value_text.strip()}"
    if problems:
        document.suspects.add(path)


def _find(document: Document, written: Path) -> Path | None:
    """The full path of a key: from the root; else under `params` of a kernel spec, or as `KERNEL.parameter` of an engine spec."""
    candidates = [written]
    if document.data.get("kind") == "engine":
        candidates.append(("kernels", written[0], "params", *written[1:]))
        if len(written) < 2:
            candidates.pop()
    else:
        candidates.append(("params", *written))
    for path in candidates:
        if _exists(document.data, path) or _may_exist(document.data, path):
            return path
    return None


def _exists(data: Any, path: Path) -> bool:
    for part in path:
        if part in keys_of(data):
            data = data[part]
        else:
            return False
    return True


def _may_exist(data: dict[str, Any], path: Path) -> bool:
    """True when the file leaves the key out but its model knows it; a kernel must be there already."""
    if path[0] == "kernels" and len(path) > 1 and not _exists(data, path[:2]):
        return False
    return path[-1] in fields_at(data, path[:-1])


def _store(data: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        if isinstance(data, dict) and not isinstance(data.get(part), dict | list):
            data[part] = {}
        data = data[part]
    data[path[-1]] = value


def _known_names(document: Document) -> list[str]:
    names: list[str] = []

    def visit(path: Path, value: Any) -> None:
        if isinstance(value, dict):
            for key in dict.fromkeys((*value, *fields_at(document.data, path))):
                visit((*path, key), value.get(key, default_of(document.data, (*path, key))))
        elif path:
            shown = path
            if path[0] == "params":
                shown = path[1:]
            elif len(path) > 3 and path[0] == "kernels" and path[2] == "params":
                shown = (path[1], *path[3:])
            names.append(dotted(shown))

    visit((), document.data)
    return names
