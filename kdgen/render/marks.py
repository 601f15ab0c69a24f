"""`#line` marks: every line of the rendered text knows the template line it came from.

A Jinja extension puts an invisible *stamp* (file and line) before every piece of template text and every `{{ … }}`. Stamps survive
loops, branches, includes and imported macros, since they are part of the text that Jinja moves around. `place_marks` then reads
them: it takes the last stamp before the first visible character of a line, and writes a `#line` directive only where the compiler's
own count would be wrong. A directive never lands inside a line, nor inside a macro continued with a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

_STAMP = re.compile("\x01([^\x01\x02]*)\x1f([0-9]+)\x02")
#: Characters a template must not hold, because stamps are made of them.
RESERVED = re.compile("[\x01\x02\x1f]")


def _stamp(file: str, line: int) -> str:
    return f"\x01{file}\x1f{line}\x02"


class Stamps(Extension):
    """Stamps the text of every template. It works on tokens, after Jinja has trimmed white space, so it changes no text."""

    def filter_stream(self, stream: TokenStream) -> Iterable[Token]:
        """The tokens of a template with stamps among them."""
        file = f"templates/{stream.name}"
        for token in stream:
            if token.type == "data":
                lines = str(token.value).split("\n")
                stamped = "\n".join(_stamp(file, token.lineno + index) + line for index, line in enumerate(lines))
                yield Token(token.lineno, "data", stamped)
            else:
                if token.type == "variable_begin":
                    yield Token(token.lineno, "data", _stamp(file, token.lineno))
                yield token


def remove_stamps(text: str) -> str:
    """The text as it is without the extension."""
    return _STAMP.sub("", text)


def place_marks(text: str) -> str:
    """Stamped text with `#line` directives in place of the stamps."""
    out: list[str] = []
    place: tuple[str, int] | None = None  # of this line; lines inside a multi-line value keep the place of its first
    expected: tuple[str, int] | None = None  # what the compiler takes this line for
    continued = False
    for line in text.split("\n"):
        place = _place_of(line) or place
        clean = remove_stamps(line)
        if place and place != expected and clean.strip() and not continued:
            out.append(f'#line {place[1]} "{place[0]}"')
            expected = place
        out.append(clean)
        continued = clean.endswith("\\")
        expected = (expected[0], expected[1] + 1) if expected else None
    return "\n".join(out)


def _place_of(line: str) -> tuple[str, int] | None:
    """The last stamp before the first visible character."""
    found = None
    end = 0
    for match in _STAMP.finditer(line):
        if line[end : match.start()].strip():
            break
        found = (match[1], int(match[2]))
        end = match.end()
    return found
