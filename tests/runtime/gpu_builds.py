"""Kernels for the tests of `CudaDevice`: as CUDA text for a GPU, and as Python for the fake driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from kdgen.contract import Argument, Capacity, Contract, Launch
from tests.runtime.builds import write_build
from tests.runtime.fake_cuda import Kernel, World, value

SOURCE = r"""
typedef unsigned long long u64;
extern "C" __global__ void scale(const float* __restrict__ x, int rows, float factor, float* __restrict__ out) {
  if (threadIdx.x < 4 && blockIdx.x < rows) out[blockIdx.x * 4 + threadIdx.x] = x[blockIdx.x * 4 + threadIdx.x] * factor;
}
extern __shared__ unsigned char arena[];
extern "C" __global__ void big(unsigned* __restrict__ out, unsigned last) {
  for (unsigned i = threadIdx.x; i <= last; i += blockDim.x) arena[i] = static_cast<unsigned char>(i * 7);
  __syncthreads();
  unsigned sum = 0;
  for (unsigned i = threadIdx.x; i <= last; i += blockDim.x) sum += arena[last - i];
  atomicAdd(out, sum);
}
extern "C" __global__ void chained(int* __restrict__ out) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) out[0] += 1;
}
extern "C" __global__ void copy(const unsigned short* __restrict__ a, unsigned short* __restrict__ b) { b[threadIdx.x] = a[threadIdx.x]; }
extern "C" __global__ void wild(int* __restrict__ out, u64 offset) { out[offset] = 1; }
"""

SCALE = Contract(
    "scale",
    (
        Argument("x", "f32", ("T", 4)),
        Argument("rows", "i32", ("T",), "dimension"),
        Argument("factor", "f32", (), "scalar"),
        Argument("out", "f32", ("T", 4), "out"),
    ),
    {"T": Capacity(1, 1 << 20)},
    (Launch("scale", ("T", 1, 1), 32),),
)
CONTRACTS: dict[str, Contract] = {
    "scale": SCALE,
    "big": Contract(
        "big",
        (Argument("out", "u32", (1,), "inout"), Argument("last", "u32", (), "scalar")),
        {},
        (Launch("big", (1, 1, 1), 128, 200 * 1024),),
    ),
    "chained": Contract(
        "chained",
        (Argument("out", "i32", (1,), "inout"),),
        {},
        tuple(Launch("chained", (1, 1, 1), 32, programmatic=True) for _ in range(3)),
    ),
    "together": Contract("together", (Argument("out", "i32", (1,), "inout"),), {}, (Launch("chained", (1, 1, 1), 32, cooperative=True),)),
    "copy": Contract("copy", (Argument("a", "bf16", (8,)), Argument("b", "bf16", (8,), "inout")), {}, (Launch("copy", (1, 1, 1), 8),)),
    "wild": Contract(
        "wild", (Argument("out", "i32", ("N",), "out"), Argument("offset", "u64", (), "scalar")), {}, (Launch("wild", (1, 1, 1), 1),)
    ),
}


def floats(pointer: bytes, count: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(value(pointer, "Q")))


def install_kernels(world: World) -> None:
    """The kernels of `SOURCE` in Python."""

    def scale(grid: Any, x: bytes, rows: bytes, factor: bytes, out: bytes) -> None:
        count = 4 * grid[0]
        assert value(rows, "i") == grid[0]
        floats(out, count)[:] = floats(x, count) * np.float32(value(factor, "f"))

    def add(pointer: bytes, amount: int) -> None:
        word = ctypes.c_uint32.from_address(value(pointer, "Q"))
        word.value += amount

    def big(grid: Any, out: bytes, last: bytes) -> None:
        add(out, sum(i * 7 % 256 for i in range(value(last, "I") + 1)))

    def copy(grid: Any, a: bytes, b: bytes) -> None:
        ctypes.memmove(value(b, "Q"), value(a, "Q"), 16)

    world.kernels = {
        "scale": Kernel(1, [8, 4, 4, 8], scale), "big": Kernel(2, [8, 4], big), "chained": Kernel(3, [8], lambda grid, out: add(out, 1)),
        "copy": Kernel(4, [8, 8], copy), "wild": Kernel(5, [8, 8], lambda grid, out, offset: None),
    }  # fmt: skip


def compile_cubin(arch: str) -> bytes:
    """`SOURCE` for a real architecture."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    program = check(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"kernels.cu", 0, None, None))
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def write_gpu_build(directory: Path, image: bytes, name: str, contracts: dict[str, Contract] = CONTRACTS) -> Path:
    """A built directory for a GPU target such as `sm_90`."""
    target = {"name": name, "nvrtc_arch": name, "capability": [int(name[3:-1]), int(name[-1])], "shared_limit": 232_448}
    return write_build(directory, dict.fromkeys(contracts, image), contracts, **target)
