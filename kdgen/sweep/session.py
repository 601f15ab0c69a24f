"""What a sweep needs around it: the process on the GPU, the GPU's name and ceilings, the floors of the shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kdgen.errors import DeviceError, UsageError
from kdgen.sweep.hardware import speeds_of
from kdgen.sweep.load import SweepSpec
from kdgen.sweep.worker import CUDA, Worker
from kdgen.sweep.workloads import Shape, WorkloadSource
from kdgen.targets import Target

_START_SECONDS = 120.0


def open_worker(device: str, shapes: Sequence[Shape], seed: int, timing: tuple[int, int, int], limit: float, factory: str = CUDA) -> Worker:
    """The process that times.

    Args:
        device: `cuda` or `cuda:N`.
        shapes: that it will be asked for.
        seed: of workloads and cases.
        timing: launches of a graph, replays of a turn, turns.
        limit: seconds for one request.
        factory: what makes the measurer.

    Raises:
        UsageError: another device.
    """
    if not device.startswith("cuda"):
        raise UsageError(f"--device {device}: allowed are none, cuda, cuda:N; the host target emulates arithmetic, not time")
    launches, replays, rounds = timing
    names = tuple(shape.name for shape in shapes)
    settings = {"device": device, "shapes": names, "seed": seed, "launches": launches, "replays": replays, "rounds": rounds}
    return Worker(factory, settings, limit)


def measure_device(worker: Worker, target: Target) -> tuple[str, dict[str, float]]:
    """The GPU's name, and its ceilings.

    Raises:
        DeviceError: there is no GPU, or it does not work.
        UsageError: the GPU does not run builds for the target.
    """
    from kdgen.bench.ceilings import ceiling_kernels
    from kdgen.build import build_spec
    from kdgen.spec import Spec

    answer = worker.ask("device", limit=_START_SECONDS)
    if answer.status != "ok":
        raise DeviceError(answer.reason)
    found = answer.value
    if target.name not in found["targets"]:
        raise UsageError(f"--arch {target.name}: the GPU is a {found['name']}, which runs {', '.join(found['targets'])}")
    with tempfile.TemporaryDirectory(prefix="kdgen-sweep-") as directory:
        build_spec(Spec.of("ceilings", *ceiling_kernels()), [target], Path(directory))
        answer = worker.ask("ceilings", str(Path(directory) / "ceilings" / target.name), limit=_START_SECONDS)
    if answer.status != "ok":
        raise DeviceError(f"{found['name']}: its ceilings cannot be measured: {answer.reason}")
    return str(found["name"]), dict(answer.value)


def floors_of(spec: SweepSpec, shapes: Sequence[Shape], seed: int, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Shape to microseconds that reading its bytes alone takes, at the measured or the assumed read rate."""
    read = ceilings.get("read") or speeds_of(spec.target).read
    found = WorkloadSource(seed, light=True).get(spec.kernel, tuple(shape.name for shape in shapes))
    return {name: workload.moved_bytes / read * 1e6 for name, workload in found.items()}
