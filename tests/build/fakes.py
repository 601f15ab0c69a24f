"""Small specs whose kernels are inline text, so that tests of the build need neither templates nor families.

As a program, `python -m tests.build.fakes OUT TARGET` builds `demo_spec()`, for tests that need a build in a process of its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kdgen.render
from kdgen.contract import Argument, Contract, Launch
from kdgen.errors import KdgenError
from kdgen.kernels.base import Family, FamilyParams, SharedLayout
from kdgen.render import Source
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import Target, get_target

HEADERS = {
    False: {"device/cuda.cuh": "#pragma once\nusing u32 = unsigned;\n"},
    True: {
        "device/host.hpp": "#pragma once\nint scaled(int value);\n",
        "device/host_runtime.cpp": '#include "host.hpp"\nint scaled(int value) { return 10 * value; }\n',
    },
}

CUDA = """#include "device/cuda.cuh"
{mark}extern "C" __global__ void __launch_bounds__(1024) {name}(float* out) {{
  {body}
  out[threadIdx.x] = {value};
}}
"""
HOST = """#include "device/host.hpp"
[[maybe_unused]] static float out[8192];
{mark}extern "C" int kdgen_launch_{name}() {{
  {body}
  return scaled({value});
}}
"""
#: Many values alive at once: more than the few registers that 1024 threads of a block leave each.
SPILL = """float v[200];
  for (int i = 0; i < 200; i++) v[i] = out[i * 32];
  for (int r = 0; r < 3; r++) {
    #pragma unroll
    for (int i = 0; i < 200; i++) v[i] = v[i] * v[(i + 77) % 200] + v[(i + 5) % 200];
  }
  float sum = 0;
  for (int i = 0; i < 200; i++) sum += v[i];
  out[7] = sum;"""


class Params(FamilyParams):
    value: int = 1
    body: str = ""
    shared: int = 0


def contract_of(name: str, params: Params) -> Contract:
    return Contract("fake", (Argument("out", "f32", ("N",), "out"),), {}, (Launch(name, (1, 1, 1), 1024, params.shared),))


def _unused(*_: Any) -> Any:
    raise AssertionError("the build asked a family for more than its name")


FAMILY = Family("fake", "inline text", Params, contract=_unused, reference=_unused, cases=_unused)


def fake_kernel(name: str, *, allow_spill: bool = False, **params: Any) -> KernelSpec:
    return KernelSpec(name, FAMILY, Params(**params), allow_spill)


def fake_spec(*kernels: KernelSpec, name: str = "fake") -> Spec:
    digest = hashlib.sha256(repr([(kernel.name, kernel.params) for kernel in kernels]).encode()).hexdigest()
    return Spec(name, "engine", f"{name}.yaml", digest, ("sm_120", "host"), kernels)


def demo_spec(value: int = 1) -> Spec:
    return fake_spec(fake_kernel("first", value=value), fake_kernel("second", value=2))


def fake_render(kernel: KernelSpec, target: Target, marks: bool = False) -> Source:
    params = kernel.params
    assert isinstance(params, Params)
    text = (HOST if target.is_host else CUDA).format(
        mark=f'#line 40 "templates/{kernel.name}.cu.j2"\n' if marks else "", name=kernel.name, body=params.body, value=params.value
    )
    digest = hashlib.sha256(f"{target.name} {kernel.name} {params}".encode()).hexdigest()
    return Source(kernel.name, text, contract_of(kernel.name, params), SharedLayout.place(target), digest)


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the fakes in the place of rendering, with `monkeypatch.setattr` or `setattr`."""
    replace(kdgen.render, "render_kernel", fake_render)
    replace(kdgen.render, "device_files", lambda target: HEADERS[target.is_host])


def tree(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def main(out: str, target: str) -> int:
    from kdgen.build import build_spec

    install(setattr)
    try:
        report = build_spec(demo_spec(), [get_target(target)], Path(out))
    except KdgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(" ".join(kernel.status for kernel in report.targets[0].kernels))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
