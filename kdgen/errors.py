"""Every error kdgen raises on purpose. Each message says what is wrong, where, and what the reader can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KdgenError(Exception):
    """Base of all kdgen errors. The command line prints the message without a stack trace and exits with `exit_code`."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a spec file.

    Attributes:
        file: path as the user gave it.
        line: 1-based line, or 0 when the whole file is meant.
        key: dotted key (`kernels.tree_build.params.budget`), or "" for the document.
        message: what is wrong, with the value and what is allowed.
    """

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class SpecError(KdgenError):
    """A spec file is wrong; `faults` lists everything wrong with it, not only the first thing."""

    exit_code = 2

    def __init__(self, faults: Sequence[Fault]):
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))


class RenderError(KdgenError):
    """A template could not be rendered (an undefined name, a syntax error); names template and line."""


class CompileError(KdgenError):
    """The compiler refused the generated source; the message points at template lines."""


class ResourceError(KdgenError):
    """A kernel compiled, but spills or does not fit its target; the message gives the figures."""


class ToolchainError(KdgenError):
    """A compiler or library that is needed is missing or broken; the message says how to get it."""


class ArtifactError(KdgenError):
    """A manifest, cubin or container is missing, corrupt, truncated, newer than this kdgen, or for another target."""


class LaunchError(KdgenError):
    """A kernel was called with arguments its manifest does not allow."""


class DeviceError(KdgenError):
    """A device is missing, or failed while running a kernel."""


class KernelFault(DeviceError):
    """The host target found a fault in a kernel: a deadlock, a divergent collective, an access outside its memory."""


class UsageError(KdgenError):
    """The command line was used wrongly."""

    exit_code = 2
