"""The assembler's report: resources per entry point, and errors led back from PTX lines to template lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kdgen.compile.diagnostics import SOURCE_ROOT

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for '?([^'\s]+)'?")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_CUMULATIVE = re.compile(r"(\d+) bytes cumulative stack size")
_ERROR = re.compile(r"ptxas .*?, line (\d+); error\s*: (.*)")
_ERROR_WITHOUT_LINE = re.compile(r"ptxas (?:error|fatal)\s*: (.*)")
_NAMED_ENTRY = re.compile(r"[Ee]ntry function '([^']+)'")
_WARNING = re.compile(r"ptxas .*?(?:, line (\d+); )?warning\s*: (.*)")

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]+)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")


@dataclass(frozen=True)
class Resources:
    """What one entry point needs, by ptxas' report.

    Attributes:
        registers: 32-bit registers of a thread.
        static_shared_bytes: shared memory of a block that the text declares itself, in bytes.
        stack_bytes: local memory of a thread, in bytes: arrays indexed at run time, and spills.
        spill_store_bytes, spill_load_bytes: bytes of code's spilling stores and loads, of functions it may call included.
        barriers: named barriers of a block.
    """

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int = 0

    @property
    def spill_bytes(self) -> int:
        """Spilling stores and loads together."""
        return self.spill_store_bytes + self.spill_load_bytes


def parse_report(log: str) -> dict[str, Resources]:
    """Resources per entry point from the output of `--ptxas-options=-v`."""
    memory: dict[str, tuple[int, int, int]] = {}
    used: dict[str, str] = {}
    entry = function = ""
    for line in log.replace("\0", "").split("\n"):
        if found := _ENTRY.search(line):
            entry = function = found[1]
        elif found := _FUNCTION.search(line):
            function = found[1]
        elif found := _MEMORY.search(line):
            memory[function] = int(found[1]), int(found[2]), int(found[3])
        elif _REGISTERS.search(line) and entry:
            used[entry] = line
    # ptxas does not say who calls a function that is not inlined; its spills count for every entry.
    outside = [figures for name, figures in memory.items() if name not in used]
    resources = {}
    for name, line in used.items():
        stack, stores, loads = memory.get(name, (0, 0, 0))
        resources[name] = Resources(
            registers=_number(_REGISTERS, line),
            static_shared_bytes=_number(_SHARED, line),
            stack_bytes=max(stack, _number(_CUMULATIVE, line)),
            spill_store_bytes=stores + sum(figures[1] for figures in outside),
            spill_load_bytes=loads + sum(figures[2] for figures in outside),
            barriers=_number(_BARRIERS, line),
        )
    return dict(sorted(resources.items()))


def _number(pattern: re.Pattern[str], line: str) -> int:
    found = pattern.search(line)
    return int(found[1]) if found else 0


def has_ptxas_errors(log: str) -> bool:
    """True when the assembler, not the compiler before it, refused the text."""
    return bool(_ERROR.search(log) or _ERROR_WITHOUT_LINE.search(log))


def ptxas_errors(log: str, ptx: str) -> list[str]:
    """The assembler's errors as `templates/x.cu.j2:83: error: …`; their PTX line where the PTX has no line table."""
    lines = PtxLines(ptx)
    found: list[str] = []
    for line in log.replace("\0", "").split("\n"):
        if match := _ERROR.search(line):
            found.append(f"{lines.place(int(match[1]))}: error: {match[2].strip()}")
        elif (match := _ERROR_WITHOUT_LINE.search(line)) and "Ptx assembly aborted" not in line:
            named = _NAMED_ENTRY.search(line)
            found.append(f"{lines.entry_place(named[1]) if named else 'ptxas'}: error: {match[1].strip()}")
    return list(dict.fromkeys(found))


def ptxas_warnings(log: str, ptx: str) -> list[str]:
    """The assembler's warnings, placed as its errors are."""
    lines = PtxLines(ptx)
    found = []
    for line in log.replace("\0", "").split("\n"):
        if match := _WARNING.match(line):
            found.append(f"{lines.place(int(match[1])) if match[1] else 'ptxas'}: warning: {match[2].strip()}")
    return list(dict.fromkeys(found))


class PtxLines:
    """Leads lines of PTX text back to the source, by the `.file` and `.loc` directives of `-lineinfo`."""

    def __init__(self, ptx: str):
        self._lines = ptx.split("\n")
        self._files = {found[1]: found[2].removeprefix(SOURCE_ROOT) for line in self._lines if (found := _FILE.match(line))}

    def place(self, line: int) -> str:
        """`templates/x.cu.j2:83` for a 1-based PTX line; where the code was inlined from follows in brackets."""
        for text in reversed(self._lines[:line]):
            if found := _LOC.match(text):
                return self._format(found)
            if text.startswith("}"):
                break  # the end of another function
        return f"PTX line {line}"

    def entry_place(self, entry: str) -> str:
        """The first source line of an entry point, or its name."""
        inside = False
        for text in self._lines:
            inside = inside or f".entry {entry}(" in text
            if inside and (found := _LOC.match(text)):
                return self._format(found)
        return entry

    def _format(self, found: re.Match[str]) -> str:
        own = f"{self._files.get(found[1], 'file ' + found[1])}:{found[2]}"
        if not found[3]:
            return own
        # A primitive's own line says little: the line of the template that called it comes first.
        return f"{self._files.get(found[3], 'file ' + found[3])}:{found[4]} (in {own})"
