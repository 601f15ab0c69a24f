"""The host target: rendered text to a shared library, through g++ or clang++."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdgen import scratch
from kdgen.compile.diagnostics import gnu_messages
from kdgen.compile.host_compiler import HostCompiler, find_host_compiler
from kdgen.errors import CompileError, ToolchainError, UsageError
from kdgen.targets import Target

RUNTIME = "device/host_runtime.cpp"

#: Only what the Python runtime calls leaves the library. Everything else, the C++ library's one-per-process symbols included, must
#: stay private: several builds of the same runtime are mapped into one process.
_EXPORTS = "{ global: kdgen_*; local: *; };\n"

#: Variables that would change what is compiled without being part of any cache key, or that belong to a sanitized caller.
_IGNORED = frozenset(
    [
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "GCC_EXEC_PREFIX",
        "COMPILER_PATH",
        "DEPENDENCIES_OUTPUT",
        "LD_PRELOAD",
    ]
)


@dataclass(frozen=True)
class HostBinary:
    """A compiled host unit.

    Attributes:
        library: the shared library.
        log: warnings; empty when there are none.
    """

    library: bytes
    log: str


def host_options(target: Target, compiler: HostCompiler) -> tuple[str, ...]:
    """The compiler's options for a host target."""
    if not target.is_host:
        raise UsageError(f"target {target.name} is a GPU: the host compiler cannot compile for it")
    options = [
        "-std=c++20",
        "-fPIC",
        "-pthread",
        "-ffp-contract=off",  # fused multiply-adds are asked for by name, as on the GPU
        "-fno-strict-aliasing",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-fno-diagnostics-show-caret" if compiler.name == "g++" else "-fno-caret-diagnostics",
    ]
    if compiler.isa.startswith("x86-64-"):
        options.append(f"-march={compiler.isa}")
    if target.sanitize:
        # Faults must not be survived: what runs on afterwards is not worth reading.
        options += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    else:
        options += ["-O2", "-g1"]
    return tuple(options)


def compile_host_runtime(headers: Mapping[str, str], target: Target) -> bytes:
    """Compile the scheduler that every host library is linked with.

    Args:
        headers: all device files of the target, `device/host_runtime.cpp` among them.
        target: a host target.

    Returns:
        an object file.

    Raises:
        CompileError, ToolchainError: as in `compile_host`.
    """
    import tempfile

    compiler = find_host_compiler()
    with tempfile.TemporaryDirectory(prefix=scratch.prefix("cxx")) as place:
        directory = Path(place)
        _write(directory, headers)
        options = [*host_options(target, compiler), *_reproducible(directory, RUNTIME)]
        _run(compiler, [*options, "-c", RUNTIME, "-o", "runtime.o"], directory, f"{RUNTIME}, target {target.name}")
        return (directory / "runtime.o").read_bytes()


def compile_host(source: str, file_name: str, headers: Mapping[str, str], target: Target, runtime: bytes | None = None) -> HostBinary:
    """Compile the host form of a kernel.

    Args:
        source: C++ text; its `#line` marks decide what messages and debug information name.
        file_name: a relative name for the text; part of the debug information.
        headers: all device files of the target, by include name.
        target: a host target.
        runtime: the object of `compile_host_runtime`; compiled along when left out, which takes seconds.

    Raises:
        CompileError: the text is refused; the message names template lines.
        ToolchainError: there is no compiler, or it lacks the sanitizers' libraries.
    """
    import tempfile

    compiler = find_host_compiler()
    with tempfile.TemporaryDirectory(prefix=scratch.prefix("cxx")) as place:
        directory = Path(place)
        _write(directory, {**headers, file_name: source, "exports.map": _EXPORTS})
        (directory / "runtime.o").write_bytes(runtime if runtime is not None else compile_host_runtime(headers, target))
        options = [*host_options(target, compiler), *_reproducible(directory, file_name)]
        what = f"{file_name}, target {target.name}"
        log = _run(compiler, [*options, "-c", file_name, "-o", "kernel.o"], directory, what)
        link = ["-shared", "-Wl,--version-script=exports.map", "kernel.o", "runtime.o", "-o", "kernel.so"]
        log += _run(compiler, [*options, *link], directory, what)
        return HostBinary((directory / "kernel.so").read_bytes(), "\n".join(log))


def _reproducible(directory: Path, seed: str) -> list[str]:
    """Options that keep the working directory and chance out of the object."""
    return [f"-ffile-prefix-map={directory}=.", f"-frandom-seed={seed}"]


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _run(compiler: HostCompiler, arguments: Sequence[str], directory: Path, what: str) -> list[str]:
    """Run the compiler; returns its warnings."""
    environment = {name: value for name, value in os.environ.items() if name not in _IGNORED} | {"LC_ALL": "C", "TMPDIR": str(directory)}
    try:
        answer = subprocess.run([compiler.path, *arguments], cwd=directory, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolchainError(f"{compiler.path} does not run: {error.strerror}") from error
    messages = gnu_messages(answer.stderr, str(directory))
    if answer.returncode == 0:
        return messages
    text = "\n".join(messages)
    if "cannot find" in text and ("asan" in text or "ubsan" in text):
        raise ToolchainError(
            f"{what}: {compiler.name} {compiler.version} lacks the sanitizers' libraries: "
            f"apt-get install libasan8 libubsan1, or those of its version\n{text}"
        )
    if answer.returncode < 0:
        raise ToolchainError(f"{what}: {compiler.path} was stopped by signal {-answer.returncode} (out of memory?)\n{text}")
    errors = [line for line in messages if ": warning: " not in line]
    raise CompileError(f"{what}: {compiler.name} refused the code\n" + "\n".join(errors or messages))
