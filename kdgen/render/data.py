"""Where templates, device headers and the shipped specs are, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from kdgen.errors import ToolchainError
from kdgen.targets import Target

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

#: What a kernel's text includes, by kind of target. The host's second file is compiled beside the kernels, not included.
_ROOTS = {False: ("cuda.cuh",), True: ("host.hpp", "host_runtime.cpp")}


@cache
def data_dir() -> Path:
    """The directory that holds `templates/` and `specs/`.

    Raises:
        ToolchainError: the installation is incomplete.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_data", package.parent):
        if (candidate / "templates" / "device").is_dir():
            return candidate
    raise ToolchainError(f"the templates are missing beside {package}: this installation of kdgen is broken; install it again")


def templates_dir() -> Path:
    """The directory of the kernel templates."""
    return data_dir() / "templates"


def main_header(target: Target) -> str:
    """The device header a kernel's text includes, relative to the templates directory."""
    return f"device/{_ROOTS[target.is_host][0]}"


def device_files(target: Target) -> dict[str, str]:
    """The device headers that rendered text for `target` includes, directly or not: relative name (`device/cuda.cuh`) to text.

    For a host target `device/host_runtime.cpp`, which every kernel is linked with, and its headers are there too.

    Raises:
        ToolchainError: a header is missing.
    """
    root = templates_dir()
    found: dict[str, str] = {}
    waiting = [f"device/{name}" for name in _ROOTS[target.is_host]]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = (root / name).read_text(encoding="utf-8")
        except OSError as error:
            raise ToolchainError(f"device header {name} cannot be read ({error.strerror}): install kdgen again") from error
        # Quoted includes name kdgen's own files, beside the includer; the compiler's are in angle brackets.
        waiting += [f"device/{included}" for included in _INCLUDE.findall(found[name])]
    return dict(sorted(found.items()))
