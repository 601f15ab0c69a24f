"""YAML 1.1 reads some plain words and numbers otherwise than people mean them. Each such scalar is refused with the remedy.

pyyaml implements YAML 1.1: `on` is a boolean, `010` is eight, `1:30` is ninety, and `1e5` is *text*. A spec that silently took
one of these would build another kernel than the one written down.
"""

from __future__ import annotations

import math
import re
from typing import Any

_TRUE_WORDS = frozenset({"yes", "on", "y"})
_FALSE_WORDS = frozenset({"no", "off", "n"})
_HEXADECIMAL = re.compile(r"[-+]?0[xX][0-9a-fA-F_]+\Z")
_BINARY = re.compile(r"[-+]?0[bB][01_]+\Z")
_NEW_OCTAL = re.compile(r"[-+]?0[oO][0-7_]+\Z")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+\Z")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?\Z")
_UNDERSCORES = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?\Z|[-+]?[0-9]*\.[0-9_]*_[0-9_]*\Z")
_EXPONENT = re.compile(r"(?P<sign>[-+]?)(?P<mantissa>[0-9]+\.?[0-9]*|\.[0-9]+)[eE](?P<exponent>[-+]?[0-9]+)\Z")
_YAML_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)[eE][-+][0-9]+\Z")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|nan)\Z", re.IGNORECASE)

_STR = "tag:yaml.org,2002:str"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


def trap_in(text: str, tag: str) -> tuple[str, Any] | None:
    """What is wrong with a plain (unquoted) scalar, and the value that was probably meant; None when nothing is.

    Args:
        text: the scalar as written.
        tag: the YAML tag that pyyaml resolves it to.
    """
    lowered = text.lower()
    if lowered in _TRUE_WORDS or lowered in _FALSE_WORDS:
        meant = lowered in _TRUE_WORDS
        return f"'{text}' is a boolean to some YAML readers and text to others; write {_shown(meant)}, or quote it: \"{text}\"", meant
    if _HEXADECIMAL.match(text):
        return _other_base(text, "hexadecimal", 16)
    if _BINARY.match(text):
        return _other_base(text, "binary", 2)
    if _NEW_OCTAL.match(text):
        return _other_base(text, "octal", 8)
    if _LEADING_ZERO.match(text):
        return _leading_zero(text)
    if _SEXAGESIMAL.match(text):
        return f"'{text}' is a base-60 number in YAML 1.1; write the number in decimal, or quote it: \"{text}\"", text
    if _UNDERSCORES.match(text):
        plain = text.replace("_", "")
        return f"'{text}' has underscores, which YAML readers treat differently; write {plain}", _number(plain)
    if _NOT_FINITE.match(text):
        return f"'{text}' is not a finite number; write a finite one", 0.0
    if tag == _STR and _EXPONENT.match(text) and not _YAML_FLOAT.match(text):
        return _exponent(text)
    if tag == _TIMESTAMP:
        return f"'{text}' is a date in YAML; quote it: \"{text}\"", text
    return None


def _shown(value: bool) -> str:
    return "true" if value else "false"


def _other_base(text: str, base_name: str, base: int) -> tuple[str, Any]:
    digits = text.lstrip("+-")[2:].replace("_", "") or "0"
    value = int(digits, base) * (-1 if text.startswith("-") else 1)
    return f"'{text}' is {base_name}, which YAML readers treat differently; write {value} in decimal", value


def _leading_zero(text: str) -> tuple[str, Any]:
    digits = text.replace("_", "")
    decimal = int(digits)
    try:
        octal = int(digits, 8)
    except ValueError:
        return f"'{text}' has a leading zero; write {decimal}, or quote it: \"{text}\"", decimal
    return f"'{text}' is octal in YAML 1.1, that is {octal}; write {octal} or {decimal}, whichever is meant", octal


def _exponent(text: str) -> tuple[str, Any]:
    match = _EXPONENT.match(text)
    assert match is not None
    mantissa, exponent = match["mantissa"], match["exponent"]
    if "." not in mantissa:
        mantissa += ".0"
    signed = exponent if exponent[0] in "+-" else f"+{exponent}"
    value = _number(text)
    choices = f"{match['sign']}{mantissa}e{signed}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        choices += f" or {int(value)}"
    return f"'{text}' is text, not a number, in YAML 1.1; write {choices}, or quote it: \"{text}\"", value


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        return value if math.isfinite(value) else 0.0
