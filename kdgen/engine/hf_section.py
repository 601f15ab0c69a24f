"""Reading JSON objects key by key, so that every fault is found and every key is accounted for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdgen.errors import ArtifactError, Fault

#: As a default: a missing key is a fault.
REQUIRED = object()


class Section:
    """One JSON object being read: values by key and type, and every fault found on the way."""

    def __init__(self, values: Any, where: str, path: str, faults: list[Fault]):
        self.where, self.path, self.faults = where, path, faults
        self.values: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
        self._seen: set[str] = set()
        if values is not self.values:
            faults.append(Fault(where, 0, path, f"is {json.dumps(values)[:100]}; it must be an object"))

    def fault(self, key: str, message: str) -> None:
        """Record what is wrong with a key."""
        self.faults.append(Fault(self.where, 0, f"{self.path}.{key}" if self.path else key, message))

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it stands; a missing one is a fault unless a default is given."""
        self._seen.add(key)
        if key not in self.values and default is REQUIRED:
            self.fault(key, "is missing")
            return None
        return self.values.get(key, default)

    def integer(self, key: str, default: Any = REQUIRED) -> int | None:
        """An integer, or None after a fault."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        self._wrong(key, value, "an integer")
        return None

    def number(self, key: str, default: Any = REQUIRED) -> float | None:
        """A number, or None after a fault."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        self._wrong(key, value, "a number")
        return None

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if isinstance(value, bool):
            return value
        self._wrong(key, value, "true or false")
        return default

    def only(self, key: str, *allowed: Any, default: Any = REQUIRED) -> Any:
        """A value out of a list; the first allowed one after a fault."""
        value = self.get(key, default)
        # True == 1 in Python, not in JSON.
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            return value
        self._wrong(key, value, " or ".join(json.dumps(one) for one in allowed))
        return allowed[0]

    def _wrong(self, key: str, value: Any, allowed: str) -> None:
        if key in self.values:
            self.fault(key, f"is {json.dumps(value)[:100]}; allowed: {allowed}")

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        """Whatever was not asked for and is not known to be harmless is a fault."""
        for key in self.values:
            if key not in self._seen and key not in harmless:
                self.fault(key, "unknown key: it might change the model, so it is not skipped")


def complaint(error: Any) -> str:
    """What pydantic says about a value, in our words."""
    return f"is {error['input']}; allowed: {error['msg'].removeprefix('Input should be ')}"


def read_json(file: Path) -> Mapping[str, Any]:
    """A file's JSON object; ArtifactError when it is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ArtifactError(f"{file}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ArtifactError(f"{file}: is a {type(values).__name__}; it must be an object")
    return values
