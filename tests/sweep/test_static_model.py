from dataclasses import replace

import numpy as np
import pytest

from kdgen.compile.ptxas import Resources
from kdgen.errors import UsageError
from kdgen.spec import load_spec
from kdgen.sweep.hardware import SPEEDS, speeds_of
from kdgen.sweep.instructions import analyse_entry, count_one
from kdgen.sweep.static_model import estimate
from kdgen.sweep.workloads import WorkloadSource
from kdgen.targets import TARGETS, get_target
from tests.sweep.fakes import ROOT

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_x_0:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR36][R4.64] ;
.L_x_1:
        /*0020*/                   LDSM.16.M88.4 R8, [R2] ;
        /*0030*/                   LDS.128 R12, [R3] ;
        /*0040*/                   HMMA.16816.F32.BF16 R16, R8, R12, R16 ;
        /*0050*/                   IADD3 R2, R2, 0x10, RZ ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/               @P1 BRA `(.L_x_0) ;
        /*0090*/                   STG.E R4, [R2] ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   NOP ;
"""
GEMM = (
    load_spec(ROOT / "specs" / "kernels" / "gemm.yaml")
    .kernels[0]
    .with_params(n=2112, k=7168, tile={"n": 64, "k": 64}, warps={"n": 4, "k": 2}, slices=4, few_rows=8, stages=8)
)
ATTENTION = load_spec(ROOT / "specs" / "kernels" / "tree_attention.yaml").kernels[0]
HOT = {"instructions": 200, "mma": 32, "integer": 60, "shared_bytes": 8192, "load_bytes": 4096}


def estimates(kernel, arch="sm_90", shapes=("T = 1", "T = 64"), registers=100, hot=None):
    target = get_target(arch)
    contract = kernel.family.contract(kernel.params, target)
    need = dict.fromkeys(contract.entries, Resources(registers, 0, 0, 0, 0))
    code = {entry: {"hot": hot or HOT, "inner": 1} for entry in contract.entries}
    found = WorkloadSource(0, light=True).get(kernel, shapes)
    return [estimate(kernel, target, contract, need, code, found[shape]) for shape in shapes]


def test_the_innermost_loop_that_multiplies_is_counted():
    found = analyse_entry(SASS)
    assert found["loops"] == 2
    assert found["inner"] == 1
    assert found["whole"]["instructions"] == 11
    assert found["hot"] == {
        "branch": 1, "instructions": 5, "integer": 1, "mma": 1, "mma_operations": 4096, "shared": 2, "shared_bytes": 32 * (16 + 16),
    }  # fmt: skip


def test_code_without_matrix_instructions_counts_the_loop_that_loads():
    found = analyse_entry(SASS.replace("HMMA", "FFMA"))
    assert found["hot"]["load"] == 1
    assert found["hot"]["instructions"] == 8
    assert analyse_entry("        /*0000*/  EXIT ;")["hot"]["instructions"] == 1


@pytest.mark.parametrize(
    ("opcode", "counts"),
    [
        ("LDS.U16", {"shared": 1, "shared_bytes": 64}),
        ("LDG.E.64", {"load": 1, "load_bytes": 256}),
        ("LDGSTS.E.BYPASS.128", {"load": 1, "load_bytes": 512}),
        ("UBLKCP.S.G", {"load": 1, "bulk": 1}),
        ("LDSM.16.MT88.2", {"shared": 1, "shared_bytes": 256}),
        ("MUFU.EX2", {"mufu": 1}),
        ("UIADD3", {"uniform": 1}),
        ("FADD", {"float": 1}),
    ],
)
def test_classes(opcode, counts):
    assert count_one(opcode) == {"instructions": 1, **counts}


def test_every_gpu_target_has_speeds():
    assert set(SPEEDS) == {name for name, target in TARGETS.items() if not target.is_host}
    with pytest.raises(UsageError, match="host has no speeds"):
        speeds_of(get_target("host"))


def test_few_rows_are_limited_by_memory_and_never_beat_the_floor():
    few, many = estimates(GEMM)
    assert few.limiter == "memory"
    assert few.microseconds >= few.floor > 6
    assert many.microseconds > few.microseconds
    json = few.to_json()
    assert set(json["launches"][0]["terms"]) == {"memory", "l2", "latency", "mma", "issue", "shared", "chain"}


def test_each_bound_moves_what_it_should():
    base = estimates(GEMM, shapes=("T = 1",))[0].launches[0]
    slow = estimates(GEMM, shapes=("T = 1",), hot={**HOT, "instructions": 20_000, "integer": 15_000})[0]
    assert slow.limiter == "issue"
    assert slow.launches[0].terms["issue"] == pytest.approx(base.terms["issue"] * 15_000 / 2 / (200 / 4), rel=1e-6)
    wide = estimates(GEMM, shapes=("T = 1",), hot={**HOT, "shared_bytes": 8192 * 100})[0]
    assert wide.limiter == "shared"
    crowded = estimates(GEMM.with_params(slices=1, few_rows=0, stages=2, warps={"n": 4, "k": 1}), shapes=("T = 1",))[0]
    assert crowded.launches[0].grid == 33
    assert crowded.limiter == "latency", "33 blocks with two stages have too few bytes in flight for 132 multiprocessors"
    assert crowded.microseconds > 2 * base.seconds * 1e6


def test_a_join_of_slices_is_a_launch_of_its_own():
    found = estimates(GEMM, shapes=("T = 64",))[0]
    assert [item.entry for item in found.launches] == ["gemm_64", "gemm_join"]
    assert found.launches[1].terms["l2"] > 0
    assert found.launches[1].terms["memory"] == 0


def test_attention_counts_its_units():
    one, many = estimates(ATTENTION, shapes=("8k, T = 1", "8k, T = 64"))
    assert many.launches[0].terms["mma"] > 8 * one.launches[0].terms["mma"]
    narrow = ATTENTION.with_params(widths=[{"rows": 65536, "columns": [1, 1, 1, 1]}])
    assert estimates(narrow, shapes=("8k, T = 64",))[0].launches[0].terms["l2"] > 4 * many.launches[0].terms["l2"]
    assert one.launches[-1].entry == "tree_attention_combine"


def test_experts_are_fetched_once_for_each_tile_of_their_rows(monkeypatch):
    monkeypatch.setattr("kdgen.kernels.moe_gemm.TURNS", 2)
    kernel = load_spec(ROOT / "specs" / "kernels" / "moe_down.yaml").kernels[0]
    small = kernel.with_params(experts=16, n=256)
    few, many = estimates(small, shapes=("T = 1", "T = 64"))
    assert many.launches[0].terms["l2"] > few.launches[0].terms["l2"]
    wide = small.with_params(launches=[{"rows": 512, "row_tile": 32, "stages": 3}])
    assert estimates(wide, shapes=("T = 1",))[0].launches[0].terms["mma"] == pytest.approx(4 * few.launches[0].terms["mma"])


def test_a_tree_is_a_chain_of_nodes():
    kernel = load_spec(ROOT / "specs" / "kernels" / "tree_build.yaml").kernels[0]
    short, long = estimates(kernel, shapes=("B = 8", "B = 64"), hot={"instructions": 100, "integer": 80, "mma": 0})
    assert long.limiter == "chain"
    assert long.launches[0].terms["chain"] == pytest.approx(8 * short.launches[0].terms["chain"])


def test_a_family_without_an_own_count_is_predicted_by_its_workload():
    kernel = load_spec(ROOT / "specs" / "kernels" / "rmsnorm.yaml").kernels[0]
    workload = next(iter(kernel.family.workloads(kernel.params, np.random.default_rng(0))))
    (found,) = estimates(kernel, shapes=(workload.name,))
    assert found.microseconds > 0
    assert replace(workload, moved_bytes=0).moved_bytes == 0
