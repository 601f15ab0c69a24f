import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from kdgen import cli
from kdgen.bench.ceilings import ceiling_kernels
from kdgen.bench.measure import Timing
from kdgen.bench.moe_layer import MoeLayer
from kdgen.bench.plot import curves, draw
from kdgen.bench.run import COLD_BYTES, Bench, Result
from kdgen.build import build_spec
from kdgen.errors import UsageError
from kdgen.kernels import families
from kdgen.runtime import load, open_device
from kdgen.spec import Spec, load_spec
from kdgen.targets import get_target

ROOT = Path(__file__).parents[2]
PROBE = str(ROOT / "specs" / "kernels" / "gemm_probe.yaml")


def test_the_host_is_not_timed():
    with pytest.raises(UsageError, match="the host target emulates arithmetic, not time"):
        Bench(Spec.of("ceilings", *ceiling_kernels()), "host")


def test_the_command_refuses_the_host(capsys):
    assert cli.run(["bench", PROBE, "--device", "host"]) == 2
    assert "emulates arithmetic, not time" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted(path for kind in ("kernels", "engines") for path in (ROOT / "specs" / kind).glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_kernel_of_an_engine_has_workloads_that_its_contract_takes(path):
    from kdgen.targets import get_target
    from kdgen.verify.kernel import bound_dimensions

    for kernel in load_spec(path).kernels:
        contract = kernel.family.contract(kernel.params, get_target("sm_90"))
        wanted = {a.name for a in contract.arguments if a.role in ("in", "inout", "scalar")}
        every = kernel.family.workloads(kernel.params, np.random.default_rng(0))
        workloads = list(itertools.islice(every, 10))  # later ones are only larger
        assert workloads or kernel.family.name == "primitives", kernel.name
        assert len({w.name for w in workloads}) == len(workloads)
        for workload in workloads:
            assert set(workload.inputs) == wanted
            known = bound_dimensions(contract, workload.inputs, workload.dimensions)
            assert set(contract.capacities) <= set(known)
            for symbol, capacity in contract.capacities.items():
                assert capacity.minimum <= known[symbol] <= capacity.maximum, (kernel.name, workload.name, symbol)


def test_ceilings_are_families_like_all_others():
    assert {kernel.family.name for kernel in ceiling_kernels()} <= set(families())


@pytest.mark.cuda
def test_the_command_times_every_workload(capsys):
    assert cli.run(["bench", PROBE, "--set", "n=2048", "--set", "k=4096", "--launches", "20", "--replays", "5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert 1e11 < said["ceilings"]["read"] < 2e13
    assert 1e13 < said["ceilings"]["mma"] < 1e16
    assert [r["workload"] for r in said["results"]] == ["T = 1", "T = 8", "T = 16", "T = 32", "T = 64"]
    for result in said["results"]:
        timing = result["timing"]
        assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        assert 0 < result["read_share"] < 1.1
        assert timing["launches"] >= COLD_BYTES // (2048 * 4096 * 2 + 64 * 4096 * 2) // 3


def test_the_moe_layer_of_an_engine_is_a_chain_of_its_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr("kdgen.kernels.moe_gemm.TURNS", 2)
    monkeypatch.setattr("kdgen.bench.moe_layer.ROWS", (1, 4))
    spec = load_spec(ROOT / "specs" / "engines" / "tiny.yaml")
    layer = MoeLayer.of(spec)
    assert set(layer.parts) == {"gate_up", "down", "combine", "plan", "route", "shared_gate_up", "shared_down"}
    kernels = Spec.of("moe", *layer.parts.values())
    build_spec(kernels, [get_target("host")], tmp_path)
    device = open_device("host")
    chains = list(layer.chains(load(tmp_path / "moe" / "host", device), device, np.random.default_rng(0)))
    assert [(chain.name, chain.workload) for chain in chains] == [(name, size) for size in ("T = 1", "T = 4") for name in layer.chain_names]
    for chain in chains:
        assert [len(turn.calls) for turn in chain.turns] == [3 if chain.name == "moe layer" else 7] * 2
        for turn in chain.turns:
            turn.launch(None)


def test_a_spec_without_experts_has_no_moe_layer():
    assert MoeLayer.of(load_spec(PROBE)) is None


def result(kernel: str, workload: str, median: float, share: float = 0.5) -> Result:
    return Result(kernel, workload, Timing(median, median, median, 10, 5), 1e12, 0.0, share, 0.0)


def test_curves_of_a_run():
    results = [
        result("a", "8k, T = 16", 2.0),
        result("a", "8k, T = 1", 1.0),
        result("a", "T = 8, skewed", 3.0),
        result("b", "no move", 4.0),
    ]
    found = curves(results)
    assert {name: [size for size, _ in points] for name, points in found.items()} == {
        "a 8k": [1, 16],
        "a skewed": [8],
        "b no move": [1],
    } | {}
    assert "a , skewed" not in found


def test_a_picture_of_a_run(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    draw([result("a", "T = 1", 1.0), result("a", "T = 8", 2.0), result("b", "no move", 4.0, 0.0)], "title", path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [item.name for item in tmp_path.iterdir()] == ["bench.png"]
