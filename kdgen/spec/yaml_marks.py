"""YAML files with the line of every key, and every fault of a file found in one go.

Built on pyyaml's parser. It is stricter than YAML: no duplicate keys, no tags, only text keys, one document, bounded size and
nesting, none of the scalars that YAML 1.1 reads in a surprising way (`kdgen.spec.traps`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml

from kdgen.errors import Fault
from kdgen.spec.document import Document, Mark, Path, dotted
from kdgen.spec.traps import trap_in

MAX_BYTES = 1 << 20
MAX_NODES = 20_000  # after aliases are expanded, so that a few lines of nested aliases cannot grow without bound
MAX_DEPTH = 32
_MAX_INT = 1 << 63

_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"
_MERGE = "tag:yaml.org,2002:merge"
_SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp")}


class _AbortError(Exception):
    """The rest of the file cannot be understood."""


class _Loader(yaml.SafeLoader):
    """pyyaml's parser and composer with tags refused and growth bounded while the node graph is made."""

    def __init__(self, text: str, document: Document):
        super().__init__(text)
        self.document = document
        self.depth = 0
        self.nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _abort(self.document, line, f"more than {MAX_NODES} values; a spec is far smaller")
        if self.depth >= MAX_DEPTH:
            raise _abort(self.document, line, f"nested more than {MAX_DEPTH} deep")
        tag = getattr(event, "tag", None)
        if tag is not None and not isinstance(event, yaml.AliasEvent):
            self.document.faults.append(
                Fault(self.document.file, line, "", f"tag '{tag}' is not allowed; write the plain value, or quote text")
            )
            event.tag = None
            if isinstance(event, yaml.ScalarEvent):
                event.implicit = (True, False)
            else:
                event.implicit = True
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _abort(document: Document, line: int, message: str) -> _AbortError:
    document.faults.append(Fault(document.file, line, "", message))
    return _AbortError()


def read_document(path: str) -> Document:
    """Read and check a YAML file; never raises for what is wrong with it: see `Document.faults`."""
    document = Document(path)
    try:
        text = _read_text(document)
        _parse(document, text)
    except _AbortError:
        document.suspects.add(())
    document.faults.sort(key=lambda fault: fault.line)
    return document


def read_value(text: str) -> tuple[Any, list[str]]:
    """A single value as it may stand behind a key (for `--set`), and what is wrong with it."""
    document = Document("")
    try:
        node = _compose(document, text)
        value = _Walker(document).value(node, (), ()) if node is not None else None
    except _AbortError:
        value = None
    return value, [fault.message for fault in document.faults]


def _read_text(document: Document) -> str:
    path = FilePath(document.file)
    try:
        if path.is_dir():
            raise _abort(document, 0, "is a directory; give the YAML file")
        if not path.exists():
            raise _abort(document, 0, "no such file")
        if not path.is_file():
            raise _abort(document, 0, "is not a regular file")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _abort(document, 0, f"{size} bytes; a spec may have at most {MAX_BYTES}")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _abort(document, 0, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _abort(document, 1, "is UTF-16; save it as UTF-8 without a byte-order mark")
    if data.startswith(b"\xef\xbb\xbf"):
        document.faults.append(Fault(document.file, 1, "", "starts with a byte-order mark; save it as UTF-8 without one"))
        data = data[3:]
    if b"\0" in data:
        raise _abort(document, data[: data.index(b"\0")].count(b"\n") + 1, "holds a NUL byte: this is not a text file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _abort(document, line, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8") from error


def _parse(document: Document, text: str) -> None:
    node = _compose(document, text)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None):
        raise _abort(document, 0, "is empty")
    if not isinstance(node, yaml.MappingNode):
        raise _abort(document, node.start_mark.line + 1, "must be a mapping of keys to values")
    document.marks[()] = _mark(node)
    document.data = _Walker(document).value(node, (), ())


def _compose(document: Document, text: str) -> yaml.Node | None:
    """The node graph of the only document in `text`."""
    try:
        return _first_node(_Loader(text, document), document)
    except yaml.YAMLError as error:
        _report_syntax(document, text, error)
        raise _AbortError from error
    except RecursionError as error:  # the bound on nesting comes first, unless the stack is already deep
        raise _abort(document, 0, f"nested more than {MAX_DEPTH} deep") from error


def _first_node(loader: _Loader, document: Document) -> yaml.Node | None:
    loader.get_event()  # type: ignore[no-untyped-call]  # the stream's start
    if loader.check_event(yaml.StreamEndEvent):
        return None
    node: yaml.Node | None = loader.compose_document()
    if not loader.check_event(yaml.StreamEndEvent):
        line = loader.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        document.faults.append(Fault(document.file, line, "", "a second document starts here; a spec is one document"))
    return node


def _report_syntax(document: Document, text: str, error: yaml.YAMLError) -> None:
    """Turn pyyaml's exception into faults; tabs are all reported, since they are invisible."""
    lines = text.splitlines()
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        position = getattr(error, "position", None)
        line = text[:position].count("\n") + 1 if isinstance(position, int) else 0
        character = getattr(error, "character", None)
        code = character if isinstance(character, int) else ord(character) if isinstance(character, str) else 0
        document.faults.append(Fault(document.file, line, "", f"control character U+{code:04X}: this is not a text file"))
        return
    number = mark.line + 1
    problem = str(getattr(error, "problem", None) or error)
    if "\\t" in problem:
        indented = [index for index, line in enumerate(lines, 1) if re.match(r" *\t", line)]
        for line in sorted({number, *indented}):
            document.faults.append(Fault(document.file, line, "", "a tab cannot stand here; YAML is indented with spaces"))
        return
    context = getattr(error, "context", None)
    hint = ""
    if mark.line < len(lines) and "${" in lines[mark.line]:
        hint = '; inside [ ] or { }, or with ": " in it, an expression must be quoted: "${…}"'
    document.faults.append(Fault(document.file, number, "", f"not YAML: {problem}{f' {context}' if context else ''}{hint}"))


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


class _Walker:
    """Turns the node graph into values, marks and faults. Aliases are expanded: each use has its own path."""

    def __init__(self, document: Document):
        self.document = document
        self.nodes = 0

    def value(self, node: yaml.Node, path: Path, open_nodes: tuple[int, ...]) -> Any:
        """The value of `node`; `open_nodes` are the containers around it, by id, to find an alias to one of them."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise _abort(self.document, node.start_mark.line + 1, f"more than {MAX_NODES} values once aliases are expanded")
        if id(node) in open_nodes:
            self.document.fault(path, "an alias to something around it: a value cannot contain itself")
            return None
        if len(open_nodes) >= MAX_DEPTH:
            raise _abort(self.document, node.start_mark.line + 1, f"nested more than {MAX_DEPTH} deep once aliases are expanded")
        match node:
            case yaml.MappingNode():
                return self.mapping(node, path, (*open_nodes, id(node)))
            case yaml.SequenceNode():
                items = []
                for index, item in enumerate(node.value):
                    self.document.marks[(*path, index)] = _mark(item)
                    items.append(self.value(item, (*path, index), (*open_nodes, id(node))))
                return items
            case yaml.ScalarNode():
                return self.scalar(node, path)
            case _:
                raise TypeError(f"unexpected {type(node).__name__}")

    def mapping(self, node: yaml.MappingNode, path: Path, open_nodes: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in self.pairs(node, path, open_nodes):
            name = self.key(key_node, path)
            if name is None:
                continue
            inner = (*path, name)
            if inner in self.document.marks:
                line = self.document.marks[inner].line
                where = Fault(self.document.file, key_node.start_mark.line + 1, dotted(inner), f"given twice; first in line {line}")
                self.document.faults.append(where)
                self.document.suspects.add(inner)
                continue
            self.document.marks[inner] = _mark(key_node)
            result[name] = self.value(value_node, inner, open_nodes)
        return result

    def pairs(self, node: yaml.MappingNode, path: Path, open_nodes: tuple[int, ...]) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        """Keys and values with `<<` merges opened up; a key that is both merged and written counts as given twice."""
        merges = 0
        for key_node, value_node in node.value:
            if key_node.tag != _MERGE:
                yield key_node, value_node
                continue
            merges += 1
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                self.nodes += 1  # empty merges nest without adding keys
                line = key_node.start_mark.line + 1
                if merges > 1:
                    self.document.faults.append(
                        Fault(self.document.file, line, dotted((*path, "<<")), "given twice; merge a list: <<: [*a, *b]")
                    )
                elif not isinstance(source, yaml.MappingNode):
                    self.document.faults.append(Fault(self.document.file, line, dotted((*path, "<<")), "only mappings can be merged"))
                elif id(source) in open_nodes:
                    self.document.faults.append(Fault(self.document.file, line, dotted((*path, "<<")), "merges something around it"))
                elif len(open_nodes) >= MAX_DEPTH or self.nodes > MAX_NODES:
                    raise _abort(self.document, line, "merges grow beyond bounds")
                else:
                    yield from self.pairs(source, path, (*open_nodes, id(source)))

    def key(self, node: yaml.Node, path: Path) -> str | None:
        """The text of a key, or None after reporting why it is none."""
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode):
            self.document.faults.append(Fault(self.document.file, line, dotted(path), "a key must be text, not a list or a mapping"))
            return None
        name: str = node.value
        if node.style is None and not node.tag.endswith(":str"):  # `n:` and `y:` are text to pyyaml, and good names of sizes
            kind = node.tag.rsplit(":", 1)[-1]
            reason = f"key '{name}' is read as {kind}; a key must be text: quote it: \"{name}\""
            self.document.faults.append(Fault(self.document.file, line, dotted((*path, name)), reason))
            return None
        if not name or not name.isprintable() or len(name) > 100:
            self.document.faults.append(Fault(self.document.file, line, dotted(path), f"key {name[:100]!r} is not a name"))
            return None
        return name

    def scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        if node.style is not None:  # quoted, or a block of text
            return text
        trap = trap_in(text, node.tag)
        if trap:
            self.document.fault(path, trap[0])
            return trap[1]
        if node.tag not in _SCALARS:
            self.document.fault(path, f"'{text}' has a special meaning in YAML; quote it: \"{text}\"")
            return text
        match node.tag.rsplit(":", 1)[-1]:
            case "int":
                if len(text) > 20 or abs(int(text)) >= _MAX_INT:
                    self.document.fault(path, f"value {text[:40]}, allowed numbers of at most 64 bits")
                    return 0
                return int(text)
            case "float":
                number = float(text)
                if not math.isfinite(number):
                    self.document.fault(path, f"value {text[:40]}, allowed finite numbers")
                    return 0.0
                return number
            case "bool":
                return text.lower() == "true"
            case "null":
                return None
            case _:
                return text
