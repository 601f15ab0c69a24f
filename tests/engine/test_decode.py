"""Decoding: whatever the mode, the tokens and every bit of the logits are those of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.engine.config import ModelConfig
from kdgen.engine.draft import Ngram, Oracle, parse_drafter
from kdgen.engine.engine import Engine, Generation
from kdgen.engine.pages import CacheFullError
from kdgen.engine.round import Round
from kdgen.engine.state import Request
from kdgen.engine.traps import NotFiniteError, trap
from kdgen.errors import UsageError
from tests.engine.conftest import TOYS

#: Random decodes of the row-exact suite, per toy model and device.
DECODES = {"host": {"narrow": 50, "wide": 32}, "cuda": {"narrow": 270, "wide": 270}}


def random_request(rng: np.random.Generator, engine: Engine, longest: int = 40) -> Request:
    prompt = rng.integers(0, engine.config.model.vocab, int(rng.integers(1, longest)))
    return Request([int(token) for token in prompt], int(rng.integers(1, 18)))


def random_drafter(rng: np.random.Generator, depth: int = 7) -> Oracle:
    rates = tuple(float(rate) for rate in rng.choice([0.0, 0.5, 0.9, 1.0], depth))
    return Oracle(rates, tuple(int(rank) for rank in rng.integers(0, 4, depth)), seed=int(rng.integers(1 << 30)))


def same_bits(a: Generation, b: Generation) -> bool:
    return len(a.results) == len(b.results) and all(
        x.tokens == y.tokens and x.logits.tobytes() == y.logits.tobytes() for x, y in zip(a.results, b.results, strict=True)
    )


@pytest.mark.parametrize("name", TOYS)
def test_modes_give_the_same_tokens_and_the_same_bits(engines, device, name):
    """Random prompts, lengths, budgets, drafters, batch mates, page tables: against each sequence decoded plainly and alone."""
    rng = np.random.default_rng(TOYS.index(name))
    engine = engines(name, device)
    decodes = 0
    while decodes < DECODES[device][name.split("-")[1]]:
        requests = [random_request(rng, engine) for _ in range(int(rng.integers(1, 5)))]
        alone = [engine.generate([request], mode="ar", record=True) for request in requests]
        for mode in ("ar", "chain", "tree"):
            together = engine.generate(requests, mode=mode, budget=int(rng.integers(0, 25)), drafter=random_drafter(rng), record=True)
            for one, result in zip(alone, together.results, strict=True):
                assert result.tokens == one.results[0].tokens
                assert result.logits.tobytes() == one.results[0].logits.tobytes()
            decodes += len(requests)


def test_eight_sequences_give_each_the_bits_it_gets_alone(engines, device):
    rng = np.random.default_rng(5)
    engine = engines("tiny-narrow-int4", device)
    requests = [random_request(rng, engine, 90) for _ in range(8)]
    together = engine.generate(requests, mode="tree", budget=20, drafter=random_drafter(rng), record=True)
    for request, result in zip(requests, together.results, strict=True):
        (alone,) = engine.generate([request], mode="ar", record=True).results
        assert alone.tokens == result.tokens
        assert alone.logits.tobytes() == result.logits.tobytes()


def test_chunks_of_a_prompt_do_not_matter(engines, device, monkeypatch):
    rng = np.random.default_rng(6)
    engine = engines("tiny-narrow-f32", device)
    request = Request([int(token) for token in rng.integers(0, engine.config.model.vocab, 150)], 6)
    whole = engine.generate([request], mode="ar", record=True)
    assert whole.prompt_forwards == 1
    for rows in (1, 7, 16, 33, 64):
        monkeypatch.setattr("kdgen.engine.engine.CHUNK", rows)
        cut = engine.generate([request], mode="ar", record=True)
        assert cut.prompt_forwards == -(-150 // rows)
        assert same_bits(whole, cut)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_a_perfect_drafter_gives_eight_tokens_per_verification(engines, device, mode):
    engine = engines("tiny-narrow-f32", device)
    request = Request([3, 1, 4, 1, 5], 25)  # the first token comes from the prompt, so three verifications make the other 24
    plain = engine.generate([request], mode="ar", record=True)
    drafted = engine.generate([request], mode=mode, drafter=Oracle(), record=True)
    assert plain.forwards == 24
    assert drafted.results[0].accepted == (8, 8, 8)
    assert drafted.forwards == 3
    assert drafted.acceptance_length == 8.0
    assert same_bits(plain, drafted)


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.0])
def test_the_hit_rate_changes_the_speed_and_nothing_else(engines, device, rate):
    engine = engines("tiny-narrow-int4", device)
    request = Request([3, 1, 4, 1, 5, 9], 40)
    plain = engine.generate([request], mode="ar", record=True)
    chain = engine.generate([request], mode="chain", drafter=Oracle((rate,), seed=1), record=True)
    tree = engine.generate([request], mode="tree", drafter=Oracle((rate,), seed=1), record=True)
    assert same_bits(plain, chain)
    assert same_bits(plain, tree)
    assert tree.forwards <= chain.forwards <= plain.forwards
    if rate == 0:
        assert chain.forwards == plain.forwards


def test_with_the_chain_seed_no_round_accepts_fewer_than_the_chain(engines, device):
    """From the same position and the same draft, the tree holds the chain."""
    engine = engines("tiny-narrow-int4", device)
    rng = np.random.default_rng(9)
    for _ in range(6):
        request = random_request(rng, engine)
        drafter = random_drafter(rng)
        (chain,) = engine.generate([request], mode="chain", drafter=drafter, record=False).results
        (tree,) = engine.generate([request], mode="tree", drafter=drafter, record=False).results
        by_position = {}
        position = 0
        for count in chain.accepted:
            by_position[position] = count
            position += count
        position = 0
        for count in tree.accepted:
            assert count >= by_position.get(position, 0)
            position += count


def test_prompt_lookup_finds_a_repetition(engines, device):
    engine = engines("tiny-narrow-int4", device)
    rng = np.random.default_rng(2)
    prompt = [int(token) for token in rng.integers(0, engine.config.model.vocab, 10)]
    plain = engine.generate([Request(prompt, 60)], mode="ar", record=True)
    tree = engine.generate([Request(prompt, 60)], mode="tree", drafter=Ngram(), record=True)
    assert same_bits(plain, tree)
    # Told its own continuation, the prompt's text repeats, and lookup finds it.
    known = [*prompt, *plain.results[0].tokens, *prompt]
    again = engine.generate([Request(known, 20)], mode="tree", drafter=Ngram(), record=True)
    assert same_bits(engine.generate([Request(known, 20)], mode="ar", record=True), again)


def test_generation_ends_right_after_a_stop_token_inside_a_committed_block(engines, device):
    engine = engines("tiny-narrow-f32", device)
    request = Request([3, 1, 4], 30)
    (plain,) = engine.generate([request], mode="ar").results
    for place in (0, 1, 5, 12, 29):
        stop = plain.tokens[place]
        want = plain.tokens[: plain.tokens.index(stop) + 1]
        for mode in ("ar", "chain", "tree"):
            (result,) = engine.generate([request], mode=mode, drafter=Oracle(), stop_tokens=[stop], record=True).results
            assert result.tokens == want
            assert len(result.logits) == len(want)


def test_generation_ends_where_the_context_ends(engines, device):
    engine = engines("tiny-narrow-f32", device)
    context, engine.context = engine.context, 40
    try:
        for length in (30, 33, 39, 40):
            request = Request([7] * length, 100)
            plain = engine.generate([request], mode="ar", record=True)
            assert len(plain.results[0].tokens) == 40 - length + 1
            for mode in ("chain", "tree"):
                assert same_bits(plain, engine.generate([request], mode=mode, drafter=Oracle(), record=True))
        with pytest.raises(UsageError, match="a prompt of 41 tokens is longer than the context of 40"):
            engine.generate([Request([7] * 41, 1)], mode="ar")
    finally:
        engine.context = context


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([], {}, "0 sequences: the engine spec allows 1 … 8"),
        ([Request([], 3)], {}, "sequence 0: the prompt is empty"),
        ([Request([1], 3), Request([1, 192], 3)], {}, "sequence 1: token 192 of the prompt is outside the vocabulary of 192"),
        ([Request([-1], 3)], {}, "token -1 of the prompt"),
        ([Request([1], 0)], {}, "max_tokens 0: allowed are 1 … 512"),
        ([Request([1], 3)], {"mode": "beam"}, "mode 'beam': allowed are ar, chain, tree"),
        ([Request([1], 3)], {"mode": "tree"}, "mode tree needs a drafter"),
        ([Request([1], 3)], {"mode": "tree", "drafter": Ngram(), "budget": 25}, "budget 25: the engine spec allows 0 … 24"),
        ([Request([1], 3)], {"stop_tokens": range(9)}, "9 stop tokens: the engine spec's tree_commit takes 8"),
        ([Request([1], 3)], {"stop_tokens": [1 << 40]}, "stop token 1099511627776 is outside the vocabulary"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(engines, requests, options, message):
    engine = engines("tiny-narrow-int4", "host")
    free = len(engine.pool)
    with pytest.raises(UsageError, match=message):
        engine.generate(requests, **{"mode": "ar", **options})
    assert len(engine.pool) == free
    assert len(engine.generate([Request([1], 2)], mode="ar").results[0].tokens) == 2


def test_a_full_cache_is_refused_and_gives_everything_back(engines):
    engine = engines("tiny-narrow-int4", "host")
    held = engine.pool.take(len(engine.pool) - 3)
    try:
        with pytest.raises(CacheFullError, match=r"pages of the cache are needed and \d+ of \d+ are free"):
            engine.generate([Request([1] * 20, 10), Request([1] * 20, 10)], mode="ar")
        assert len(engine.pool) == 3
        engine.generate([Request([1] * 20, 10)], mode="ar")
    finally:
        engine.pool.give(held)


def test_a_trap_names_layer_and_stage(engines):
    engine = engines("tiny-narrow-int4", "host", 3)
    engine.observer = trap
    try:
        engine.generate([Request([1, 2], 4)], mode="tree", drafter=Ngram())
        weight = engine.weights.layers[1]["post_norm"]
        before = weight.numpy().copy()
        weight.copy_from(np.full(before.shape, np.nan, before.dtype))
        with pytest.raises(NotFiniteError, match="layer 1, stage post_norm: 'out' has"):
            engine.generate([Request([1, 2], 4)], mode="ar")
        weight.copy_from(before)
    finally:
        engine.observer = None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("ngram", Ngram()), ("oracle", Oracle(name="oracle")), ("oracle:0.9", Oracle((0.9,), name="oracle:0.9")),
        ("oracle:0.9,0.5@2,0", Oracle((0.9, 0.5), (2, 0), name="oracle:0.9,0.5@2,0")),
    ],
)  # fmt: skip
def test_drafters_by_name(text, want):
    assert parse_drafter(text) == want


@pytest.mark.parametrize("text", ["", "dflash", "ngram:3", "oracle:2", "oracle:x", "oracle:0.5@-1", "oracle:nan"])
def test_unknown_drafters(text):
    with pytest.raises(UsageError, match="allowed are ngram, oracle"):
        parse_drafter(text)


@pytest.mark.parametrize("mode", ["ar", "chain", "tree"])
def test_a_loop_on_the_device_decodes_the_same(engines, device, mode):
    engine = engines("tiny-narrow-int4", device)
    rng = np.random.default_rng(11)
    for _ in range(3):
        requests = [*(random_request(rng, engine) for _ in range(3)), Request([5], 1)]
        drafter = random_drafter(rng)
        by_host = engine.generate(requests, mode=mode, drafter=drafter)
        came: dict[int, list[int]] = {}
        by_device = engine.generate(
            requests,
            mode=mode,
            drafter=drafter,
            loop="device",
            on_tokens=lambda s, tokens, came=came: came.setdefault(s, []).extend(tokens),
        )
        assert [result.tokens for result in by_device.results] == [result.tokens for result in by_host.results]
        assert [sorted(result.accepted) for result in by_device.results] == [sorted(result.accepted) for result in by_host.results]
        assert by_device.forwards == by_host.forwards
        assert [came[s] for s in range(len(requests))] == [list(r.tokens) for r in by_host.results]


def test_a_device_loop_keeps_no_logits(engines):
    with pytest.raises(UsageError, match="device without recorded logits"):
        engines("tiny-narrow-int4", "host").generate([Request([1], 3)], mode="ar", loop="device", record=True)


def test_tokens_come_when_nothing_is_left_to_do(engines, device):
    engine = engines("tiny-narrow-int4", device)
    for loop in ("host", "device"):
        came: list[int] = []
        (result,) = engine.generate(
            [Request([5], 1)], mode="ar", loop=loop, on_tokens=lambda s, tokens, came=came: came.extend(tokens)
        ).results
        assert tuple(came) == result.tokens
        assert len(came) == 1


def test_a_listener_that_fails_leaves_the_engine_usable(engines, device):
    engine = engines("tiny-narrow-int4", device)

    def fails(s, tokens):
        raise BrokenPipeError

    free = len(engine.pool)
    for loop in ("host", "device"):
        with pytest.raises(BrokenPipeError):
            engine.generate([Request([5], 200)], mode="ar", loop=loop, on_tokens=fails)
        assert len(engine.pool) == free
    assert len(engine.generate([Request([5], 3)], mode="ar").results[0].tokens) == 3


class TwoDepths:
    """A drafter that has many candidates for two positions and none for the others."""

    name = "two depths"

    def bind(self, kit, state):
        call, log_probs, _ = Oracle().bind(kit, state)
        values = np.full(log_probs.shape, -np.inf, np.float32)
        values[:, :2] = -1 - np.arange(log_probs.shape[2])
        ids = np.broadcast_to(np.arange(log_probs.shape[2], dtype=np.int32), log_probs.shape)
        return call, log_probs.device.array(values), log_probs.device.array(np.ascontiguousarray(ids))


@pytest.mark.parametrize("drafter", [Oracle(), Ngram(), TwoDepths()])
def test_a_chain_is_a_chain(engines, drafter, monkeypatch):
    """Also where the drafter proposes less than there is room for: no node has a sibling."""
    engine, depths = engines("tiny-narrow-int4", "host"), []
    launch = Round.launch

    def watch(step, stream=None):
        launch(step, stream)
        depths.append(step.tree["depths"].numpy()[0, : step.tree["counts"].numpy()[0]].tolist())

    monkeypatch.setattr(Round, "launch", watch)
    engine.generate([Request([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 12)], mode="chain", drafter=drafter)
    assert depths
    assert all(found == list(range(len(found))) for found in depths)
    if isinstance(drafter, TwoDepths):
        assert max(len(found) for found in depths) == 3


def test_a_short_chain(engines, device):
    engine = engines("tiny-narrow-int4", device)
    plain = engine.generate([Request([3, 1], 25)], mode="ar", record=True)
    short = engine.generate([Request([3, 1], 25)], mode="chain", budget=3, drafter=Oracle(), record=True)
    assert short.results[0].accepted == (4,) * 6
    assert same_bits(plain, short)


def test_a_spec_for_several_ranks_is_refused():
    from kdgen.engine.engine import checked
    from kdgen.errors import SpecError
    from kdgen.spec import load_spec
    from tests.engine.conftest import SPECS

    spec = load_spec(SPECS / "kimi-k2.6.yaml")
    config = ModelConfig(model=spec.engine.model)
    with pytest.raises(SpecError, match="ranks: value 8, allowed 1"):
        checked(spec, config)


@pytest.mark.parametrize("changes", [["model.shared_experts=0"], ["model.dense_layers=0"], ["model.dense_layers=2"]])
def test_models_without_shared_experts_dense_layers_or_experts(tmp_path, changes):
    from kdgen.engine.bundle import config_of
    from kdgen.engine.checkpoint import open_tensors
    from kdgen.engine.random_model import random_tensors
    from kdgen.engine.reference import Reference
    from kdgen.runtime import open_device
    from kdgen.spec import load_spec
    from tests.engine.conftest import SPECS

    spec = load_spec(SPECS / "tiny-narrow-f32.yaml", changes)
    config = config_of(spec)
    checkpoint = open_tensors(config, dict(random_tensors(config, 1)))
    engine = Engine.open(spec, checkpoint, open_device("host"), out=tmp_path, context=64)
    plain = engine.generate([Request([3, 1, 4], 8)], mode="ar", record=True)
    tree = engine.generate([Request([3, 1, 4], 8)], mode="tree", budget=0, drafter=Oracle(), record=True)
    assert same_bits(plain, tree)
    tokens, logits = Reference(checkpoint).generate([3, 1, 4], 8, stop=False)
    assert list(plain.results[0].tokens) == tokens
    assert np.abs(plain.results[0].logits - logits).max() <= 2e-5
