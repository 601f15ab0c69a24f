"""Loading the host target's shared libraries: what this process and this CPU need for them, and one mapping per contents."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from kdgen import scratch
from kdgen.errors import ArtifactError, DeviceError, ToolchainError
from kdgen.runtime.manifest import TargetRecord

#: What /proc/cpuinfo must list for the x86-64 levels (System V psABI), each beside those of the level below.
_LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64-v2": ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"),
    "x86-64-v3": ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}
_ELF_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}
_SANITIZERS = ("libasan", "libclang_rt.asan")


class LaunchConfig(ctypes.Structure):
    """Launch parameters as `kd::LaunchConfig` of the host runtime has them."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32), ("shared_bytes", ctypes.c_uint32), ("cooperative", ctypes.c_uint32),
        ("threads", ctypes.c_uint32), ("order", ctypes.c_uint32), ("copies", ctypes.c_uint32), ("seed", ctypes.c_uint64),
    )  # fmt: skip


class Library:
    """A mapped shared library.

    Attributes:
        poison: `void kdgen_poison(void*, unsigned long, int on)`.
    """

    def __init__(self, path: Path):
        # RTLD_NOW: a missing symbol is an error here, not in the middle of a launch. Local: two builds have equal symbols.
        self._handle = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.poison = self._handle.kdgen_poison
        self.poison.argtypes, self.poison.restype = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int), None
        # Code is never unmapped, but what a kernel keeps between launches goes with the last who may launch it.
        weakref.finalize(self, self._handle.kdgen_release)

    def entry(self, name: str) -> Any:
        """The launch function of an entry; AttributeError when there is none."""
        function = getattr(self._handle, f"kdgen_launch_{name}")
        function.restype = ctypes.c_int
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong)
        return function


_lock = threading.Lock()
_mapped: weakref.WeakValueDictionary[str, Library] = weakref.WeakValueDictionary()


def map_library(image: bytes, name: str) -> Library:
    """Map a shared library from its bytes; equal bytes are mapped once.

    The mapping is of a private copy: a build that replaces the published file must not change code that runs.

    Raises:
        ArtifactError: it is for another architecture, or the loader refuses it.
    """
    machine = _ELF_MACHINES.get(int.from_bytes(image[18:20], "little")) if image[:4] == b"\x7fELF" else None
    if machine is None and image[:4] != b"\x7fELF":
        raise ArtifactError(f"kernel '{name}': its binary is no shared library; rebuild with: kdgen build SPEC --arch host --force")
    if machine is not None and machine != platform.machine():
        raise ArtifactError(
            f"kernel '{name}' was built for {machine}, this machine is {platform.machine()}; build it here: kdgen build SPEC --arch host"
        )
    key = hashlib.sha256(image).hexdigest()
    with _lock:
        library = _mapped.get(key)
        if library is None:
            path = _private_directory() / f"{re.sub(r'[^A-Za-z0-9_]', '_', name)[:64]}-{key[:16]}.so"
            try:
                if not path.exists():
                    path.write_bytes(image)
                library = Library(path)
            except (OSError, AttributeError) as error:
                raise ArtifactError(
                    f"kernel '{name}': its library cannot be loaded ({error}); rebuild it here: kdgen build SPEC --arch host --force; "
                    "if the loader speaks of mapping or permission, set TMPDIR to a directory whose file system allows execution"
                ) from error
            _mapped[key] = library
        return library


@functools.cache
def _private_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix=scratch.prefix("host")))
    owner = os.getpid()

    def remove() -> None:
        # A forked child inherits this hook, but not the directory.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def refuse_isa(isa: str) -> str:
    """Why this CPU cannot run code for `isa`; "" when it can, or when that cannot be told."""
    if not isa:
        return ""
    if isa.startswith("x86-64") and platform.machine() not in ("x86_64", "AMD64"):
        return f"it was built for {isa}, this machine is {platform.machine()}"
    if isa in _LEVELS:
        flags = _cpu_flags()
        levels = list(_LEVELS)[: list(_LEVELS).index(isa) + 1]
        missing = [flag for level in levels for flag in _LEVELS[level] if flag not in flags]
        if flags and missing:
            return f"it was built for {isa}, and this CPU lacks {', '.join(missing)}"
    elif isa.partition("-")[0] in _ELF_MACHINES.values() and isa.partition("-")[0] != platform.machine():
        return f"it was built for {isa}, this machine is {platform.machine()}"
    return ""


@functools.cache
def _cpu_flags() -> frozenset[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_sanitizer() -> bool:
    """True when AddressSanitizer's runtime was in this process from its start."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text("utf-8", "replace")
        return any(name in maps for name in _SANITIZERS)
    return False


def refuse_sanitizer(target: TargetRecord) -> str:
    """Why this process cannot load a sanitizer build; "" when it can, or when it is none."""
    if not target.sanitize or has_sanitizer():
        return ""
    return (
        "it is a sanitizer build, and AddressSanitizer is not in this process; start Python with "
        "LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0, or use: kdgen verify SPEC --sanitize"
    )


def sanitizer_environment() -> dict[str, str]:
    """The environment variables with which a new Python process can load sanitizer builds.

    Raises:
        ToolchainError: no C++ compiler, or one without AddressSanitizer's runtime.
    """
    compilers = [found for name in (os.environ.get("KDGEN_CXX"), "g++", "clang++") if name and (found := shutil.which(name))]
    if not compilers:
        raise ToolchainError("sanitizer builds need the runtime library of g++ or clang++, and neither is there: apt-get install g++")
    compiler = compilers[0]
    names = ("libasan.so", f"libclang_rt.asan-{platform.machine()}.so", "libclang_rt.asan.so")
    runtime = next((path for name in names if (path := _compiler_file(compiler, name))), None)
    if runtime is None:
        raise ToolchainError(
            f"{compiler} has no AddressSanitizer runtime ({names[0]}); apt-get install libasan8, or the one of your compiler's version"
        )
    # The C++ library comes with it: the sanitizer looks for its functions when it starts, before any kernel is loaded.
    preload = [runtime, _compiler_file(compiler, "libstdc++.so.6"), os.environ.get("LD_PRELOAD")]
    options = {
        # Python keeps memory until its end on purpose; a fiber's stack is not the thread's.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    merged = {name: ":".join(filter(None, (os.environ.get(name), value))) for name, value in options.items()}
    return {"LD_PRELOAD": " ".join(filter(None, preload)), **merged}


@functools.cache
def _compiler_file(compiler: str, name: str) -> str | None:
    """Where a compiler keeps a library; None when it has none of that name."""
    try:
        answer = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"{compiler} cannot be asked for {name}: {error}") from error
    path = answer.stdout.strip()
    return os.path.realpath(path) if os.path.isabs(path) and os.path.exists(path) else None
