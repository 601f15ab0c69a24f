"""The kernel families: one module per family, each beside its template `templates/NAME.cu.j2`.

A family module defines `FAMILY` (see `kdgen.kernels.base.Family`). Adding a family means adding the module, its template, a
spec and a test; nothing else needs to know.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from kdgen.errors import UsageError
from kdgen.kernels.base import Family


@cache
def families() -> dict[str, Family]:
    """Every kernel family by name, sorted."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            found[family.name] = family
    return dict(sorted(found.items()))


def get_family(name: str) -> Family:
    """The family called `name`; UsageError naming the known ones otherwise."""
    if name not in families():
        raise UsageError(f"unknown kernel family '{name}'; allowed: {', '.join(families())}")
    return families()[name]
