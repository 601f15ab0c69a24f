"""A compiler, measurers and small sweep files for the tests: nothing is compiled and nothing needs a GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdgen.compile.ptxas import Resources
from kdgen.errors import CompileError, DeviceError, KdgenError
from kdgen.spec import KernelSpec
from kdgen.sweep.compiling import Compiled
from kdgen.sweep.load import SweepSpec, load_sweep
from kdgen.sweep.stages import Row
from kdgen.sweep.store import Place
from kdgen.sweep.worker import Job
from kdgen.sweep.workloads import Shape, WorkloadSource, choose_shapes
from kdgen.targets import Target, get_target

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "specs" / "sweeps").glob("*.yaml"))
PLACE = Place("s" * 64, "a GPU", "a compiler")
CLOCKS = {"clock_mhz": 1755, "temperature": 61, "throttle": ["power cap"]}
#: What the tests rely on, whatever is tuned in the shipped spec.
SMALL = {
    "n": 64, "k": 2048, "tile": {"n": 64, "k": 64}, "warps": {"n": 4, "k": 2}, "slices": 4, "few_rows": 8, "stages": 8,
}  # fmt: skip
SPACE = "  few_rows: [0, 8]\n  stages: [4, 6, 8]\n  slices: [2, 4]\n"
SHAPES = "  - {T: [1, 8], weight: 2.0, bucket: few}\n  - {T: [16, 64], bucket: many}\n"


def write_sweep(
    directory: Path, space: str = SPACE, *, constraints: str = "", shapes: str = SHAPES, base: str = "gemm", more: str = ""
) -> Path:
    """A sweep file over a small product."""
    small = directory / "small.yaml"
    parent = os.path.relpath(ROOT / "specs" / "kernels" / f"{base}.yaml", directory)
    sizes = f"params: {json.dumps(SMALL)}\n" if base == "gemm" else ""
    small.write_text(f"kind: kernel\nname: small\nbase: {parent}\n{sizes}")
    path = directory / "sweep.yaml"
    rules = f"constraints:\n{constraints}" if constraints else ""
    path.write_text(f"kind: sweep\nname: small\nbase: small.yaml\nspace:\n{space}{rules}shapes:\n{shapes}{more}")
    return path


def load_small(directory: Path, space: str = SPACE, **more: str) -> tuple[SweepSpec, tuple[Shape, ...]]:
    """A loaded sweep file, and its shapes."""
    spec = load_sweep(write_sweep(directory, space, **more), get_target("sm_90"))
    names = WorkloadSource(0, light=True).names(spec.kernel, spec.shapes)
    return spec, choose_shapes(names, spec.shapes, spec.document)


class FakeCompiler:
    """Gives every kernel some resources; what `spills` and `fails` name by a value of `stages` does not get far."""

    def __init__(self, spills: int = -1, fails: int = -1, most: int = 1 << 30):
        self.spills, self.fails, self.most = spills, fails, most
        self.compiled: list[str] = []

    def compile(self, kernels: Mapping[str, KernelSpec], target: Target) -> Iterator[tuple[str, Compiled | KdgenError]]:
        for name, kernel in reversed(kernels.items()):
            if len(self.compiled) >= self.most:
                raise KeyboardInterrupt
            self.compiled.append(name)
            params: Any = kernel.params
            if params.stages == self.fails:
                yield name, CompileError("small.cu: refused\ntemplates/gemm.cu.j2:1: error: no")
                continue
            contract = kernel.family.contract(kernel.params, target)
            need = Resources(100, 0, 0, 64 if params.stages == self.spills else 0, 0)
            hot = {"instructions": 200, "mma": 32, "integer": 60, "shared_bytes": 8192, "load_bytes": 4096}
            code = {entry: {"whole": hot, "hot": hot, "inner": 1, "loops": 1} for entry in contract.entries}
            yield name, Compiled(contract, name, dict.fromkeys(contract.entries, need), code, 0.0)


class FakeMeasurer:
    """Times that follow from the parameters. `stages` 3 hangs, 5 dies, 7 is wrong; 2 fails to launch."""

    def __init__(self, **settings: Any):
        self.settings = settings

    def device(self) -> dict[str, Any]:
        return {"name": "Fake GPU", "targets": ["sm_90"]}

    def ceilings(self, directory: str) -> dict[str, float]:
        assert Path(directory, "manifest.json").exists()
        return {"read": 4e12, "mma": 6e14}

    def check(self, job: Job) -> str:
        match job.params.get("stages"):
            case 3:
                time.sleep(600)
            case 5:
                os._exit(9)
            case 7:
                return "case T = 1: out[0, 0] is 1.0, want 2.0"
            case _:
                pass
        return ""

    def time(self, job: Job, incumbent: Job, shape: str) -> dict[str, Any]:
        if job.params.get("stages") == 2:
            raise DeviceError("an illegal memory access")
        own, other = cost(job.params, shape), cost(incumbent.params, shape)
        return {"median": own, "low": own * 0.998, "high": own * 1.002, "incumbent": other, "launches": 48, "replays": 6, "after": CLOCKS}


def make(**settings: Any) -> FakeMeasurer:
    return FakeMeasurer(**settings)


def make_broken(**settings: Any) -> FakeMeasurer:
    raise DeviceError("no GPU 0: none found")


def cost(params: Mapping[str, Any], shape: str) -> float:
    """Smooth, with one best place: 8 stages, 4 slices, few_rows 8."""
    rows = int(shape.rsplit("= ", 1)[1])
    stages, slices, few = int(params["stages"]), int(params["slices"]), int(params["few_rows"])
    return (5 + rows / 16) * (1 + 0.05 * (8 - stages)) * (1 + 0.04 * abs(slices - 4)) * (1 + 0.03 * (few == 0))


def comparable(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows without what may differ between two runs."""
    return [{key: value for key, value in row.to_json().items() if key != "details"} for row in rows]
