"""Built kernels for verification: what lies in the output directory when it is current, a private build otherwise."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kdgen import scratch
from kdgen.errors import ArtifactError, KdgenError
from kdgen.runtime import Device, Kernel, load, open_device
from kdgen.spec import Spec
from kdgen.targets import Target, get_target
from kdgen.verify.schedules import Schedule


class Artifacts:
    """Finds or builds the kernels of specs; a context manager, since private builds go away with it.

    Args:
        target: what to build for.
        out: the directory `kdgen build` writes to.
    """

    def __init__(self, target: Target, out: Path):
        self.target = target
        self.out = out
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def directory(self, spec: Spec) -> Path:
        """A directory with current builds of the spec's kernels."""
        from kdgen.build import build_spec

        published = self.out / spec.name / self.target.name
        if is_current(published, spec, self.target):
            return published
        private = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=scratch.prefix("verify"))))
        build_spec(spec, [self.target], private)
        return private / spec.name / self.target.name


def is_current(directory: Path, spec: Spec, target: Target) -> bool:
    """True when `directory` holds undamaged builds of exactly these kernels, made by the compiler that is installed."""
    from kdgen.compile import compiler_id
    from kdgen.render import render_kernel
    from kdgen.runtime.manifest import read_manifest

    try:
        manifest = read_manifest(directory)
        hashes = {kernel.name: render_kernel(kernel, target, marks=True).content_hash for kernel in spec.kernels}
        return manifest.compiler == compiler_id(target) and {name: item.hash for name, item in manifest.kernels.items()} == hashes
    except ArtifactError:
        return False


def load_for(directory: Path, schedules: Sequence[Schedule], device: str) -> dict[Schedule, Mapping[str, Kernel]]:
    """The kernels in `directory`, loaded once for each schedule.

    Args:
        directory: of one target.
        schedules: host devices are set up for each; a GPU is opened once.
        device: `host`, `cuda` or `cuda:N`.
    """
    if device != "host":
        kit = load(directory, device=open_device(device))
        return dict.fromkeys(schedules, kit)
    return {schedule: load(directory, device=host_device(schedule)) for schedule in schedules}


def host_device(schedule: Schedule) -> Device:
    """A host device that follows `schedule`."""
    return open_device("host", order=schedule.order, copies=schedule.copies, seed=schedule.seed)


def target_of(device: str, *, sanitize: bool) -> Target:
    """The target whose builds run on `device`.

    Raises:
        DeviceError: there is no such device.
        KdgenError: kdgen has no target for the GPU.
    """
    if device == "host":
        return get_target("host_asan" if sanitize else "host")
    opened = open_device(device)
    for name in opened.target_names:
        try:
            return get_target(name)
        except KdgenError:
            continue
    raise KdgenError(f"{opened.name}: kdgen has no target for this GPU; it runs {', '.join(opened.target_names) or 'nothing'}")
