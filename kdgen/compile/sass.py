"""Machine code as text, and counts of the instructions that decide a kernel's speed, through nvdisasm from its wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from kdgen.errors import ArtifactError, ToolchainError

NVDISASM_WHEEL = "nvidia-cuda-nvdisasm"

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_ANY_SECTION = re.compile(r"^\s*\.section\s")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)")
_INSTRUCTION_BYTES = 16

#: Counted by the first part of the opcode.
_COUNTED = ("HMMA", "IMMA", "DMMA", "OMMA", "QMMA", "LDSM", "LDGSTS", "UBLKCP", "UTMALDG", "LDL", "STL", "BAR", "SHFL", "REDUX")
#: Counted by the first part and the width.
_BY_WIDTH = ("LDS", "STS", "LDG", "STG")


@cache
def find_nvdisasm() -> tuple[str, str]:
    """Path and version of nvdisasm: that of the wheel, else the one on PATH.

    Raises:
        ToolchainError: there is none.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution(NVDISASM_WHEEL)
        for file in wheel.files or ():
            path = Path(str(file.locate()))
            if file.name == "nvdisasm" and path.is_file():
                return str(path), wheel.version
    except PackageNotFoundError:
        pass
    found = shutil.which("nvdisasm")
    if found is None:
        raise ToolchainError(
            f"nvdisasm, which shows machine code, is not installed: pip install {NVDISASM_WHEEL} (part of 'kdgen[compiler]')"
        )
    answer = _run([found, "--version"])
    match = re.search(r"V(\d[\d.]*)", answer)
    return found, match[1] if match else " ".join(answer.split())


def nvdisasm_id() -> str:
    """The disassembler's identity, such as `nvdisasm 13.5.37`."""
    return f"nvdisasm {find_nvdisasm()[1]}"


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text, all its entry points.

    Raises:
        ToolchainError: nvdisasm is missing or cannot run.
        ArtifactError: nvdisasm does not take the bytes for a cubin.
    """
    path, version = find_nvdisasm()
    if cubin[:4] != b"\x7fELF":
        raise ArtifactError(f"{len(cubin)} bytes that are no cubin cannot be disassembled; rebuild with: kdgen build SPEC --force")
    # nvdisasm reads no standard input; a file in memory leaves nothing behind, however this process ends.
    with os.fdopen(os.memfd_create("cubin"), "wb") as file:
        file.write(cubin)
        file.flush()
        name = f"/proc/self/fd/{file.fileno()}"
        try:
            # The dataflow analysis is for branch stacks of chips that kdgen has no target for.
            return _run([path, "--print-code", "--no-dataflow", name], file.fileno())
        except subprocess.CalledProcessError as error:
            reason = " ".join((error.stderr or error.stdout or "").replace(name, "cubin").split())
            raise ArtifactError(
                f"nvdisasm {version} cannot read the cubin ({reason}); if it is newer: pip install --upgrade {NVDISASM_WHEEL}, "
                "else rebuild with: kdgen build SPEC --force"
            ) from error


def split_entries(sass: str) -> dict[str, str]:
    """The text of each entry point."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in sass.split("\n"):
        if match := _SECTION.match(line):
            current = found.setdefault(match[1], [])
        elif _ANY_SECTION.match(line):
            current = None
        if current is not None:
            current.append(line)
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def sass_summary(cubin: bytes) -> dict[str, dict[str, int]]:
    """Per entry point: `instructions`, `bytes`, and counts of the kinds that occur.

    Kinds: matrix instructions (`HMMA`, …), `LDSM` and `LDSM.4` (ldmatrix, of four matrices), `LDGSTS` (cp.async), `UBLKCP` (bulk copies),
    `LDL` and `STL` (local memory: spills or indexed arrays), shared and global accesses by width in bits (`LDS.128`, `LDG.128`, …).

    Raises:
        ToolchainError, ArtifactError: as in `disassemble`.
    """
    return {name: count_instructions(text) for name, text in split_entries(disassemble(cubin)).items()}


def count_instructions(sass: str) -> dict[str, int]:
    """Counts of the instructions in nvdisasm's text; NOPs that pad the end are not counted as instructions, but as bytes."""
    counts = {"instructions": 0, "bytes": 0, "LDL": 0, "STL": 0, "HMMA": 0, "LDGSTS": 0, "UBLKCP": 0}
    for match in _INSTRUCTION.finditer(sass):
        opcode, *parts = match[1].split(".")
        counts["bytes"] += _INSTRUCTION_BYTES
        if opcode == "NOP":
            continue
        counts["instructions"] += 1
        if opcode in _COUNTED:
            counts[opcode] = counts.get(opcode, 0) + 1
            if opcode == "LDSM" and "4" in parts:
                counts["LDSM.4"] = counts.get("LDSM.4", 0) + 1
        elif opcode in _BY_WIDTH:
            width = next((part for part in parts if part in ("64", "128", "256")), "8" if "U8" in parts or "S8" in parts else "")
            width = width or ("16" if "U16" in parts or "S16" in parts else "32")
            counts[f"{opcode}.{width}"] = counts.get(f"{opcode}.{width}", 0) + 1
    return dict(sorted(counts.items()))


def _run(command: list[str], *inherited: int) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, pass_fds=inherited).stdout
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot run ({error.strerror}): pip install --force-reinstall {NVDISASM_WHEEL}") from error
