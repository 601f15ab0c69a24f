"""Machine code as text, and instruction counts."""

import importlib.metadata
import shutil

import pytest

from kdgen.compile import compile_cuda, disassemble, sass_summary
from kdgen.compile.sass import count_instructions, find_nvdisasm, split_entries
from kdgen.errors import ArtifactError, ToolchainError
from kdgen.targets import get_target

SASS = """	.section	.text.one,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR6][R36.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R5, RZ ;
        /*0030*/             @!UP0 LDSM.16.M88.4 R4, [R5] ;
        /*0040*/                   LDS.U8 R4, [R5] ;
        /*0050*/                   STL.64 [R1], R4 ;
        /*0060*/                   EXIT ;
        /*0070*/                   NOP;
	.section	.text.two,"ax",@progbits
        /*0000*/                   STS [R5], R4 ;
	.section	.nv.info,"",@"SHT_CUDA_INFO"
        /*0000*/                   STS [R5], R4 ;
"""


def test_counts() -> None:
    entries = split_entries(SASS)
    assert list(entries) == ["one", "two"]
    counts = count_instructions(entries["one"])
    present = {"LDG.128": 1, "HMMA": 1, "LDSM": 1, "LDSM.4": 1, "LDS.8": 1, "STL": 1}
    assert counts == {"instructions": 7, "bytes": 128, **present, "LDL": 0, "LDGSTS": 0, "UBLKCP": 0}
    assert count_instructions(entries["two"])["STS.32"] == 1


def test_of_a_cubin() -> None:
    source = 'extern "C" __global__ void copy(float4* out, const float4* in) { out[threadIdx.x] = in[threadIdx.x]; }'
    counts = sass_summary(compile_cuda(source, "copy.cu", {}, get_target("sm_120")).cubin)["copy"]
    assert counts["LDG.128"] == counts["STG.128"] == 1
    assert counts["LDL"] == counts["HMMA"] == 0
    assert counts["bytes"] % 128 == 0


def test_not_a_cubin() -> None:
    with pytest.raises(ArtifactError, match="no cubin"):
        disassemble(b"text")
    with pytest.raises(ArtifactError, match=r"nvdisasm .* cannot read the cubin"):
        disassemble(b"\x7fELF" + b"\0" * 60)


def test_missing_nvdisasm(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    find_nvdisasm.cache_clear()
    try:
        with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
            disassemble(b"\x7fELF")
    finally:
        find_nvdisasm.cache_clear()
