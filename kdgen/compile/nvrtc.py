"""NVRTC: one call for a real architecture gives cubin, PTX and the resource report, without GPU, driver or toolkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from kdgen.compile.diagnostics import SOURCE_ROOT, nvrtc_messages, rooted
from kdgen.compile.identity import INSTALL, NVRTC_WHEEL
from kdgen.compile.ptxas import Resources, has_ptxas_errors, parse_report, ptxas_errors, ptxas_warnings
from kdgen.errors import CompileError, ResourceError, ToolchainError
from kdgen.targets import Target

_PTXAS_FULL = "uses too much shared data"


@dataclass(frozen=True)
class CudaBinary:
    """A compiled CUDA unit.

    Attributes:
        cubin: machine code for the target.
        ptx: the assembly it was made from; its line table names template lines.
        resources: entry point to what it needs.
        log: warnings, one paragraph each; empty when there are none.
    """

    cubin: bytes
    ptx: bytes
    resources: Mapping[str, Resources]
    log: str


def cuda_options(target: Target, *, device_runtime: bool = False) -> tuple[str, ...]:
    """NVRTC's options for a target; `device_runtime`: the code calls functions that the driver links in when it loads the cubin."""
    if target.nvrtc_arch is None:
        raise ToolchainError(f"target {target.name} is not a GPU: NVRTC cannot compile for it")
    return (
        f"--gpu-architecture={target.nvrtc_arch}",
        "--std=c++20",
        "-lineinfo",
        # Kernels ask for fused multiply-adds by name: arithmetic then agrees with the host target's.
        "--fmad=false",
        "--ptxas-options=-v",
        *(("--relocatable-device-code=true",) if device_runtime else ()),
    )


def compile_cuda(
    source: str, file_name: str, headers: Mapping[str, str], target: Target, options: tuple[str, ...] | None = None
) -> CudaBinary:
    """Compile CUDA C++ text.

    Args:
        source: the text; its `#line` marks decide what messages and line tables name.
        file_name: a relative name for the text; part of the binary's line table.
        headers: include name (`device/cuda.cuh`) to text. No file is read.
        target: a GPU target.
        options: NVRTC's; by default `cuda_options(target)`.

    Raises:
        CompileError: the text is refused; the message names template lines, also for errors of the assembler.
        ResourceError: it declares more shared memory than a block may have.
        ToolchainError: NVRTC is missing, broken, or too old for the target.
    """
    options = options or cuda_options(target)
    program = _Program(source, file_name, headers)
    failure = program.compile(options)
    log = program.log()
    if not failure:
        ptx = program.output("PTX")
        text = ptx.decode("utf-8", "replace")
        warnings = [*nvrtc_messages(log), *ptxas_warnings(log, text)]
        return CudaBinary(program.output("CUBIN"), ptx, parse_report(log), "\n\n".join(warnings))
    if "INVALID_OPTION" in failure:
        detail = " ".join(log.replace("\0", "").split())
        raise ToolchainError(
            f"NVRTC {version()} cannot compile for {target.nvrtc_arch} ({detail or failure}): pip install --upgrade {NVRTC_WHEEL}"
        )
    head = f"{file_name}, target {target.name}"
    if has_ptxas_errors(log):
        errors = "\n".join(ptxas_errors(log, _ptx_text(program, options, source, file_name, headers)))
        if _PTXAS_FULL in log:
            raise ResourceError(f"{head}: {errors}\nallowed: {target.shared_limit:,} bytes of shared memory, declared as dynamic")
        raise CompileError(f"{head}: the assembler refused the code\n{errors}")
    messages = nvrtc_messages(log)
    if "COMPILATION" not in failure:
        raise ToolchainError(f"{head}: NVRTC {version()} failed ({failure}); {INSTALL} --force-reinstall\n" + "\n".join(messages))
    errors = "\n".join(message for message in messages if "warning" not in message.split("\n", 1)[0]) or "\n".join(messages)
    raise CompileError(f"{head}: the compiler refused the code\n{errors}")


@cache
def version() -> str:
    """The version of the NVRTC library in this process, such as `13.5`."""
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


def loaded_path() -> str:
    """The file that NVRTC was loaded from in this process."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _nvrtc()
    return str(load_nvidia_dynamic_lib("nvrtc").abs_path)


@cache
def _nvrtc() -> Any:
    """The binding, once it is known to work."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"the Python package cuda-bindings is missing or broken ({error}): {INSTALL}") from error
    try:
        status, *_ = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader has exception classes of its own
        raise ToolchainError(f"the NVRTC library cannot be loaded ({type(error).__name__}: {error}): {INSTALL}") from error
    if int(status) != 0:
        raise ToolchainError(f"NVRTC does not work ({status.name}): pip install --force-reinstall {NVRTC_WHEEL}")
    return nvrtc


class _Program:
    """One NVRTC program."""

    def __init__(self, source: str, file_name: str, headers: Mapping[str, str]):
        self._api = _nvrtc()
        names: dict[str, bytes] = {}
        for name, text in headers.items():
            marked = f'#line 1 "{SOURCE_ROOT}templates/{name}"\n{text}'.encode()
            names[name] = marked
            # NVRTC does not look beside the including header: a header that includes its neighbour finds it by the bare name.
            names.setdefault(PurePosixPath(name).name, marked)
        status, self._handle = self._api.nvrtcCreateProgram(
            rooted(source).encode(),
            f"{SOURCE_ROOT}{file_name}".encode(),
            len(names),
            list(names.values()),
            [name.encode() for name in names],
        )
        self._check(status)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._api.nvrtcDestroyProgram(self._handle)

    def compile(self, options: tuple[str, ...]) -> str:
        """Compile; returns the name of the failure, "" for success."""
        (status,) = self._api.nvrtcCompileProgram(self._handle, len(options), [option.encode() for option in options])
        return "" if int(status) == 0 else str(status.name)

    def log(self) -> str:
        """Messages of the last compile."""
        return self._read("ProgramLog").decode("utf-8", "replace").rstrip("\0 \n")

    def output(self, kind: str) -> bytes:
        """`PTX` (its trailing NUL removed) or `CUBIN`; empty when there is none."""
        content = self._read(kind)
        return content.rstrip(b"\0") if kind == "PTX" else content

    def _read(self, kind: str) -> bytes:
        status, size = getattr(self._api, f"nvrtcGet{kind}Size")(self._handle)
        self._check(status)
        content = bytearray(size)
        if size:
            (status,) = getattr(self._api, f"nvrtcGet{kind}")(self._handle, content)
            self._check(status)
        return bytes(content)

    def _check(self, status: Any) -> None:
        if int(status) != 0:
            raise ToolchainError(f"NVRTC {version()} failed ({status.name}): pip install --force-reinstall {NVRTC_WHEEL}")


def _ptx_text(program: _Program, options: tuple[str, ...], source: str, file_name: str, headers: Mapping[str, str]) -> str:
    """The PTX that the assembler refused: what the failed program still has, or else that of the virtual architecture."""
    kept = program.output("PTX")
    if not kept:
        virtual = _Program(source, file_name, headers)
        virtual.compile(tuple(option.replace("=sm_", "=compute_") for option in options))
        kept = virtual.output("PTX")
    return kept.decode("utf-8", "replace")
