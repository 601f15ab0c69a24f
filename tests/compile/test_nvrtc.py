"""NVRTC: outputs, messages, reproducibility. No GPU is needed."""

import hashlib
import sys
from pathlib import Path

import pytest

from kdgen.compile import compile_cuda, compiler_id, cuda_options
from kdgen.compile import identity as identity_module
from kdgen.compile import nvrtc as nvrtc_module
from kdgen.errors import CompileError, ResourceError, ToolchainError
from kdgen.render import device_files
from kdgen.targets import TARGETS, get_target

SM_120 = get_target("sm_120")
PRIMITIVES = """#pragma once
#include "types.cuh"
__device__ __forceinline__ void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }
"""
HEADERS = {"device/cuda.cuh": PRIMITIVES, "device/types.cuh": "#pragma once\nusing u32 = unsigned;\n"}
SOURCE = """#include "device/cuda.cuh"
#line 7 "templates/x.cu.j2"
extern "C" __global__ void twice(float* out, const float* in) {
  const u32 i = threadIdx.x;
  out[i] = in[i] * 2.0f + in[i + 1];
}
"""


def compile_text(text: str, name: str = "x.cu"):
    return compile_cuda(text, name, HEADERS, SM_120)


def test_cubin_ptx_and_resources() -> None:
    binary = compile_text(SOURCE)
    assert binary.cubin[:4] == b"\x7fELF"
    assert b".visible .entry twice" in binary.ptx
    assert not binary.ptx.endswith(b"\0")
    assert binary.resources["twice"].registers > 0
    assert binary.resources["twice"].spill_bytes == 0
    assert binary.log == ""


def test_fused_multiply_adds_only_by_name() -> None:
    assert b"fma" not in compile_text(SOURCE).ptx
    assert b"fma.rn.f32" in compile_text(SOURCE.replace("in[i] * 2.0f + in[i + 1]", "__fmaf_rn(in[i], 2.0f, in[i + 1])")).ptx


def test_bytes_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    second = compile_text(SOURCE)
    assert hashlib.sha256(first.cubin).digest() == hashlib.sha256(second.cubin).digest()
    assert first.ptx == second.ptx
    assert str(tmp_path).encode() not in second.ptx
    assert b"x.cu.j2" in second.cubin, "profilers need the line table"


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if not target.is_host])
def test_every_target_compiles_the_device_header(name: str) -> None:
    target = get_target(name)
    define = f"#define KD_HAS_BULK_COPY {int(target.bulk_copy)}"
    kernel = "KD_KERNEL(32, 1) probe(kd::u32* out) { out[kd::thread()] = kd::lane(); }"
    binary = compile_cuda(f'{define}\n#include "device/cuda.cuh"\n{kernel}\n', "probe.cu", device_files(target), target)
    assert "probe" in binary.resources


def test_errors_name_template_lines_once() -> None:
    with pytest.raises(CompileError) as caught:
        compile_text(SOURCE.replace("2.0f", "factor"))
    message = str(caught.value)
    assert "x.cu, target sm_120" in message
    assert message.count('templates/x.cu.j2:9: error: identifier "factor" is undefined') == 1
    assert "\0" not in message
    assert "/kdgen/" not in message


def test_error_in_a_device_header_names_it() -> None:
    with pytest.raises(CompileError, match=r"templates/device/types.cuh:2: error"):
        compile_cuda(SOURCE, "x.cu", {**HEADERS, "device/types.cuh": "#pragma once\nusing u32 = unsinged;\n"}, SM_120)


def test_warnings_are_kept() -> None:
    binary = compile_text(SOURCE.replace("const u32 i", "int unused; const u32 i"))
    assert binary.log.startswith("templates/x.cu.j2:8: warning #177-D")
    assert "Remark" not in binary.log


@pytest.mark.parametrize("has_ptx", [True, False], ids=["kept PTX", "PTX of the virtual architecture"])
def test_assembler_errors_name_template_lines(has_ptx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_ptx:
        # An NVRTC that drops the PTX of a failed program: the first question for it is answered with nothing.
        real, asked = nvrtc_module._Program.output, []

        def output(program: nvrtc_module._Program, kind: str) -> bytes:
            asked.append(kind)
            return b"" if len(asked) == 1 else real(program, kind)

        monkeypatch.setattr(nvrtc_module._Program, "output", output)
    bad = SOURCE.replace("  out[i]", '  asm volatile("wgmma.fence.sync.aligned;");\n  out[i]')
    with pytest.raises(CompileError, match=r"templates/x.cu.j2:9: error: Instruction 'wgmma.fence' not supported on .target 'sm_120f'"):
        compile_text(bad)


def test_assembler_error_inside_a_primitive_names_its_caller() -> None:
    headers = {**HEADERS, "device/cuda.cuh": PRIMITIVES.replace("bar.sync 0", "no.such 0")}
    with pytest.raises(CompileError, match=r"templates/x.cu.j2:9 \(in templates/device/cuda.cuh:3\): error"):
        compile_cuda(SOURCE.replace("  out[i]", "  barrier(); out[i]"), "x.cu", headers, SM_120)


def test_too_much_static_shared_memory() -> None:
    with pytest.raises(ResourceError, match=r"templates/x.cu.j2:7: .*too much shared data[\s\S]*101,376 bytes"):
        compile_text(
            SOURCE.replace(
                "const u32 i", "__shared__ float all[60000]; all[threadIdx.x] = 1; __syncthreads(); out[9] = all[in[0] > 1]; const u32 i"
            )
        )


def test_unknown_architecture_says_what_to_upgrade() -> None:
    import dataclasses

    with pytest.raises(ToolchainError, match=r"cannot compile for sm_999 .*pip install --upgrade nvidia-cuda-nvrtc"):
        compile_cuda(SOURCE, "x.cu", HEADERS, dataclasses.replace(SM_120, nvrtc_arch="sm_999"))


def test_missing_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc_module._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError, match=r"cuda-bindings is missing.*pip install 'kdgen\[compiler\]'"):
        compile_text(SOURCE)


def test_host_is_no_target() -> None:
    with pytest.raises(ToolchainError, match="not a GPU"):
        cuda_options(get_target("host"))


def test_identity_needs_no_library_and_depends_on_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler_id(SM_120)
    assert first.startswith("NVRTC 1")
    assert compiler_id(get_target("sm_90")) == first

    class Wheel:
        version = "13.0.1"

        def __init__(self, files):
            self.files = files

    from importlib import metadata

    real = metadata.distribution(identity_module.NVRTC_WHEEL)
    monkeypatch.setattr(metadata, "distribution", lambda name: Wheel(real.files))
    identity_module.nvrtc_library.cache_clear()
    try:
        assert compiler_id(SM_120) == first.replace(real.version, "13.0.1")
        monkeypatch.setattr(metadata, "distribution", lambda name: Wheel([]))
        identity_module.nvrtc_library.cache_clear()
        with pytest.raises(ToolchainError, match="installed without its library"):
            compiler_id(SM_120)
    finally:
        identity_module.nvrtc_library.cache_clear()
