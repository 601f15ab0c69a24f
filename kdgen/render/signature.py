"""A kernel's C++ signature from its contract, and the host target's entry functions."""

from __future__ import annotations

import re
from collections.abc import Callable

from kdgen.contract import Argument, Contract
from kdgen.kernels.base import SharedLayout

C_TYPES: dict[str, str] = {
    "f64": "double", "f32": "float", "f16": "kd::f16", "bf16": "kd::bf16", "i64": "kd::i64", "i32": "int", "i16": "kd::i16",
    "i8": "kd::i8", "u64": "kd::u64", "u32": "kd::u32", "u16": "kd::u16", "u8": "kd::u8",
}  # fmt: skip

_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_KEYWORD_TEXT = """
    alignas alignof and asm auto bool break case catch char class const constexpr continue decltype default delete do double else enum
    explicit export extern false float for friend goto if inline int kd long mutable namespace new noexcept not nullptr operator or
    private protected public register requires return short signed sizeof static struct switch template this throw true try typedef
    typeid typename union unsigned using virtual void volatile while xor
"""
_KEYWORDS = frozenset(_KEYWORD_TEXT.split())


def check_names(contract: Contract) -> None:
    """ValueError when an entry, or an argument, cannot be a C++ name, appears twice, or has an unknown type."""
    arguments = [argument.name for argument in contract.arguments]
    for name in (*contract.entries, *arguments):
        if not _IDENTIFIER.match(name) or name in _KEYWORDS or "__" in name:
            raise ValueError(f"'{name}' cannot be a name in C++")
    for name in arguments:
        if arguments.count(name) > 1:
            raise ValueError(f"argument '{name}' appears twice")
    for argument in contract.arguments:
        if argument.dtype not in C_TYPES:
            raise ValueError(f"argument '{argument.name}' is a '{argument.dtype}'; allowed: {', '.join(C_TYPES)}")


def is_value(argument: Argument) -> bool:
    """True for arguments that are passed by value: scalars, and dimensions that the runtime fills in."""
    return argument.role in ("scalar", "dimension")


def c_type(argument: Argument) -> str:
    """The C++ type of an argument, without qualifiers that a cast cannot have."""
    element = C_TYPES[argument.dtype]
    if is_value(argument):
        return element
    return f"const {element}*" if argument.role == "in" else f"{element}*"


def signature(contract: Contract, called: set[str]) -> Callable[..., str]:
    """The template's `kernel(entry, min_blocks=1)`: `KD_KERNEL(threads, min_blocks) ENTRY(arguments)`.

    Args:
        contract: says the arguments and the launches.
        called: collects the entries that the template declares.
    """
    threads: dict[str, int] = {}
    for launch in contract.launches:
        threads[launch.entry] = max(launch.block, threads.get(launch.entry, 0))

    def kernel(entry: str, min_blocks: int = 1) -> str:
        if entry not in threads:
            raise ValueError(f'kernel("{entry}"): the contract has no such entry; allowed: {", ".join(threads)}')
        if not isinstance(min_blocks, int) or not 1 <= min_blocks <= 32:
            raise ValueError(f'kernel("{entry}"): min_blocks is {min_blocks}, allowed 1…32')
        called.add(entry)
        lines = []
        for argument in contract.arguments:
            restrict = "" if is_value(argument) else " __restrict__"
            lines.append(f"    {c_type(argument)}{restrict} {argument.name}")
        return f"KD_KERNEL({threads[entry]}, {min_blocks}) {entry}(\n" + ",\n".join(lines) + ")"

    return kernel


def host_entries(contract: Contract, shared: SharedLayout) -> str:
    """For every entry: a body that unpacks `args`, its red zones, and the exported launch function."""
    parts = []
    for entry in contract.entries:
        largest = max(launch.shared_bytes for launch in contract.launches if launch.entry == entry)
        zones = [f"{{{offset}, {size}}}" for offset, size in shared.red_zones if offset + size <= largest]
        values = []
        for index, argument in enumerate(contract.arguments):
            values.append(f"*static_cast<{c_type(argument)} const*>(args[{index}])")
        unpacked = ",\n      ".join(values)
        parts.append(f"""
static void kd_body_{entry}([[maybe_unused]] void* const* args) {{
  {entry}(
      {unpacked});
}}
static const kd::RedZone kd_zones_{entry}[] = {{{", ".join([*zones, "{0, 0}"])}}};
extern "C" int kdgen_launch_{entry}(void* const* args, const kd::LaunchConfig* config, char* message, unsigned long message_bytes) {{
  return kd::run_grid(kd_body_{entry}, args, *config, kd_zones_{entry}, message, message_bytes);
}}
""")
    return "".join(parts)
