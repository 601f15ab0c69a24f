"""Compiler messages as people read them: template lines, each message once."""

from __future__ import annotations

import re

#: NVRTC makes every relative file name absolute with the working directory, and writes it into line tables. All names are therefore
#: given below this root, which need not exist, so that a cubin's bytes do not depend on where it was compiled.
SOURCE_ROOT = "/kdgen/"

_LINE_MARK = re.compile(r'^(#line [0-9]+ ")(?!/)', re.MULTILINE)
_NVRTC_PLACE = re.compile(r"^(\S.*?)\((\d+)\): ", re.MULTILINE)
_GNU_DEVICE = re.compile(r"(?<![\w/])device/(?=[\w.]+:\d)")
_NOISE = re.compile(r"Remark: The warnings can be suppressed|\d+ (catastrophic )?errors? detected in|Compilation terminated\.")


def rooted(source: str) -> str:
    """Text whose `#line` marks name files below `SOURCE_ROOT`."""
    return _LINE_MARK.sub(rf"\g<1>{SOURCE_ROOT}", source)


def nvrtc_messages(log: str) -> list[str]:
    """The messages of an NVRTC log: `templates/x.cu.j2:83: error: …` with the source line; ptxas' own are left out."""
    found: dict[str, str] = {}
    text = log.replace("\0", "").replace(SOURCE_ROOT, "")
    lines = [line for line in text.split("\n") if not line.startswith("ptxas ")]
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        message = _NVRTC_PLACE.sub(r"\1:\2: ", paragraph.strip("\n ")).rstrip()
        if message and not _NOISE.match(message):
            found.setdefault(message.split("\n", 1)[0], message)
    return list(found.values())


def gnu_messages(log: str, directory: str) -> list[str]:
    """The lines of a g++ or clang++ log, each once, device headers named as they are in the templates directory."""
    text = log.replace(f"{directory}/", "")
    lines = (_GNU_DEVICE.sub("templates/device/", line).rstrip() for line in text.split("\n"))
    return list(dict.fromkeys(line for line in lines if line))
