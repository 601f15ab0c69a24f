"""Every tracked model bundle, decoded in every mode; bundles of bf16 activations; damaged and contradictory bundles."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kdgen.engine.bundle import Bundle, config_of, open_bundle, write_bundle
from kdgen.engine.checkpoint import open_tensors
from kdgen.engine.draft import Ngram, Oracle
from kdgen.engine.engine import Engine, Result
from kdgen.engine.model_file import spec_for
from kdgen.engine.random_model import random_tensors
from kdgen.engine.reference import Reference
from kdgen.engine.state import Request
from kdgen.errors import ArtifactError, SpecError, UsageError
from kdgen.kdtr import Reader, save
from kdgen.runtime import open_device
from kdgen.spec import load_spec
from tests.engine.conftest import SPECS
from tests.golden.regenerate import BUNDLES, HERE, MODEL_SEEDS

PATHS = sorted((HERE / "bundles").glob("*.kdtr"))
#: Largest difference of a logit with float32 activations.
BOUND = 1e-5
#: With bf16 ones: values that fall to the other side of a rounding in every stage; logits are of up to 12.
BF16_BOUND = 0.15


def ids_of(path: Path) -> str:
    return path.stem


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def decode(bundle: Bundle, device: str, out: Path, mode: str, drafter: Ngram | Oracle | None = None) -> Result:
    spec = spec_for(bundle.checkpoint.config, name=bundle.spec, activations=bundle.activations)
    assert spec.name == bundle.spec
    engine = Engine.open(spec, bundle.checkpoint, open_device(device), out=out, context=80)
    request = Request(bundle.golden.prompt, len(bundle.golden.tokens))
    (result,) = engine.generate([request], mode=mode, drafter=drafter, record=True).results
    return result


def test_there_are_the_four_models() -> None:
    assert [path.stem for path in PATHS] == sorted(MODEL_SEEDS)
    assert {f"bundles/{path.name}" for path in PATHS} < set(BUNDLES)


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_every_mode_gives_the_golden_tokens_and_the_same_bits(path: Path, device: str, out: Path) -> None:
    bundle = open_bundle(path)
    with bundle.checkpoint:
        hashes = set()
        for mode, drafter in (("ar", None), ("chain", Oracle((0.7,), seed=2)), ("tree", Oracle((0.7,), (1,), seed=3)), ("tree", Ngram())):
            result = decode(bundle, device, out, mode, drafter)
            assert result.tokens == bundle.golden.tokens
            assert len(result.tokens) == 24
            assert np.abs(result.logits - bundle.golden.logits).max() <= BOUND
            hashes.add(hashlib.sha256(result.logits.tobytes()).hexdigest())
        assert len(hashes) == 1


@pytest.mark.parametrize("path", PATHS, ids=ids_of)
def test_regenerating_gives_the_tracked_bytes_also_elsewhere(path: Path, tmp_path: Path) -> None:
    """The bytes are equal here; and no logit is so near the middle of two float32 that another order of its float64 sums could show."""
    write_bundle(tmp_path / "again.kdtr", load_spec(SPECS / f"{path.stem}.yaml"), seed=MODEL_SEEDS[path.stem], weights=False)
    assert (tmp_path / "again.kdtr").read_bytes() == path.read_bytes()
    bundle = open_bundle(path)
    _, exact = Reference(bundle.checkpoint).generate(bundle.golden.prompt, 24, stop=False)
    near = exact.astype(np.float32)
    for way in (-np.inf, np.inf):
        middle = (near.astype(np.float64) + np.nextafter(near, np.float32(way))) / 2
        assert np.abs(exact - middle).min() > 1e-12


@pytest.mark.parametrize("model", ["narrow", "wide"])
def test_int4_differs_from_f32(model: str) -> None:
    f32, int4 = (open_bundle(HERE / "bundles" / f"tiny-{model}-{kind}.kdtr") for kind in ("f32", "int4"))
    assert f32.golden.prompt == int4.golden.prompt
    assert 0.01 < np.abs(f32.golden.logits[0] - int4.golden.logits[0]).max() < 6
    assert f32.golden.tokens != int4.golden.tokens


@pytest.mark.parametrize("name", ["tiny-narrow-int4", "tiny-narrow-f32"])
def test_a_bundle_with_weights_holds_the_same_model(name: str, tmp_path: Path) -> None:
    write_bundle(tmp_path / "with.kdtr", load_spec(SPECS / f"{name}.yaml"), seed=MODEL_SEEDS[name])
    bundle, tracked = open_bundle(tmp_path / "with.kdtr"), open_bundle(HERE / "bundles" / f"{name}.kdtr")
    assert (tmp_path / "with.kdtr").stat().st_size > 1_000_000
    with bundle.checkpoint:
        assert bundle.golden.tokens == tracked.golden.tokens
        assert bundle.golden.logits.tobytes() == tracked.golden.logits.tobytes()
        assert bundle.checkpoint.config == tracked.checkpoint.config
        assert set(bundle.checkpoint.names) == set(tracked.checkpoint.names)
        for tensor in bundle.checkpoint.names:
            assert bundle.checkpoint.tensor(tensor).tobytes() == tracked.checkpoint.tensor(tensor).tobytes()


@pytest.mark.parametrize("seed", [2, 3, 6])
def test_bf16_gives_the_tokens_of_the_same_roundings(seed: int, device: str, out: Path, tmp_path: Path) -> None:
    write_bundle(tmp_path / "bf16.kdtr", load_spec(SPECS / "tiny-narrow-bf16.yaml"), seed=seed)
    bundle = open_bundle(tmp_path / "bf16.kdtr")
    assert bundle.activations == "bf16"
    with bundle.checkpoint:
        plain = decode(bundle, device, out, "ar")
        tree = decode(bundle, device, out, "tree", Oracle((0.8,)))
    assert tree.tokens == plain.tokens
    assert tree.logits.tobytes() == plain.logits.tobytes()
    golden = bundle.golden
    same = next((i for i, (a, b) in enumerate(zip(plain.tokens, golden.tokens, strict=True)) if a != b), len(golden.tokens))
    differences = np.abs(plain.logits - golden.logits)[: same + 1].max(axis=1)
    assert differences.max() <= BF16_BOUND
    assert differences.max() > BOUND
    if same < len(golden.tokens):
        best = np.sort(golden.logits[same])[-2:]
        assert best[1] - best[0] <= 2 * differences[same]
    else:
        assert plain.tokens == golden.tokens


@pytest.mark.parametrize("seed", [0, 5])
def test_bf16_beyond_the_bound_is_a_routers_near_tie(seed: int, device: str, out: Path) -> None:
    """Where a roundoff moves a router's choice, a row passes another expert, and all its logits move. Only a near tie can do that."""
    spec = load_spec(SPECS / "tiny-narrow-bf16.yaml")
    config = config_of(spec)
    checkpoint = open_tensors(config, dict(random_tensors(config, seed)))
    rng = np.random.Generator(np.random.PCG64(seed))
    prompt = [int(token) for token in rng.integers(0, config.model.vocab, 12)]
    engine = Engine.open(spec, checkpoint, open_device(device), out=out, context=80)
    (result,) = engine.generate([Request(prompt, 24)], mode="ar", record=True).results
    # Fed with the engine's own tokens, the numpy engine's rows can all be compared.
    seen: dict[tuple[int | None, str], np.ndarray] = {}
    reference = Reference(checkpoint, rounding="bf16", on_stage=lambda layer, stage, a: seen.update({(layer, stage): np.array(a)}))
    logits = reference.forward([*prompt, *result.tokens[:-1]], reference.new_cache())[len(prompt) - 1 :]
    (layer,) = range(config.model.dense_layers, config.model.layers)
    bias = checkpoint.tensor(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").astype(np.float64)
    scores = np.sort(1 / (1 + np.exp(-seen[layer, "router_logits"])) + bias, axis=1)[len(prompt) - 1 :]
    taken = config.model.experts_per_token
    margins = scores[:, -taken] - scores[:, -taken - 1]
    beyond = np.abs(result.logits - logits).max(axis=1) > BF16_BOUND
    assert beyond.any() or device != "host", "these seeds are here for such rows"
    assert beyond.sum() <= 3
    assert margins[beyond].max() < 0.01
    agree = logits.argmax(axis=1) == np.array(result.tokens)
    best = np.sort(logits, axis=1)
    assert (best[~agree & ~beyond, -1] - best[~agree & ~beyond, -2] <= 2 * BF16_BOUND).all()


# ---------------------------------------------------------------------------------------------------------------------- wrong input


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "toy.kdtr"
    write_bundle(path, load_spec(SPECS / "tiny-narrow-int4.yaml"), prompt=3, tokens=2)
    return path


def changed(path: Path, to: Path, *, attributes: dict | None = None, **tensors: np.ndarray | None) -> Path:
    """A copy with other attributes (None: left out) and tensors (`__` for a dot; None: left out)."""
    with Reader(path) as reader:
        held = dict(reader.attributes) | (attributes or {})
        values = {name: np.array(reader[name]) for name in reader} | {name.replace("__", "."): v for name, v in tensors.items()}
        save(to, {k: v for k, v in values.items() if v is not None}, {k: v for k, v in held.items() if v is not None})
    return to


@pytest.mark.parametrize(
    ("attributes", "tensors", "messages"),
    [
        ({"seed": None, "spec": None}, {"golden__logits": None}, ["not a bundle: spec, seed, golden.logits is missing", "kdgen bundle"]),
        ({"seed": "x", "activations": "f16"}, {}, ["attribute seed is 'x', it must be int", "activations is 'f16', allowed are bf16, f32"]),
        ({}, {"golden__tokens": np.zeros(2, np.float32)}, ["tensor 'golden.tokens' is f32 [2], expected i32 [any]"]),
        ({}, {"golden__logits": np.zeros((2, 191), np.float32)}, ["'golden.logits' is f32 [2, 191], expected f32 [2, 192]"]),
        ({}, {"golden__prompt": np.array([192], np.int32)}, ["tensor 'golden.prompt' has token 192; the vocabulary has 192"]),
        ({}, {"golden__prompt": np.zeros(0, np.int32)}, ["tensor 'golden.prompt' is empty"]),
        ({"weights_sha256": "0" * 64}, {}, ["the weights in it have the hash", "0000000000000000…; make the bundle again"]),
        ({}, {"model__norm__weight": np.ones(128, np.float32)}, ["the weights in it have the hash"]),
        ({}, {"model__norm__weight": np.ones(127, np.float32)}, ["tensor 'model.norm.weight' is f32 [127]; it must be", "[128]"]),
        ({}, {"model__norm__weight": np.ones(128, np.int32)}, ["tensor 'model.norm.weight' is i32 [128]; it must be"]),
        (
            {}, {"model__norm__weight": None, "model__norms__weight": np.ones(128, np.float32)},
            ["tensor 'model.norm.weight' is missing", "tensor 'model.norms.weight' (f32 [128]) is unexpected"],
        ),
    ],
)  # fmt: skip
def test_damaged_bundles(complete, tmp_path, attributes, tensors, messages):
    path = changed(complete, tmp_path / "wrong.kdtr", attributes=attributes, **tensors)
    with pytest.raises(ArtifactError) as error:
        open_bundle(path)
    assert str(path) in str(error.value)
    for message in messages:
        assert message in str(error.value)


def test_a_configuration_that_contradicts_itself(complete, tmp_path):
    with Reader(complete) as reader:
        config = dict(reader.attributes["config"])
    path = changed(complete, tmp_path / "wrong.kdtr", attributes={"config": config | {"num_experts_per_tok": 33, "hidden_size": -1}})
    with pytest.raises(SpecError) as error:
        open_bundle(path)
    assert "num_experts_per_tok" in str(error.value)
    assert "hidden_size" in str(error.value)


def test_weights_of_another_seed(tmp_path):
    path = changed(HERE / "bundles" / "tiny-narrow-int4.kdtr", tmp_path / "wrong.kdtr", attributes={"seed": 5})
    with pytest.raises(ArtifactError, match="the weights made from its seed 5 have the hash"):
        open_bundle(path)


def test_a_damaged_golden_tensor(tmp_path):
    data = bytearray((HERE / "bundles" / "tiny-narrow-int4.kdtr").read_bytes())
    data[1000] ^= 1
    (tmp_path / "wrong.kdtr").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"tensor 'golden\.logits' is damaged"):
        open_bundle(tmp_path / "wrong.kdtr")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("engines/tiny-narrow-int4.yaml", {"tokens": 0}, "12 \\+ 0 tokens; allowed are at least 1 each, together 1024"),
        ("engines/tiny-narrow-int4.yaml", {"prompt": 1001}, "1001 \\+ 24 tokens"),
        ("kernels/argmax.yaml", {}, "a kernel spec; a bundle is made from an engine spec"),
        ("engines/kimi-k2.6.yaml", {}, "a bundle is made from a spec for one rank"),
    ],
)  # fmt: skip
def test_what_no_bundle_is_made_of(spec, options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        write_bundle(tmp_path / "toy.kdtr", load_spec(SPECS.parent / spec), **options)
    assert list(tmp_path.iterdir()) == []
