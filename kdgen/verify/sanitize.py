"""Verification under AddressSanitizer and UndefinedBehaviorSanitizer.

Their runtime must be in the process from its start, so the command runs itself once more in a process that has it. A sanitizer
ends that process at the first fault; it leaves behind, in a small file, what it was about to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kdgen import scratch
from kdgen.errors import KernelFault

#: Names the file in which the sanitized process notes what it runs. Its presence also says that this is that process.
NOTE_VARIABLE = "KDGEN_SANITIZER_NOTE"
#: Exit code of a process that a sanitizer stopped; none of kdgen's own.
STOPPED = 86


def is_sanitized() -> bool:
    """True in the process that `rerun` started."""
    return NOTE_VARIABLE in os.environ


def note(kernel: str, case: str, schedule: str) -> None:
    """Leave word of the launch that comes next."""
    Path(os.environ[NOTE_VARIABLE]).write_text(f"kernel {kernel}, case {case}, {schedule}", "utf-8")


def rerun(arguments: Sequence[str], program: Sequence[str] = ("-m", "kdgen.cli")) -> int:
    """Run `kdgen ARGUMENTS` (or another Python `program`) in a process with the sanitizers; returns its exit code.

    Raises:
        ToolchainError: the compiler has no sanitizer runtime.
        KernelFault: a sanitizer ended the process; its report is on standard error.
    """
    from kdgen.runtime import sanitizer_environment

    with tempfile.TemporaryDirectory(prefix=scratch.prefix("sanitize")) as directory:
        place = Path(directory) / "note"
        environment = {**os.environ, **sanitizer_environment(), NOTE_VARIABLE: str(place)}
        for variable in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):
            environment[variable] = ":".join(filter(None, (environment.get(variable), f"exitcode={STOPPED}")))
        code = subprocess.run([sys.executable, *program, *arguments], env=environment, check=False).returncode
        doing = place.read_text("utf-8") if place.exists() else "before the first launch"
    if code != STOPPED and code >= 0:
        return code
    raise KernelFault(f"the sanitizer stopped the run: {doing}; its report is above")
