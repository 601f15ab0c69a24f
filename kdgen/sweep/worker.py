"""GPU work in a process of its own, with a time limit: a kernel that hangs or brings the process down costs one configuration.

The process is started when first needed, kept from configuration to configuration with everything it has placed on the GPU, and started
anew after a crash, a kill, or a fault that leaves the GPU's context unusable.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from kdgen.errors import DeviceError, KdgenError, LaunchError
from kdgen.sweep.orphans import die_with_parent

#: What timing uses by default: `module:function`, called with the settings of `Measuring`.
CUDA = "kdgen.sweep.measure:make"


@dataclass(frozen=True)
class Job:
    """A configuration in a form that travels.

    Attributes:
        name: its id; its build is called so, too.
        family: the kernel family's name.
        params: its parameters as JSON data.
        kernel: the kernel's name within the build.
        directory: of its build for the target.
    """

    name: str
    family: str
    params: Mapping[str, Any]
    kernel: str
    directory: str


@dataclass(frozen=True)
class Answer:
    """How a request went.

    Attributes:
        status: `ok`, `failed` (the launch, or the process), `timeout`.
        value: what was asked for.
        reason: what went wrong.
    """

    status: Literal["ok", "failed", "timeout"]
    value: Any = None
    reason: str = ""


class Measurer(Protocol):
    """What runs in the process."""

    def device(self) -> dict[str, Any]:
        """`name` of the GPU, and whatever else is worth noting."""

    def ceilings(self, directory: str) -> dict[str, float]:
        """`read` in bytes/s and `mma` in operations/s."""

    def check(self, job: Job) -> str:
        """What is wrong with the results; "" when they are right. DeviceError when the GPU failed."""

    def time(self, job: Job, incumbent: Job, shape: str) -> dict[str, Any]:
        """`median`, `low`, `high` and `incumbent` in microseconds, and notes."""


@dataclass
class Worker:
    """The process, from outside; a context manager.

    Args:
        factory: `module:function` that makes the measurer, in the process.
        settings: its keywords.
        limit: seconds for one request.
    """

    factory: str = CUDA
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 120.0
    starts: int = 0
    _process: Any = None
    _pipe: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def ask(self, request: str, *arguments: Any, limit: float | None = None) -> Answer:
        """Have the measurer do something; never raises for what happens in the process.

        Args:
            request: a method of `Measurer`.
            arguments: its arguments.
            limit: seconds; None for the worker's own.
        """
        pipe = self._started()
        allowed = limit or self.limit
        try:
            pipe.send((request, arguments))
            if not pipe.poll(allowed):
                self.stop()
                return Answer("timeout", reason=f"no result within {allowed:g} seconds")
            status, value, is_spoiled = pipe.recv()
        except (EOFError, OSError):
            code = self._exit_code()
            self.stop()
            return Answer("failed", reason=f"the process that ran it ended ({code})")
        if is_spoiled:
            self.stop()
        return Answer("ok", value) if status == "ok" else Answer("failed", reason=str(value))

    def _started(self) -> Connection:
        if self._process is None or not self._process.is_alive():
            self.stop()
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs, self.factory, dict(self.settings), os.getpid()), daemon=True)
            self._process.start()
            theirs.close()
            self._pipe = ours
            self.starts += 1
        pipe: Connection = self._pipe
        return pipe

    def _exit_code(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        return "killed" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the process at once; the next request starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


def serve(pipe: Connection, factory: str, settings: dict[str, Any], parent: int) -> None:
    """The process: answers requests until the pipe is closed, or whoever asks has ended."""
    die_with_parent(parent)
    module, _, function = factory.partition(":")
    measurer: Any = None
    while True:
        try:
            request, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if measurer is None:
                measurer = getattr(importlib.import_module(module), function)(**settings)
            pipe.send(("ok", getattr(measurer, request)(*arguments), False))
        except LaunchError as error:
            pipe.send(("failed", str(error), False))
        except DeviceError as error:
            pipe.send(("failed", str(error), True))
        except KdgenError as error:
            pipe.send(("failed", str(error), False))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            pipe.send(("failed", f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})", True))
