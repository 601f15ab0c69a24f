"""Peers: named when absent, refused when wrong, and what is computed for their comparison."""

import dataclasses

import numpy as np
import pytest

from kdgen.bench import attention_peers, peers
from kdgen.bench.ceilings import Ceilings
from kdgen.bench.measure import summary
from kdgen.bench.peers import Peer
from kdgen.bench.run import Bench
from kdgen.kernels import families, get_family
from kdgen.kernels.base import Workload
from kdgen.spec import KernelSpec, Spec

ABSENT = Peer("Nobody's kernel", "tree_accept", "no_such_module_anywhere", lambda params, workload: None)
KERNEL = KernelSpec("accept", get_family("tree_accept"), get_family("tree_accept").params(depth=2, budget=4))
WORKLOAD = Workload("w", {}, moved_bytes=2_000_000, flops=4_000_000)


@pytest.fixture
def bench(monkeypatch):
    made = Bench.__new__(Bench)
    made.spec, made.seed, made.absent, made.refused, made.ceilings = Spec.of("s", KERNEL), 0, {}, {}, Ceilings(4e12, 8e12)
    return made


def test_every_peer_belongs_to_a_family():
    assert {peer.family for peer in peers.peers()} <= set(families())
    assert len({peer.name for peer in peers.peers()}) == len(peers.peers())


def test_an_absent_peer_is_named(bench):
    assert bench._time_peer(ABSENT, KERNEL, WORKLOAD, 1, 3) is None
    assert list(bench.absent) == ["Nobody's kernel"]


def test_a_peer_that_fails_does_not_end_the_run(bench):
    def fails(params, workload):
        raise RuntimeError("needs sm_90a")

    broken = dataclasses.replace(ABSENT, module="json", prepare=fails)
    if not broken.installed:
        broken = type("Installed", (), {"name": broken.name, "installed": True, "prepare": staticmethod(fails)})()
    assert bench._time_peer(broken, KERNEL, WORKLOAD, 1, 3) is None
    assert bench.refused == {"Nobody's kernel": "w: RuntimeError: needs sm_90a"}


def test_shares_of_the_ceilings(bench):
    result = bench._result("accept", WORKLOAD, summary(np.array([1.0, 2.0, 3.0]), 10))
    assert (result.timing.median, result.timing.replays, result.timing.launches) == (2.0, 3, 10)
    assert (result.bandwidth, result.read_share) == (1e12, 0.25)
    assert (result.rate, result.mma_share) == (2e12, 0.25)


def test_the_check_of_attention_is_the_chain_in_float64():
    torch = pytest.importorskip("torch")
    family = get_family("tree_attention")
    settings = {"heads": 8, "rows": 8, "sequences": 1, "page_size": 32, "max_pages": 64, "depth": 5, "latent": 64, "rope": 64, "scale": 0.2}
    params = family.params.model_validate(settings)
    workload = next(iter(family.workloads(params, np.random.default_rng(0))))
    chain = attention_peers.Chain.__new__(attention_peers.Chain)
    inputs = workload.inputs
    chain.p, chain.queries = params, inputs["q"]
    chain.plain, chain.start = attention_peers.swizzled(inputs["cache"]), 1024 - 23 - 5
    chain.pages = inputs["page_tables"][0, :32]
    keys = chain.plain[chain.pages].reshape(-1, 128).astype(np.float64)[: chain.start + 1]
    scores = inputs["q"][0].astype(np.float64) @ keys.T * 0.2
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    right = weights @ keys[:, :64] / weights.sum(axis=1, keepdims=True)
    assert chain.error(torch.from_numpy(right[None])) < 1e-6
    assert chain.error(torch.from_numpy(right[None] + 0.5 * np.abs(right).max())) > 0.4
