"""A unit: one thing to compile, with everything that decides its bytes. Its key is the hash over exactly that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kdgen.build.cache import SCHEMA

Kind = Literal["cuda", "host", "host_runtime"]

#: The binary that a unit's object holds.
BINARY: dict[Kind, str] = {"cuda": "kernel.cubin", "host": "kernel.so", "host_runtime": "runtime.o"}
PTX = "kernel.ptx"
SASS = "kernel.sass"


@dataclass(frozen=True)
class Unit:
    """One compilation.

    Attributes:
        kind: which compiler, and what for.
        label: what progress and messages call it; not part of the key.
        target: name of the target.
        file_name: relative name of the text, as line tables have it.
        text: C++ with `#line` marks; empty for the host runtime, whose text is among the headers.
        headers: include name to text.
        contract: the kernel's contract as JSON; None for the host runtime.
        options: of the compiler.
        compiler: its identity.
        runtime: key of the host runtime to link with; "" for none.
    """

    kind: Kind
    label: str
    target: str
    file_name: str
    text: str
    headers: Mapping[str, str]
    contract: Mapping[str, Any] | None
    options: tuple[str, ...]
    compiler: str
    runtime: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        content = {
            "schema": SCHEMA,
            "kind": self.kind,
            "file_name": self.file_name,
            "text": _sha256(self.text),
            "headers": {name: _sha256(text) for name, text in self.headers.items()},
            "contract": self.contract,
            "options": self.options,
            "compiler": self.compiler,
            "runtime": self.runtime,
        }
        object.__setattr__(self, "key", _sha256(json.dumps(content, sort_keys=True, separators=(",", ":"))))

    @property
    def binary(self) -> str:
        """The file of its object that holds the binary."""
        return BINARY[self.kind]

    def to_json(self) -> str:
        """For another process; `from_json` is its inverse."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "key"})

    @classmethod
    def from_json(cls, text: str) -> Unit:
        """The unit that `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "options": tuple(data["options"])})


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
