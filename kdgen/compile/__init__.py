"""Compilers: CUDA C++ text to cubin and PTX through NVRTC, the same text to a shared library through g++ or clang++.

    binary = compile_cuda(source.text, "tree_build.cu", device_files(target), target)
    binary.resources["tree_build"].registers

No GPU, driver or CUDA toolkit is needed. Equal inputs and compilers give equal bytes, whatever the working directory.
"""

from __future__ import annotations

from kdgen.compile.host import HostBinary, compile_host, compile_host_runtime, host_options
from kdgen.compile.host_compiler import HostCompiler, find_host_compiler, host_isa
from kdgen.compile.identity import compiler_id
from kdgen.compile.nvrtc import CudaBinary, compile_cuda, cuda_options
from kdgen.compile.occupancy import Occupancy, occupancy
from kdgen.compile.ptxas import Resources
from kdgen.compile.sass import disassemble, nvdisasm_id, sass_summary

__all__ = [
    "CudaBinary",
    "HostBinary",
    "HostCompiler",
    "Occupancy",
    "Resources",
    "compile_cuda",
    "compile_host",
    "compile_host_runtime",
    "compiler_id",
    "cuda_options",
    "disassemble",
    "find_host_compiler",
    "host_isa",
    "host_options",
    "nvdisasm_id",
    "occupancy",
    "sass_summary",
]
