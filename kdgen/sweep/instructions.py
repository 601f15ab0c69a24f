"""Machine code by what it does: counts per class of instruction, of whole entry points and of the loops that do the work.

How often a loop runs is not in the code. What is used of it are ratios inside the loop: instructions, shared-memory bytes and global
loads per matrix instruction, of which the workload says how many there are.
"""

from __future__ import annotations

import re
from typing import Any

from kdgen.compile.sass import split_entries

Counts = dict[str, int]

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)([^;]*)")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")

_CLASSES: dict[str, frozenset[str]] = {
    "mma": frozenset({"HMMA", "IMMA", "DMMA", "QMMA", "OMMA"}),
    "shared": frozenset({"LDS", "LDSM", "STS", "STSM", "ATOMS"}),
    "load": frozenset({"LDG", "LD", "LDGSTS", "UBLKCP", "UTMALDG"}),
    "store": frozenset({"STG", "ST", "RED", "REDG", "ATOM", "ATOMG"}),
    "local": frozenset({"LDL", "STL"}),
    "mufu": frozenset({"MUFU"}),
    "convert": frozenset({"I2F", "I2FP", "F2I", "F2F", "F2FP", "I2I"}),
    "float": frozenset({"FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "FSEL", "FSET", "HFMA2", "HADD2", "HMUL2", "DFMA", "DMUL", "DADD"}),
    "shuffle": frozenset({"SHFL", "REDUX", "CREDUX", "VOTE", "MATCH", "MOVM"}),
    "sync": frozenset({"BAR", "WARPSYNC", "SYNCS", "DEPBAR", "LDGDEPBAR", "BSSY", "BSYNC", "MEMBAR", "ERRBAR", "ENDCOLLECTIVE", "YIELD"}),
    "branch": frozenset({"BRA", "BRX", "EXIT", "CALL", "RET", "BREAK", "JMP", "NANOSLEEP"}),
}  # fmt: skip
_CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes}
#: Operations of one matrix instruction of a warp, a multiply-add counting two.
_MMA_OPERATIONS = {"16816": 4096, "1688": 2048, "16832": 8192, "16864": 16384}
_WARP = 32


def analyse(sass: str) -> dict[str, dict[str, Any]]:
    """Per entry point: `whole`, counts of its code; `hot`, counts of its innermost loops that multiply (else load);
    `inner`, how many those are; `loops`, how many there are.

    Args:
        sass: nvdisasm's text.
    """
    return {name: analyse_entry(text) for name, text in split_entries(sass).items()}


def analyse_entry(text: str) -> dict[str, Any]:
    """As `analyse`, of one entry point."""
    code: list[Counts] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in text.split("\n"):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.search(line):
            opcode = found[2]
            if opcode == "NOP":
                continue
            if opcode.split(".", 1)[0] == "BRA" and (target := _TARGET.search(found[3])):
                jumps.append((len(code), target[1]))
            code.append(count_one(opcode))
    loops = sorted({(labels[target], at) for at, target in jumps if target in labels and labels[target] <= at})
    whole = _total(code)
    for kind in ("mma", "load"):
        working = [loop for loop in loops if any(item.get(kind) for item in code[loop[0] : loop[1] + 1])]
        inner = [loop for loop in working if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in working)]
        if inner:
            hot = _total([item for first, last in inner for item in code[first : last + 1]])
            return {"whole": whole, "hot": hot, "inner": len(inner), "loops": len(loops)}
    return {"whole": whole, "hot": whole, "inner": 1, "loops": len(loops)}


def count_one(opcode: str) -> Counts:
    """The counts of one instruction, by its full opcode such as `LDS.128`."""
    name, *parts = opcode.split(".")
    kind = _CLASS_OF.get(name) or ("uniform" if name.startswith("U") or name in ("R2UR", "S2UR") else "integer")
    counts = {"instructions": 1, kind: 1}
    if kind == "mma":
        counts["mma_operations"] = next((_MMA_OPERATIONS[part] for part in parts if part in _MMA_OPERATIONS), 4096)
    elif kind == "shared":
        counts["shared_bytes"] = _WARP * _bytes(name, parts)
    elif name in ("LDG", "LD", "LDGSTS"):
        counts["load_bytes"] = _WARP * _bytes(name, parts)
    elif name in ("UBLKCP", "UTMALDG"):
        counts["bulk"] = 1
    return counts


def _bytes(name: str, parts: list[str]) -> int:
    """Bytes of a lane."""
    if name in ("LDSM", "STSM"):
        return 4 * next((int(part) for part in parts if part in ("2", "4")), 1)
    wide = next((int(part) for part in parts if part in ("64", "128", "256")), 0)
    narrow = 1 if {"U8", "S8"} & set(parts) else 2 if {"U16", "S16"} & set(parts) else 4
    return wide // 8 or narrow


def _total(items: list[Counts]) -> Counts:
    total: Counts = {"instructions": 0, "mma": 0, "mma_operations": 0, "shared_bytes": 0}
    for item in items:
        for key, value in item.items():
            total[key] = total.get(key, 0) + value
    return dict(sorted(total.items()))
