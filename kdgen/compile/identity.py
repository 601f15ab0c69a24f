"""What a compiler is called in cache keys and manifests: equal identities compile equal text to equal bytes."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from kdgen.compile.host_compiler import find_host_compiler
from kdgen.errors import ToolchainError
from kdgen.targets import Target

NVRTC_WHEEL = "nvidia-cuda-nvrtc"
INSTALL = "pip install 'kdgen[compiler]'"


def compiler_id(target: Target) -> str:
    """The identity of the compiler for `target`, such as `NVRTC 13.5.37 (a79d02a2f31e)` or `g++ 12.2.0 (0c1fd1f3a4b2), x86-64-v3`.

    Cheap: NVRTC is not loaded for it when it comes from its wheel, whose file list has the hashes already.

    Raises:
        ToolchainError: there is no compiler.
    """
    if target.is_host:
        compiler = find_host_compiler()
        return f"{compiler.name} {compiler.version} ({compiler.build}), {compiler.isa}"
    version, build, _ = nvrtc_library()
    return f"NVRTC {version} ({build})"


@cache
def nvrtc_library() -> tuple[str, str, Path]:
    """NVRTC's version, a hash of its libraries, and the path of the main one.

    Raises:
        ToolchainError: NVRTC is not installed.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution(NVRTC_WHEEL)
    except PackageNotFoundError:
        return _nvrtc_of_the_system()
    # libnvrtc and libnvrtc-builtins; there is an `alt` build in some wheels, which is not loaded.
    libraries = sorted((file for file in wheel.files or () if file.name.startswith("libnvrtc") and ".alt." not in file.name), key=str)
    main = next((file for file in libraries if file.name.startswith("libnvrtc.so")), None)
    if main is None or not Path(str(main.locate())).is_file():
        raise ToolchainError(
            f"{NVRTC_WHEEL} {wheel.version} is installed without its library; install it again: pip install --force-reinstall {NVRTC_WHEEL}"
        )
    content = "".join(f"{file.name} {file.hash.value if file.hash else _sha256(Path(str(file.locate())))}\n" for file in libraries)
    return wheel.version, _short(content), Path(str(main.locate())).resolve()


def _nvrtc_of_the_system() -> tuple[str, str, Path]:
    """NVRTC from a CUDA toolkit: it has no list of hashes, so it is read."""
    try:
        from cuda.bindings import nvrtc
        from cuda.pathfinder import load_nvidia_dynamic_lib

        loaded: Any = load_nvidia_dynamic_lib("nvrtc")
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the package, the library and its loader each have exceptions of their own
        raise ToolchainError(f"NVRTC is not installed ({type(error).__name__}: {error}): {INSTALL}") from error
    path = Path(loaded.abs_path).resolve()
    beside = sorted(path.parent.glob("libnvrtc-builtins.so*"))
    content = "".join(f"{_sha256(file)}\n" for file in [path, *beside])
    return f"{major}.{minor}", _short(content), path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:12]
