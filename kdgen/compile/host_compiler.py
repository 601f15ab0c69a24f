"""The C++ compiler of the host target: which one, and for which CPU."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kdgen.errors import ToolchainError

#: The oldest that know C++20 and the `x86-64-v3` level.
_OLDEST = {"g++": 11, "clang++": 13}
_GET = "apt-get install g++"

#: What /proc/cpuinfo lists on a CPU of the x86-64-v3 level (System V psABI), the level of AVX2 and FMA.
_V3_FLAGS = frozenset(
    ["cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"]
)  # fmt: skip


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler.

    Attributes:
        path: the program.
        name: `g++` or `clang++`, whatever the program is called.
        version: such as `12.2.0`.
        build: a hash of what it says about its version, target and configuration.
        isa: the instruction set it compiles for here: `x86-64-v3`, or `x86-64` on an older CPU; elsewhere the machine's name.
    """

    path: str
    name: str
    version: str
    build: str
    isa: str


def find_host_compiler() -> HostCompiler:
    """The compiler that the environment variable KDGEN_CXX names, else g++, else clang++.

    Raises:
        ToolchainError: there is none, or it is too old.
    """
    return _find(os.environ.get("KDGEN_CXX", ""), os.environ.get("PATH", ""))


@cache
def _find(chosen: str, search_path: str) -> HostCompiler:
    if chosen:
        path = shutil.which(chosen, path=search_path)
        if path is None:
            raise ToolchainError(f"KDGEN_CXX is '{chosen}', which is no program here; unset it, or name a g++ or clang++")
        return _ask(path)
    for name in _OLDEST:
        if path := shutil.which(name, path=search_path):
            return _ask(path)
    raise ToolchainError(f"the host target needs a C++ compiler, and neither g++ nor clang++ is on PATH: {_GET}, or set KDGEN_CXX")


def _ask(path: str) -> HostCompiler:
    # LC_ALL: the answer is parsed, and its hash must not depend on the user's language.
    try:
        answer = subprocess.run([path, "-v"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, check=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise ToolchainError(f"{path} does not run ({error}): {_GET}, or set KDGEN_CXX to a g++ or clang++") from error
    match = re.search(r"\b(gcc|clang) version (\d+)[\d.]*", answer)
    if match is None:
        raise ToolchainError(f"{path} is neither g++ nor clang++; set KDGEN_CXX to one of them")
    name = {"gcc": "g++", "clang": "clang++"}[match[1]]
    version = match[0].split()[-1]
    if int(match[2]) < _OLDEST[name]:
        raise ToolchainError(f"{path} is {name} {version}; the host target needs {name} {_OLDEST[name]} or newer: {_GET}, or set KDGEN_CXX")
    # Lines that say where the compiler lies do not say what it is.
    facts = [
        line
        for line in answer.splitlines()
        if not re.match(r"COLLECT_|InstalledDir:|Found candidate|Selected|Candidate|Using built-in", line)
    ]
    return HostCompiler(path, name, version, hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12], host_isa())


@cache
def host_isa() -> str:
    """The instruction set that host builds made here need."""
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return "x86-64"
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return "x86-64-v3" if set(flags) >= _V3_FLAGS else "x86-64"
