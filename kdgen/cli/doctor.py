"""`kdgen doctor`: is everything here that kdgen needs? Each check is one line with, if it failed, the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer

from kdgen.cli import EXIT_FAILED
from kdgen.cli.output import print_json

Status = Literal["ok", "absent", "failed"]


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: what was looked at.
        status: `ok`; `absent` (something optional is missing); `failed` (something needed is missing or broken).
        detail: version or finding.
        remedy: what to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON, for bug reports.")] = False) -> None:
    """Check versions, compilers, targets and GPU, and compile a probe for every target.

    Leaves with 1 when something needed is missing. A missing GPU is no fault: compiling and the host target need none.

    Example: kdgen doctor
    """
    checks: list[Check] = []
    for check in run_checks():
        checks.append(check)
        if not json:
            print(f"{check.status:<6}  {check.name:<28}  {check.detail}", flush=True)
            if check.remedy:
                print(f"{'':<38}{check.remedy}")
    if json:
        print_json({"checks": [asdict(check) for check in checks], "ok": all(check.status != "failed" for check in checks)})
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(EXIT_FAILED)


def run_checks() -> Iterator[Check]:
    """All checks, one after the other."""
    yield from _python()
    yield from _packages()
    yield from _nvrtc()
    yield from _host_compilers()
    yield from _cache()
    yield from _gpu()
    yield from _probes()


def _python() -> Iterator[Check]:
    import platform
    import sys

    from kdgen import __version__

    yield Check("kdgen", "ok", __version__)
    fine = sys.version_info >= (3, 11)
    remedy = "" if fine else "kdgen needs Python 3.11 or newer"
    yield Check("python", "ok" if fine else "failed", f"{platform.python_version()} on {platform.system()} {platform.machine()}", remedy)


def _packages() -> Iterator[Check]:
    from importlib.metadata import PackageNotFoundError, version

    needed = {
        "compiler": ("numpy", "ml_dtypes", "pydantic", "PyYAML", "Jinja2", "ninja", "filelock", "typer", "rich"),
        "gpu compiler": ("cuda-bindings", "nvidia-cuda-nvrtc"),
        "optional": ("cuda-core", "nvidia-cuda-nvdisasm"),
    }
    uses = {"cuda-core": "launching on a GPU", "nvidia-cuda-nvdisasm": "--keep sass and the SASS part of kdgen diff"}
    for kind, names in needed.items():
        for name in names:
            try:
                yield Check(f"package {name}", "ok", version(name))
            except PackageNotFoundError:
                if kind == "optional":
                    extra = "cuda" if name == "cuda-core" else "compiler"
                    yield Check(f"package {name}", "absent", f"needed for {uses[name]}", f"pip install 'kdgen[{extra}]'")
                else:
                    yield Check(f"package {name}", "failed", "not installed", "pip install 'kdgen[compiler]'")


def _nvrtc() -> Iterator[Check]:
    from kdgen.targets import TARGETS

    try:
        from cuda.bindings import nvrtc

        (_, major, minor), (_, archs) = nvrtc.nvrtcVersion(), nvrtc.nvrtcGetSupportedArchs()
    except Exception as error:  # a missing module, a missing shared library: each raises something else
        yield Check("nvrtc", "failed", f"cannot be loaded: {error}", "pip install 'kdgen[compiler]'")
        return
    yield Check("nvrtc", "ok", f"{major}.{minor}")
    supported = {int(arch) for arch in archs}
    for target in TARGETS.values():
        if target.is_host:
            continue
        number = target.capability[0] * 10 + target.capability[1]
        if number in supported:
            yield Check(f"target {target.name}", "ok", f"compiled as {target.nvrtc_arch}")
        else:
            remedy = "pip install --upgrade nvidia-cuda-nvrtc"
            yield Check(f"target {target.name}", "failed", f"NVRTC {major}.{minor} does not know {target.nvrtc_arch}", remedy)


def _host_compilers() -> Iterator[Check]:
    import os
    import shutil
    import subprocess

    found = 0
    for name in dict.fromkeys(filter(None, (os.environ.get("KDGEN_CXX"), "g++", "clang++"))):
        path = shutil.which(name)
        if path is None:
            if name == os.environ.get("KDGEN_CXX"):
                yield Check(f"compiler {name}", "failed", "KDGEN_CXX names it, and it is not there", "unset KDGEN_CXX or correct it")
            continue
        found += 1
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        yield Check(f"compiler {name}", "ok" if answer.returncode == 0 else "failed", (answer.stdout or answer.stderr).split("\n")[0])
    if not found:
        yield Check("compiler g++", "failed", "neither g++ nor clang++ found: the host target needs one", "apt-get install g++")


def _cache() -> Iterator[Check]:
    import os

    from kdgen.build import cache_directory

    place = cache_directory()
    existing = next(path for path in (place, *place.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    remedy = "" if writable else "set KDGEN_CACHE_DIR to a directory you may write to"
    yield Check("cache", "ok" if writable else "failed", f"{place}{'' if writable else ' is not writable'}", remedy)


def _gpu() -> Iterator[Check]:
    try:
        from cuda.bindings import driver, nvrtc

        (status,) = driver.cuInit(0)
        count = int(driver.cuDeviceGetCount()[1]) if int(status) == 0 else 0
    except Exception:  # no bindings, or no libcuda.so
        count = 0
    if not count:
        yield Check("gpu", "absent", "none; not needed for compiling and for the host target")
        return
    version = int(driver.cuDriverGetVersion()[1])
    driver_version, nvrtc_version = (version // 1000, version % 1000 // 10), tuple(int(part) for part in nvrtc.nvrtcVersion()[1:])
    # Cubins of one CUDA major version load on every driver of that version.
    fine = driver_version[0] >= nvrtc_version[0]
    remedy = "" if fine else f"update the driver, or pip install 'nvidia-cuda-nvrtc<{driver_version[0] + 1}'"
    text = f"CUDA {driver_version[0]}.{driver_version[1]}, NVRTC {nvrtc_version[0]}.{nvrtc_version[1]}"
    yield Check("driver", "ok" if fine else "failed", text, remedy)
    attribute = driver.CUdevice_attribute
    for number in range(count):
        device = driver.cuDeviceGet(number)[1]
        name = driver.cuDeviceGetName(128, device)[1].split(b"\0")[0].decode()
        major = int(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)[1])
        minor = int(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)[1])
        yield Check(f"gpu {number}", "ok", f"{name}, compute capability {major}.{minor}")


def _probes() -> Iterator[Check]:
    """Compile one small kernel, with all device headers, for every target."""
    from kdgen.compile import compile_cuda, compile_host
    from kdgen.errors import KdgenError
    from kdgen.render import device_files
    from kdgen.targets import TARGETS

    for target in TARGETS.values():
        header = "host.hpp" if target.is_host else "cuda.cuh"
        body = "{ out[kd::thread()] = kd::lane(); kd::block_sync(); }"
        source = f'#include "device/{header}"\nKD_KERNEL(32, 1) probe(kd::u32* out) {body}\n'
        try:
            if target.is_host:
                binary = compile_host(source, "probe.cpp", device_files(target), target)
                size = len(binary.library)
            else:
                size = len(compile_cuda(source, "probe.cu", device_files(target), target).cubin)
            yield Check(f"probe {target.name}", "ok", f"compiled, {size:,} bytes")
        except KdgenError as error:
            # The sanitizer build is a help for kernel authors, not a need.
            status: Status = "absent" if target.sanitize else "failed"
            remedy = "see the finding" if target.sanitize else "see the finding; kdgen cannot build for this target"
            yield Check(f"probe {target.name}", status, str(error).split("\n")[0], remedy)
