"""Specs on top of others: `base: other.yaml` takes the values of another file; what stands beside it replaces them, key by key.

A list or scalar replaces what the base has; a mapping is merged into it. In an engine spec a kernel that is `null` is left out. Names
and descriptions are never inherited. A fault in an inherited value names the base file's line.
"""

from __future__ import annotations

import os
from typing import Any

from kdgen.spec.document import Document, Path, dotted
from kdgen.spec.explain import shown
from kdgen.spec.yaml_marks import read_document

MOST_BASES = 8
_OWN = ("name", "description")


def include_base(document: Document) -> None:
    """Merge the file that `base` names, and those that it builds on, into `document`; faults are reported at the key."""
    _include(document, (os.path.realpath(document.file),))


def _include(document: Document, chain: tuple[str, ...]) -> None:
    if "base" not in document.data:
        return
    given = document.data.pop("base")
    if document.is_suspect(("base",)):
        return
    if not isinstance(given, str) or not given:
        document.fault(("base",), f"value {shown(given)}, allowed: the path of a spec file, from this file's directory")
        return
    path = os.path.join(os.path.dirname(document.file), given)
    real = os.path.realpath(path)
    if real in chain:
        document.fault(("base",), f"value '{given}': it builds on itself: {' → '.join((*chain, real))}")
        return
    if len(chain) > MOST_BASES:
        document.fault(("base",), f"value '{given}': a chain of more than {MOST_BASES} bases")
        return
    base = read_document(path)
    _include(base, (*chain, real))
    if base.faults:
        document.faults.extend(base.faults)
        document.suspects.add(())
        return
    for key in _OWN:
        base.data.pop(key, None)
    document.data = _merged(document, base, (), base.data, document.data)


def _merged(document: Document, base: Document, path: Path, inherited: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `inherited`, in the order of the base; places of what is inherited are noted."""
    result: dict[str, Any] = {}
    for key, value in inherited.items():
        here = (*path, key)
        if key not in own:
            result[key] = value
            for place in [here, *(mark for mark in base.marks if mark[: len(here)] == here), *base.labels]:
                if place[: len(here)] == here:
                    document.labels[place] = base.labels.get(place) or f"{base.file}:{base.line_of(place)}: {dotted(place)}"
        elif isinstance(value, dict) and isinstance(own[key], dict):
            result[key] = _merged(document, base, here, value, own[key])
        elif own[key] is not None or path != ("kernels",):
            result[key] = own[key]
    return {**result, **{key: value for key, value in own.items() if key not in inherited}}
