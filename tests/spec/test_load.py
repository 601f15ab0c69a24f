"""Loading: values, all faults at once, derived values, overrides, fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdgen.errors import SpecError, UsageError
from kdgen.spec import load_spec


def test_kernel_spec(loader, kernel_text):
    spec = loader.load(kernel_text)
    kernel = spec.kernel("toy")
    assert (spec.name, spec.kind, spec.targets, spec.engine) == ("toy", "kernel", ("sm_120", "host"), None)
    assert (kernel.params.tile.m, kernel.params.stages, kernel.allow_spill, kernel.line) == (16, 2, False, 2)
    with pytest.raises(UsageError, match="did you mean 'toy'"):
        spec.kernel("toi")


def test_engine_spec(loader, engine_text):
    spec = loader.load(engine_text)
    line = engine_text.splitlines().index("  probe:") + 1
    assert spec.engine is not None
    assert (spec.kernel("probe").line, spec.engine.draft.block, spec.engine.draft.mask_token) == (line, 8, 255)


def test_digest_depends_on_values_only(loader, tmp_path, kernel_text):
    spec = loader.load(kernel_text)
    elsewhere = tmp_path / "elsewhere.yaml"
    elsewhere.write_text("# a comment\n" + kernel_text + "  stages: 2  # the default, written out\n")
    assert load_spec(elsewhere).digest == spec.digest
    assert loader.load(kernel_text, "tile.n=40").digest != spec.digest
    assert loader.load(kernel_text, "allow_spill=true").digest != spec.digest


def test_all_faults_at_once(loader, kernel_text):
    text = """\
    kind: kernel
    name: Toy!
    family: toy
    tragets: [host]
    targets: [sm_120, sm_999, host, host]
    allow_spill: 1
    params:
      tile:
        m: 300
        n: 12
        q: 1
      stages: on
      stages: 3
      mode: quick
      scale: 1e5
      chain: "true"
      splits: [1, 2.5]
    """
    faults = loader.faults(text)
    assert [(fault.line, fault.key) for fault in faults] == [
        (2, "name"), (4, "tragets"), (5, "targets[1]"), (5, "targets[3]"), (6, "allow_spill"), (9, "params.tile.m"), (10, "params.tile.n"),
        (11, "params.tile.q"), (12, "params.stages"), (13, "params.stages"), (14, "params.mode"), (15, "params.scale"),
        (16, "params.chain"), (17, "params.splits[1]"),
    ]  # fmt: skip
    messages = {fault.key: fault.message for fault in faults}
    assert messages["tragets"].startswith("unknown key; did you mean 'targets'?")
    assert messages["targets[1]"].startswith("value 'sm_999', allowed one of sm_80")
    assert messages["params.tile.m"] == "value 300, allowed an integer 1…256"
    assert messages["params.tile.n"] == "value 12, allowed an integer, a multiple of 8, 8…256"
    assert messages["params.tile.q"] == "unknown key; allowed: m, n"
    assert messages["params.mode"] == "value 'quick', allowed one of fast, exact"
    assert messages["params.chain"] == "value 'true', allowed true or false"
    assert messages["allow_spill"] == "value 1, allowed true or false"
    assert str(faults[0]).startswith(f"{loader.path}:2: name: value 'Toy!', allowed text of the form")


def test_missing_keys(loader):
    faults = loader.faults("kind: kernel\nname: toy\nfamily: toy\nparams:\n  stages: 2\n")
    assert [(fault.line, fault.key) for fault in faults] == [(1, "targets"), (4, "params.tile")]
    assert faults[1].message == "missing; needs a mapping with m, n"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name: a\n", "missing; needs kernel or engine"),
        ("kind: kernl\n", "value 'kernl', allowed kernel or engine"),
        ("kind: [1]\n", "allowed kernel"),
    ],
)
def test_kind(loader, text, part):
    fault = loader.fault(text)
    assert fault.key == "kind"
    assert part in fault.message


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "UPPER", "", "-x", "a" * 65, "a b", "ä", "a\\nb"])
def test_names_are_plain(loader, kernel_text, name):
    fault = loader.fault(kernel_text.replace("name: toy", f'name: "{name}"'))
    assert (fault.line, fault.key) == (2, "name")


@pytest.mark.parametrize("name", ["tree-build", "3d", "Tree", "a.b", "a" * 65])
def test_kernel_names_are_identifiers(loader, engine_text, name):
    fault = loader.fault(engine_text.replace("  probe:", f"  {name}:"))
    assert fault.line == engine_text.splitlines().index("  probe:") + 1
    assert fault.message == f"name '{name}', allowed text of the form ^[a-z][a-z0-9_]*$, at most 64 characters"


def test_unknown_family(loader, kernel_text):
    fault = loader.fault(kernel_text.replace("family: toy", "family: tou"))
    assert (fault.line, fault.message) == (3, "value 'tou', allowed one of toy; did you mean 'toy'?")


def test_rule_of_the_family_is_reported_at_its_parameters(loader, kernel_text):
    fault = loader.fault(kernel_text.replace("m: 16", "m: 1"))
    assert (fault.line, fault.key, fault.message) == (5, "params", "stages = 2 must not exceed tile.m = 1")


def test_refusal_by_the_contract(loader, kernel_text, engine_text):
    fault = loader.fault(kernel_text.replace("n: 32", "n: 24"))
    assert (fault.line, fault.key) == (2, "toy")
    assert fault.message.startswith("on sm_120, host: tile.n = 24 does not divide")
    fault = loader.fault(engine_text.replace("n: 32", "n: 24"))
    assert (fault.line, fault.key) == (engine_text.splitlines().index("  probe:") + 1, "kernels.probe")


def test_shared_memory_above_the_limit(loader, kernel_text):
    # 8 stages × 64 × 64 × 4 bytes fit the host (and an H200), not sm_120.
    text = kernel_text.replace("m: 16", "m: 64").replace("n: 32", "n: 64") + "  stages: 8\n"
    fault = loader.fault(text)
    assert fault.message == "on sm_120: needs 131072 bytes of shared memory per block, allowed 101376"
    assert loader.load(text.replace("[sm_120, host]", "[sm_90]"))


def test_block_too_large(loader, kernel_text, monkeypatch):
    monkeypatch.setattr("kdgen.spec.load._MAX_THREADS", 63)
    assert loader.fault(kernel_text).message == "on sm_120, host: 'toy' has blocks of 64 threads, allowed 1…63"


def test_with_params(loader, kernel_text):
    kernel = loader.load(kernel_text).kernel("toy")
    changed = kernel.with_params(stages=4, tile={"m": 8, "n": 8})
    assert (changed.params.stages, changed.params.tile.m, changed.name, kernel.params.stages) == (4, 8, "toy", 2)
    assert kernel.with_params(tile=changed.params.tile).params.tile.n == 8
    with pytest.raises(SpecError, match=r"kernel 'toy': params.stages: value 9, allowed an integer 1…8"):
        kernel.with_params(stages=9)
    with pytest.raises(SpecError, match="unknown key; did you mean 'stages'"):
        kernel.with_params(stage=1)


# ---------------------------------------------------------------------------------------------------------- derived values


def test_expressions_in_a_kernel_spec(loader, kernel_text):
    text = (
        kernel_text.replace("n: 32", "n: ${tile.m * stages}")
        + "  scale: ${tile.m / 4}\n  chain: ${tile.n > 8}\n  mode: \"${'fast' if chain else 'exact'}\"\n"
    )
    text += "  splits: ${(tile.m, 2)}\n"
    params = loader.load(text).kernel("toy").params
    assert params.splits == (16, 2)
    assert (params.tile.n, params.scale, params.chain, params.mode) == (32, 4.0, True, "fast")


def test_expressions_in_an_engine_spec(loader, engine_text):
    text = (
        engine_text.replace("n: 32", 'n: "${model.hidden // ranks}"')
        + '      stages: ${tree.width_cap + 1}\n      splits: ["${tree.budget + 1}"]\n'
    )
    params = loader.load(text).kernel("probe").params
    assert (params.tile.n, params.stages, params.splits) == (128, 1, (25,))


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("tile.q", "unknown name 'tile.q'"),
        ("stage", "near: "),
        ("tile", "is a section"),
        ("tile.m +", "is not an expression"),
        ("__import__", "unknown name"),
        ("open(1)", "not allowed"),
        ("tile.m // 0", "tile.m // 0"),
        ("tile.n", "depends on itself: params.tile.n → params.tile.n"),
        ("scale", "depends on itself: params.tile.n → params.scale → params.tile.n"),
        ("tile.m * 1.5", "value 24.0 (from ${tile.m * 1.5}), allowed an integer"),
        ("1e308 * 1e308", "not a finite number"),
        ("tile.m > 2", "value true (from ${tile.m > 2}), allowed an integer"),
        ("'" + "x" * 600 + "'", "characters"),
        ("9223372036854775807 + 1", "64 bits"),
    ],
)
def test_bad_expression(loader, kernel_text, expression, part):
    text = kernel_text.replace("n: 32", f'n: "${{{expression}}}"') + "  scale: ${tile.n}\n"
    fault = loader.fault(text)
    assert fault.line in (8, 9)
    assert part in fault.message


def test_expression_must_be_the_whole_value(loader, kernel_text):
    fault = loader.fault(kernel_text + "  mode: a${tile.m}\n")
    assert (fault.line, fault.key) == (9, "params.mode")
    assert "must be the whole value" in fault.message


def test_long_chain_of_expressions(loader, kernel_text):
    text = kernel_text + "  splits: [1]\n" + "".join(f"  x{i}: ${{x{i + 1}}}\n" for i in range(500)) + "  x500: 1\n"
    faults = loader.faults(text)
    assert any("chain of more than" in fault.message for fault in faults)


# --------------------------------------------------------------------------------------------------------------- overrides


def test_overrides(loader, kernel_text, engine_text):
    kernel = loader.load(kernel_text, "tile.n=64", "params.stages=3", "chain=true", "targets=[sm_90]", "stages=4", "splits=[1, 2]")
    assert kernel.kernel("toy").params.model_dump() == {
        "tile": {"m": 16, "n": 64},
        "stages": 4,
        "mode": "exact",
        "scale": 1.0,
        "chain": True,
        "splits": (1, 2),
    }
    assert kernel.targets == ("sm_90",)
    engine = loader.load(
        engine_text, "tree.budget=9", "probe.tile.n=16", "kernels.probe.allow_spill=true", "tree.depth=2", "probe.stages=${tree.depth}"
    )
    assert engine.engine.tree.budget == 9
    assert engine.engine.draft.block == 3  # derived after the override
    assert (engine.kernel("probe").params.tile.n, engine.kernel("probe").allow_spill, engine.kernel("probe").params.stages) == (16, True, 2)


def test_override_replaces_a_faulty_value(loader, kernel_text):
    assert loader.load(kernel_text.replace("n: 32", "n: 0x20"), "tile.n=32").kernel("toy").params.tile.n == 32


@pytest.mark.parametrize(
    ("override", "key", "part"),
    [
        ("tile.n=7", "--set params.tile.n=7", "value 7, allowed an integer, a multiple of 8, 8…256"),
        ("stages=on", "--set stages=on", "boolean"),
        ("stages=1e5", "--set stages=1e5", "write 1.0e+5"),
        ("stages=", "--set params.stages=", "value null, allowed an integer"),
        ("stagse=3", "--set stagse=3", "no such key; near: stages"),
        ("tile.q=3", "--set tile.q=3", "no such key; near: tile.n, tile.m"),
        ("stages", "--set stages", "key=value"),
        ("=3", "--set =3", "key=value"),
        ("tile={m: 1}", "--set tile={m: 1}", "scalar"),
        ("stages=[", "--set stages=[", "not YAML"),
        ("stages=${nope}", "--set params.stages=${nope}", "unknown name 'nope'"),
        ("name=../x", "--set name=../x", "allowed text of the form"),
        ("kind=engin", "--set kind=engin", "allowed kernel or engine"),
        ("a.b.c.d=1", "--set a.b.c.d=1", "no such key"),
    ],
)  # fmt: skip
def test_bad_override(loader, kernel_text, override, key, part):
    fault = loader.fault(kernel_text, override)
    assert (fault.line, fault.key) == (0, key)
    assert part in fault.message


def test_unknown_kernel_in_an_override(loader, engine_text):
    fault = loader.fault(engine_text, "prob.stages=3")
    assert "near: probe.stages" in fault.message


# ------------------------------------------------------------------------------------------------- rules of an engine spec


@pytest.mark.parametrize(
    ("overrides", "keys", "part"),
    [
        (["model.heads=5", "ranks=2"], {"--set model.heads=5"}, "allowed multiples of ranks = 2"),
        (["ranks=3"], {"--set ranks=3"}, "allowed divisors of model.heads = 8 (line 10)"),
        (["draft.block=3"], {"tree.depth"}, "allowed at most 2: draft.block = 3 - 1"),
        (["model.experts_per_token=33"], {"--set model.experts_per_token=33"}, "allowed at most 32: model.experts = 32"),
        (["tree.width_cap=9"], {"--set tree.width_cap=9"}, "tree.top_k = 8"),
        (["types.experts=bf16"], {"--set types.experts=bf16"}, "allowed int4: model.quantization is set"),
        (["types.activations=bf16", "cache.dtype=f32"], {"--set cache.dtype=f32"}, "allowed types.activations = bf16"),
        (["draft.target_layers=[0, 3]"], {"--set draft.target_layers=[0, 3]"}, "allowed 0…2"),
        (["draft.target_layers=[2, 0]"], {"--set draft.target_layers=[2, 0]"}, "above the one before"),
        (["draft.layer_types=[full]"], {"--set draft.layer_types=[full]"}, "1 items, allowed 2"),
        (["draft.hidden=64"], {"--set draft.hidden=64"}, "allowed model.hidden = 128"),
        (["draft.mask_token=256"], {"--set draft.mask_token=256"}, "allowed at most 255"),
        (["model.max_position=2048"], {"--set model.max_position=2048"}, "allowed at most 1024"),
        (["model.moe_intermediate=48"], {"--set model.moe_intermediate=48"}, "multiples of 32 per rank"),
        (["draft.kv_heads=3"], {"draft.heads"}, "allowed multiples of draft.kv_heads = 3"),
        (["model.hidden=72", "draft.hidden=72"], {"--set model.hidden=72"}, "multiples of model.quantization.group"),
        (["model.hidden=0"], {"--set model.hidden=0"}, "allowed an integer 1…"),
        (["tree.budget=256"], {"--set tree.budget=256"}, "value 256, allowed an integer 0…255"),
        (["cache.dtype=fp8"], {"--set cache.dtype=fp8"}, "value 'fp8', allowed one of bf16, f32"),
    ],
)
def test_engine_rules(loader, engine_text, overrides, keys, part):
    faults = loader.faults(engine_text, *overrides)
    assert {fault.key for fault in faults} == keys, [str(fault) for fault in faults]
    assert part in faults[0].message


def test_engine_rule_names_the_line(loader, engine_text):
    text = engine_text.replace("  depth: 7", "  depth: 9").replace("block: ${tree.depth + 1}", "block: 8")
    fault = loader.fault(text)
    lines = text.splitlines()
    assert fault.line == lines.index("  depth: 9") + 1
    assert f"draft.block = 8 (line {lines.index('  block: 8') + 1})" in fault.message


def test_quantization_may_be_left_out(loader, engine_text):
    text = engine_text.replace("  quantization:\n    bits: 4\n    group: 32\n", "").replace("experts: int4", "experts: bf16")
    assert text != engine_text
    assert loader.load(text).engine.model.quantization is None


def test_engine_without_kernels(loader, engine_text):
    assert loader.load(engine_text.split("\nkernels:")[0] + "\nkernels: {}\n").kernels == ()


@pytest.mark.parametrize("name", ["kimi-k2.6", "tiny"])
def test_shipped_engine_specs(name, monkeypatch):
    monkeypatch.undo()  # the real families
    path = Path(__file__).parents[2] / "specs" / "engines" / f"{name}.yaml"
    assert path.read_text().startswith("# yaml-language-server: $schema=../../generated/schema/engine.json\n")
    spec = load_spec(path)
    assert (spec.name, spec.kind) == (name, "engine")
    if name == "kimi-k2.6":
        assert spec.engine is not None
        assert (spec.engine.model.hidden, spec.engine.model.rope.beta_fast, spec.engine.draft.target_layers) == (
            7168,
            32.0,
            (1, 12, 24, 35, 47, 58),
        )
