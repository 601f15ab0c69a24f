"""Timing on a GPU: correctness first, then replays of captured graphs, in turns with the base spec's own configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from kdgen.bench.ceilings import measure_ceilings
from kdgen.bench.measure import time_calls
from kdgen.bench.run import COLD_BYTES, bound
from kdgen.errors import DeviceError, LaunchError
from kdgen.kernels import families
from kdgen.kernels.base import Arrays, Workload
from kdgen.runtime import Kernel, load, open_device
from kdgen.spec import KernelSpec
from kdgen.sweep.telemetry import telemetry_of
from kdgen.sweep.worker import Job
from kdgen.sweep.workloads import KEPT_BYTES, CaseSource, WorkloadSource, digest_of
from kdgen.targets import TARGETS
from kdgen.verify.kernel import verify_kernel
from kdgen.verify.schedules import device_schedules

#: Bytes of inputs that stay on the GPU, and on the host, for other configurations where nobody knows how much there is.
PLACED_BYTES = 16 << 30
_MOST_COPIES = 200
_KITS = 64


def make(**settings: Any) -> CudaMeasurer:
    """The measurer of a worker process."""
    return CudaMeasurer(**settings)


class CudaMeasurer:
    """A GPU.

    Args:
        device: `cuda` or `cuda:N`.
        shapes: names of all workloads that may be asked for; they are made together.
        seed: of workloads and cases.
        launches: in a graph, at least.
        replays: timed, of each turn.
        rounds: turns of the configuration and the incumbent.
        regroup: other groupings of each case's rows that are checked.
    """

    def __init__(
        self,
        device: str,
        shapes: tuple[str, ...],
        *,
        seed: int = 0,
        launches: int = 48,
        replays: int = 3,
        rounds: int = 2,
        regroup: int = 1,
    ):
        self._device: Any = open_device(device)
        self._shapes, self._seed = tuple(shapes), seed
        self._launches, self._replays, self._rounds, self._regroup = launches, replays, rounds, regroup
        self._workloads, self._cases = WorkloadSource(seed, limit=host_bytes()), CaseSource()
        self._telemetry = telemetry_of(self._device)
        self._placed = Placed(self._device, device_bytes(self._device))
        self._kits: dict[str, Kernel] = {}

    def device(self) -> dict[str, Any]:
        """The card's name, and the targets whose builds run on it."""
        return {"name": self._device.card, "targets": list(self._device.target_names)}

    def ceilings(self, directory: str) -> dict[str, float]:
        """Measured read rate and `mma` rate."""
        kit = load(Path(directory), device=self._device)
        target = next(TARGETS[name] for name in self._device.target_names if name in TARGETS)
        found = measure_ceilings(kit, self._device, target.sms)
        return {"read": found.read, "mma": found.mma}

    def check(self, job: Job) -> str:
        """Every case of the family against its reference; other groupings of rows must not change a bit."""
        (schedule,) = device_schedules(1)
        spec = self._cases.wrap(kernel_spec(job))
        verdict = verify_kernel(spec, {schedule: self._kernel(job)}, self._seed, lambda kernel, case, name: None, self._regroup)
        faults = [failure for failure in verdict.failures if ": fault: " in failure]
        if faults:
            raise DeviceError(faults[0])
        refused = [failure for failure in verdict.failures if ": refused: " in failure]
        if refused:
            raise LaunchError(refused[0])
        return verdict.failures[0] if verdict.failures else ""

    def time(self, job: Job, incumbent: Job, shape: str) -> dict[str, Any]:
        """A configuration on one workload, in turns with the incumbent."""
        before = self._telemetry.read()
        own = self._calls(job, shape)
        theirs = own if job.name == incumbent.name else self._calls(incumbent, shape)
        timings, others = [], []
        for _ in range(self._rounds):
            timings.append(time_calls(self._device, own, max(self._launches, len(own)), self._replays))
            if theirs is not own:
                others.append(time_calls(self._device, theirs, max(self._launches, len(theirs)), self._replays))
        median = float(np.median([timing.median for timing in timings]))
        return {
            "median": median,
            "low": min(timing.low for timing in timings),
            "high": max(timing.high for timing in timings),
            "incumbent": float(np.median([timing.median for timing in others])) if others else median,
            "launches": timings[0].launches,
            "replays": self._rounds * self._replays,
            "before": before,
            "after": self._telemetry.read(),
        }

    def _kernel(self, job: Job) -> Kernel:
        if job.name not in self._kits:
            if len(self._kits) >= _KITS:
                self._kits.pop(next(iter(self._kits)))
            self._kits[job.name] = load(Path(job.directory), device=self._device)[job.kernel]
        return self._kits[job.name]

    def _calls(self, job: Job, shape: str) -> list[Any]:
        """As `kdgen bench` makes them: turns of a workload, or copies of a cold one's inputs that push each other out of the L2 cache."""
        kernel = self._kernel(job)
        workload = self._workloads.get(kernel_spec(job), self._shapes)[shape]
        outputs = kernel.allocate(**{**workload.dimensions, **bound(kernel, workload)})
        written = {argument.name for argument in kernel.contract.arguments if argument.role == "inout"}
        scalars = {argument.name for argument in kernel.contract.arguments if argument.role == "scalar"}

        def placed(inputs: Arrays, copy: int) -> dict[str, Any]:
            return {
                name: value.item() if name in scalars else self._placed.get(value, copy, name if name in written else "")
                for name, value in inputs.items()
            }

        if workload.turns:
            own = set().union(*workload.turns)
            shared = placed({name: value for name, value in workload.inputs.items() if name not in own}, 0)
            every = [{**shared, **placed(turn, 0)} for turn in workload.turns]
        else:
            every = [placed(workload.inputs, copy) for copy in range(copies_of(workload))]
        return [kernel.bind(**arrays, **outputs, dims=dict(workload.dimensions)) for arrays in every]


def copies_of(workload: Workload) -> int:
    """Copies of a cold workload's inputs that together exceed every L2 cache."""
    size = sum(array.nbytes for array in workload.inputs.values())
    return min(_MOST_COPIES, -(-COLD_BYTES // max(1, size))) if workload.cold else 1


def host_bytes() -> int:
    """What inputs may take of the host's memory: a quarter of what is free, 32 GiB at most."""
    try:
        return min(32 << 30, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    except (ValueError, OSError):
        return KEPT_BYTES


def device_bytes(device: Any) -> int:
    """What inputs may take of the GPU's memory: half of what is free."""
    try:
        from cuda.bindings import driver

        with device.current():
            status, free, _ = driver.cuMemGetInfo()
        return int(free) // 2 if int(status) == 0 else PLACED_BYTES
    except Exception:  # the host device, or bindings of another form: a limit is a precaution, not a reason to fail
        return PLACED_BYTES


class Placed:
    """Arrays on a device, found again by their contents: configurations of a workload share them.

    Args:
        device: where they are.
        limit: bytes; when they are reached, everything that no call holds is let go.
    """

    def __init__(self, device: Any, limit: int = PLACED_BYTES):
        self._device, self._limit, self._bytes = device, limit, 0
        self._found: dict[tuple[str, int, str], Any] = {}
        self._digests: dict[int, tuple[Any, str]] = {}

    def get(self, values: np.ndarray[Any, Any], copy: int, writer: str) -> Any:
        """The array on the device.

        Args:
            values: its contents.
            copy: which of several copies.
            writer: the argument through which kernels write it, which nothing else may then be; "" for one that is only read.
        """
        known = self._digests.get(id(values))
        if known is None or known[0] is not values:
            known = values, digest_of({"": values})
            self._digests[id(values)] = known  # the array is held, so that its id stays its own
        key = known[1], copy, writer
        if key not in self._found:
            if self._bytes + values.nbytes > self._limit:
                self._found.clear()
                self._digests.clear()
                self._bytes = 0
            self._found[key] = self._device.array(values)
            self._bytes += values.nbytes
        return self._found[key]


def kernel_spec(job: Job) -> KernelSpec:
    """The kernel of a job."""
    family = families()[job.family]
    return KernelSpec(job.kernel, family, family.params.model_validate_json(json.dumps(dict(job.params))))
