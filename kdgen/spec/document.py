"""A spec file while it is being read: its values, where each stands, and what is wrong so far."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kdgen.errors import Fault

#: The way from the document's root to a value: keys of mappings, indices of lists.
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """A place in a file, both numbers from 1."""

    line: int
    column: int


@dataclass
class Derivation:
    """How a derived value came about: its expression, and the places of the values it reads."""

    text: str
    sources: list[Path] = field(default_factory=list)


@dataclass
class Document:
    """A YAML file's value and where each part of it stands.

    Attributes:
        file: the path as the user gave it.
        data: the value: dicts with text keys, lists, text, int, float, bool, None. Empty when the file cannot be read at all.
        marks: path of a key or list item to its place; `()` is the document.
        faults: what is wrong so far.
        suspects: paths whose value is already reported, so that later checks pass over them.
        labels: paths whose value comes from elsewhere (`--set tree.budget=9`), with the text that says so.
        derived: paths whose value was an expression.
    """

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    marks: dict[Path, Mark] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    suspects: set[Path] = field(default_factory=set)
    labels: dict[Path, str] = field(default_factory=dict)
    derived: dict[Path, Derivation] = field(default_factory=dict)

    def line_of(self, path: Path) -> int:
        """The line of `path`, or of the nearest thing around it that has one."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks[path].line if path in self.marks else 0

    def fault(self, path: Path, message: str) -> None:
        """Report `message` at `path`, or at the `--set` that put a value there."""
        label = next((self.labels[path[:length]] for length in range(len(path), 0, -1) if path[:length] in self.labels), None)
        self.faults.append(Fault(self.file, 0, label, message) if label else Fault(self.file, self.line_of(path), dotted(path), message))
        self.suspects.add(path)

    def is_suspect(self, path: Path) -> bool:
        """True when `path`, anything around it, or anything it is derived from, has been reported already."""
        if any(path[:length] in self.suspects for length in range(len(path) + 1)):
            return True
        return path in self.derived and any(self.is_suspect(source) for source in self.derived[path].sources)

    def origin_of(self, path: Path) -> str:
        """` (from ${…})` for a derived value, for a message about it."""
        return f" (from ${{{self.derived[path].text}}})" if path in self.derived else ""


def dotted(path: Path) -> str:
    """A path as the user writes it: `kernels.tree_build.params.budget`, `targets[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def keys_of(value: Any) -> Collection[str | int]:
    """What may follow in a path: the keys of a mapping, the indices of a list, nothing elsewhere."""
    return value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
