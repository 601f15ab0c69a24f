"""`kdgen bundle` and `kdgen decode`, as they are used, and what they say to wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kdgen import cli
from kdgen.engine.bundle import config_of
from kdgen.engine.random_model import random_tensors, write_hf, write_kdtr
from kdgen.kdtr import Reader, save
from kdgen.spec import load_spec
from tests.cli.conftest import ROOT

SPECS = ROOT / "specs" / "engines"
BUNDLES = ROOT / "tests" / "golden" / "bundles"
BUNDLE = BUNDLES / "tiny-narrow-int4.kdtr"
SPEC = SPECS / "tiny-narrow-int4.yaml"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels of the bundle that most tests decode are built."""
    directory = tmp_path_factory.mktemp("decode") / "generated"
    assert cli.run(["build", str(SPEC), "--arch", "host", "--out", str(directory)]) == 0
    return directory


@pytest.fixture
def decode(out: Path, capsys: pytest.CaptureFixture[str]):
    """`decode(model, *options)`: runs `kdgen decode` on the host; its exit code, standard output and standard error."""

    def run(model: Path, *options: str) -> tuple[int, str, str]:
        code = cli.run(["decode", str(model), "--device", "host", "--out", str(out), *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def document(decode):
    """Likewise with --json: the document of a run that ended with 0."""

    def run(model: Path, *options: str) -> dict:
        code, text, errors = decode(model, "--json", *options)
        assert (code, errors) == (0, "")
        return json.loads(text)

    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of the wide f32 toy, whose config has a stop token."""
    config = config_of(load_spec(SPECS / "tiny-wide-f32.yaml")).model_copy(update={"stop_token_ids": (7,)})
    path = tmp_path_factory.mktemp("hf") / "model"
    write_hf(path, config, random_tensors(config, 2))
    return path


def tamper(monkeypatch: pytest.MonkeyPatch, layer: int, name: str, change) -> None:
    """From here on, every engine is opened with one weight changed."""
    from kdgen.engine.engine import Engine

    open_engine = Engine.open.__func__

    def opened(cls, *args, **options):
        engine = open_engine(cls, *args, **options)
        weight = engine.weights.layers[layer][name]
        weight.copy_from(change(weight.numpy().copy()))
        return engine

    monkeypatch.setattr(Engine, "open", classmethod(opened))


# --------------------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("path", sorted(BUNDLES.glob("*.kdtr")), ids=lambda path: path.stem)
def test_json_of_every_mode(path: Path, document) -> None:
    """The golden tokens; and ar, chain and tree agree on everything that does not depend on the speed."""
    with Reader(path) as reader:
        golden = reader["golden.tokens"].tolist()
    found = {mode: document(path, "--mode", mode, "--draft", "oracle:0.8") for mode in ("ar", "chain", "tree")}
    for mode, result in found.items():
        assert result["tokens"] == golden
        assert (result["spec"], result["device"], result["mode"]) == (path.stem, "host", mode)
        assert result["golden"]["equal"]
        assert result["golden"]["tokens_equal"] == 24
        assert result["golden"]["max_logit_difference"] <= result["golden"]["bound"] == 1e-5
        assert len(result["sequences"]) == 1
    assert len({result["logits_sha256"] for result in found.values()}) == 1
    assert found["ar"]["forwards"] == 23
    assert found["ar"]["acceptance_length"] == 1.0
    assert found["tree"]["forwards"] < found["chain"]["forwards"] + 1 < 24
    assert found["tree"]["acceptance_length"] > 2


def test_text(decode) -> None:
    code, text, errors = decode(BUNDLE, "--mode", "tree", "--draft", "oracle", "--against", "ar")
    assert (code, errors) == (0, "")
    lines = text.splitlines()
    assert len(lines[0].split()) == 24
    assert lines[1].startswith("  logits ")
    assert lines[1].endswith("accepted per verification: 8 8 8")
    assert lines[2].startswith("tree on host: 3 target forwards after 1 over the prompt, acceptance length 8.00, ")
    assert lines[3].startswith("golden: 24 of 24 tokens equal, largest difference of a logit ")
    assert lines[4].startswith("against ar: the same tokens, the same bits of the logits; 23 target forwards, ")


def test_a_bundle_with_weights_and_a_plain_model_file(tmp_path, document, capsys) -> None:
    path = tmp_path / "toy.kdtr"
    assert cli.run(["bundle", str(SPEC), "-o", str(path), "--seed", "4"]) == 0
    assert f"{path}: {path.stat().st_size:,} bytes" in capsys.readouterr().out
    without = document(BUNDLE, "--mode", "ar")
    assert document(path, "--mode", "ar")["logits_sha256"] == without["logits_sha256"]
    config = config_of(load_spec(SPEC))
    write_kdtr(tmp_path / "model.kdtr", config, random_tensors(config, 4))
    prompt = ",".join(map(str, Reader(BUNDLE)["golden.prompt"].tolist()))
    plain = document(tmp_path / "model.kdtr", "--mode", "ar", "--prompt-ids", prompt, "--max-tokens", "24")
    assert plain["logits_sha256"] == without["logits_sha256"]
    assert "golden" not in plain


@pytest.mark.parametrize(("seed", "equal"), [(2, 24), (4, 1)])
def test_a_bundle_of_bf16(tmp_path, document, decode, seed, equal) -> None:
    """Compared with the numpy engine's roundings; where a token differs, the two best logits are nearer than the roundings move them."""
    path = tmp_path / "bf16.kdtr"
    spec = str(SPECS / "tiny-narrow-bf16.yaml")
    assert cli.run(["bundle", spec, "-o", str(path), "--seed", str(seed), "--no-weights"]) == 0
    decode(path, "--mode", "ar")  # so that only the document is printed from here on
    found = document(path, "--draft", "oracle", "--against", "ar")
    assert found["spec"] == "tiny-narrow-bf16"
    golden = found["golden"]
    assert (golden["tokens_equal"], golden["equal"], golden["bound"]) == (equal, True, 0.15)
    assert 1e-5 < golden["max_logit_difference"] <= 0.15
    assert golden.get("gap", 0.0) < 0.15
    if equal < 24:
        assert "token 1 differs, where the golden logits of the two are 3.5e-03 apart" in decode(path)[1]
    assert decode(path, "--compare", "ref")[0] == 0


def test_several_prompts_get_the_bits_each_gets_alone(document) -> None:
    together = document(BUNDLE, "--prompt-ids", "1,2,3/9/4,5,6,7,8", "--max-tokens", "9", "--draft", "oracle:0.5", "--budget", "10")
    assert "golden" not in together
    for prompt, sequence in zip(("1,2,3", "9", "4,5,6,7,8"), together["sequences"], strict=True):
        alone = document(BUNDLE, "--prompt-ids", prompt, "--max-tokens", "9", "--mode", "ar")
        assert alone["tokens"] == sequence["tokens"]
        assert alone["logits_sha256"] == sequence["logits_sha256"]
    assert together["tokens"] == together["sequences"][0]["tokens"]


def test_budget_and_drafter_change_the_speed_alone(document) -> None:
    results = [document(BUNDLE, *options.split()) for options in ("--draft oracle", "--draft oracle --budget 3", "--budget 0", "")]
    assert len({result["logits_sha256"] for result in results}) == 1
    assert [result["forwards"] for result in results][:3] == [3, 6, 23]
    assert results[3]["draft"] == "ngram"


def test_a_directory_of_hugging_face_with_a_stop_token(directory, document) -> None:
    options = ("--prompt-ids", "5,6,7,8", "--max-tokens", "12", "--draft", "oracle")
    free = document(directory, *options, "--no-stop")
    assert free["spec"] == "tiny-wide-f32"
    assert len(free["tokens"]) == 12
    values = json.loads((directory / "config.json").read_text())
    stop = free["tokens"][5]
    where = free["tokens"].index(stop)
    changed = directory.with_name("stops")
    changed.mkdir(exist_ok=True)
    for file in directory.iterdir():
        if not (changed / file.name).exists():
            (changed / file.name).symlink_to(file)
    (changed / "config.json").unlink()
    (changed / "config.json").write_text(json.dumps(values | {"eos_token_id": stop}))
    for mode in ("ar", "tree"):
        assert document(changed, *options, "--mode", mode)["tokens"] == free["tokens"][: where + 1]
    assert document(changed, *options, "--no-stop")["tokens"] == free["tokens"]


def test_a_model_that_no_spec_is_for(tmp_path, document, decode) -> None:
    """Its spec is the template's with the model's dimensions."""
    config = config_of(load_spec(SPEC))
    other = config.model_copy(update={"model": config.model.model_copy(update={"vocab": 100, "heads": 16})})
    write_kdtr(tmp_path / "model.kdtr", other, random_tensors(other, 1))
    found = document(tmp_path / "model.kdtr", "--prompt-ids", "1,2,3", "--max-tokens", "6", "--against", "ar", "--draft", "oracle")
    assert found["spec"].startswith("tiny-")
    assert found["against"]["equal"]
    assert decode(tmp_path / "model.kdtr", "--prompt-ids", "1", "--spec", str(SPEC))[0] == 2


def test_kernels_are_built_when_they_are_not_there(tmp_path, capsys) -> None:
    options = ["decode", str(BUNDLE), "--device", "host", "--out", str(tmp_path), "--max-tokens", "2"]
    assert cli.run(options) == 0
    first = capsys.readouterr()
    assert (tmp_path / "tiny-narrow-int4" / "host" / "manifest.json").is_file()
    assert cli.run(options) == 0
    again = capsys.readouterr()
    assert again.err == ""
    assert again.out.splitlines()[:2] == first.out.splitlines()[:2]


def test_timing_draw_and_check(decode, document) -> None:
    found = document(BUNDLE, "--draft", "oracle:0.7", "--timing", "--check", "--draw", "--against", "chain")
    assert found["golden"]["equal"]
    timing = found["timing"]
    assert timing["forwards"] == found["forwards"]
    assert {"tree_attention", "moe_gate_up", "head", "round, embed"} <= set(timing["stage_ms"])
    assert all(ms > 0 for ms in timing["stage_ms"].values())
    assert set(timing["experts"]) == {"1"}
    assert 2 <= timing["experts"]["1"]["mean"] <= timing["experts"]["1"]["max"] <= 32
    tree = found["first_tree"]
    assert tree["tokens"][0] == found["tokens"][0]
    assert [tree["tokens"][node] for node in tree["accepted"]] == found["tokens"][: found["sequences"][0]["accepted"][0]]
    assert tree["next_token"] == found["tokens"][len(tree["accepted"])]
    assert len(tree["tokens"]) == 25
    for mode in ("tree", "chain"):
        code, text, _ = decode(BUNDLE, "--draft", "oracle:0.7", "--draw", "--timing", "--mode", mode)
        assert code == 0
        lines = text.splitlines()
        at = lines.index("first round: drafted tokens, * accepted")
        assert lines[at + 1] == f"{found['tokens'][0]} *   the root, at position 12: decided before the round"
        assert sum(" *   " in line for line in lines[at:]) >= 2
        assert lines[-1].startswith("accepted: ")
        assert any(line.startswith("tree_attention ") for line in lines)


def test_nothing_is_drawn_without_a_round(decode) -> None:
    assert "no tree: the generation ended with its first token" in decode(BUNDLE, "--draw", "--max-tokens", "1")[1]


def test_a_device_loop_keeps_no_logits(document) -> None:
    """On the host it is the same round; the results are the same either way."""
    found = document(BUNDLE, "--loop", "device", "--draft", "oracle", "--against", "ar")
    assert found["logits_sha256"] is None
    assert found["golden"]["equal"]
    assert found["golden"]["max_logit_difference"] is None
    assert found["against"] == found["against"] | {"tokens_equal": True, "logits_equal": None, "equal": True}


def test_compare_with_the_numpy_engine(decode, document) -> None:
    code, text, _ = decode(BUNDLE, "--compare", "ref")
    assert code == 0
    assert "equal   layer 1 router_ids: 0.0e+00, bound 0e+00" in text
    assert text.splitlines()[-1] == "all 32 stages agree with the numpy engine"
    assert document(BUNDLE, "--compare", "ref")["departs"] is None


def test_compare_names_the_first_stage_that_departs(decode, monkeypatch) -> None:
    tamper(monkeypatch, 1, "post_norm", lambda w: w * np.float32(1.01))
    code, text, _ = decode(BUNDLE, "--compare", "ref")
    assert code == 3
    assert text.splitlines()[-1] == "first departs: layer 1 post_norm"
    code, text, _ = decode(BUNDLE, "--compare", "ref", "--json")
    assert code == 3
    assert json.loads(text)["departs"] == {"layer": 1, "stage": "post_norm"}
    code, text, _ = decode(BUNDLE, "--mode", "ar")
    assert code == 3
    assert "DIFFERENT" in text


def test_compare_allows_a_near_tie_of_the_router(tmp_path, decode, document, capsys) -> None:
    path = tmp_path / "bf16.kdtr"
    assert cli.run(["bundle", str(SPECS / "tiny-narrow-bf16.yaml"), "-o", str(path), "--seed", "0", "--no-weights"]) == 0
    with Reader(path) as reader:
        prompt = reader["golden.prompt"].tolist()
    decode(path, "--mode", "ar")
    capsys.readouterr()
    tokens = json.loads(decode(path, "--mode", "ar", "--json")[1])["tokens"]
    found = document(path, "--compare", "ref", "--prompt-ids", ",".join(map(str, prompt + tokens[:-1])))
    assert found["departs"] is None
    (ids,) = [stage for stage in found["stages"] if stage["stage"] == "router_ids"]
    assert ids["until"] is not None
    assert len(prompt) <= ids["until"] < len(prompt) + 23
    assert "logits" not in {stage["stage"] for stage in found["stages"]}  # of the last row alone


def test_compare_shows_nan(decode, monkeypatch) -> None:
    tamper(monkeypatch, 0, "o", lambda w: np.full_like(w, np.nan))
    code, text, _ = decode(BUNDLE, "--compare", "ref", "--json")
    assert code == 3
    assert json.loads(text)["departs"] == {"layer": 0, "stage": "residual"}


def test_check_names_layer_and_stage(decode, monkeypatch) -> None:
    tamper(monkeypatch, 1, "gate", lambda w: np.full_like(w, np.inf))
    code, _, errors = decode(BUNDLE, "--check")
    assert code == 1
    assert errors.startswith("error: layer 1, stage moe_")
    assert "values that are NaN or infinite, first in row" in errors


# ---------------------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mode beam", "--mode beam: allowed are ar, chain, tree"),
        ("--against beam", "--against beam: allowed are ar, chain, tree"),
        ("--draft dflash", "drafter 'dflash': allowed are ngram, oracle"),
        ("--draft oracle:1.5", "drafter 'oracle:1.5': allowed are"),
        ("--budget 25", "budget 25: the engine spec allows 0 … 24 (tree.budget)"),
        ("--budget -1", "Invalid value for '--budget'"),
        ("--max-tokens 513", "max_tokens 513: allowed are 1 … 512"),
        ("--prompt-ids 1,x", "--prompt-ids 1,x: give token ids as 1,2,3"),
        ("--prompt-ids 1,2/", "--prompt-ids 1,2/: give token ids as 1,2,3"),
        ("--prompt-ids 1,192/-1", "prompt 0: token 192 is outside the vocabulary, 0 … 191; prompt 1: token -1 is outside"),
        ("--prompt-ids " + ",".join(["1"] * 1025), "prompt 0: 1025 tokens are more than the model's 1024 positions"),
        ("--prompt-ids " + "/".join(["1"] * 9), "9 sequences: the engine spec allows 1 … 8 (cache.max_sequences)"),
        ("--draw --mode ar", "--draw: mode ar drafts nothing"),
        ("--loop gpu", "--loop gpu: allowed are host, device"),
        ("--loop device --timing", "--loop device: not with --check or --timing"),
        ("--compare torch", "--compare torch: allowed is ref, the numpy engine"),
        (f"--spec {ROOT / 'specs/kernels/argmax.yaml'}", "argmax.yaml: a kernel spec; the engine needs an engine spec"),
        (f"--spec {SPECS / 'tiny-wide-int4.yaml'}", "tiny-wide-int4.yaml: model.hidden: value 192, but the checkpoint has 128"),
        (f"--spec {SPECS / 'tiny-narrow-f32.yaml'}", "tiny-narrow-f32.yaml: model.quantization: value None, but the checkpoint has"),
        ("--spec nowhere.yaml", "nowhere.yaml: no such file"),
        ("--set tree.budgets=3", "tree.budgets"),
        ("--set types.activations=bf16", "types.activations: value bf16, but types.weights is f32; allowed is the same type"),
    ],
)  # fmt: skip
def test_wrong_options_end_with_2_and_one_message(decode, options, message) -> None:
    code, text, errors = decode(BUNDLE, *options.split())
    assert code == 2
    assert text == ""
    assert "error: " in errors
    assert message in " ".join(errors.split())
    assert "internal error" not in errors


@pytest.mark.parametrize("model", ["nowhere.kdtr", "argmax.yaml", "text", "truncated.kdtr", "empty", "other.kdtr", "no prompt"])
def test_wrong_models(tmp_path, decode, model) -> None:
    wrong, code, messages = tmp_path / model, 1, [str(tmp_path / model)]
    if model == "nowhere.kdtr":
        messages += ["no such file or directory; give a bundle"]
    elif model == "argmax.yaml":
        wrong, code, messages = ROOT / "specs/kernels/argmax.yaml", 2, ["argmax.yaml: a spec, not a model"]
    elif model == "text":
        wrong.write_text("no tensors " * 100)
    elif model == "truncated.kdtr":
        wrong.write_bytes(BUNDLE.read_bytes()[:-100])
        messages += ["truncated"]
    elif model == "empty":
        wrong.mkdir()
        messages += ["config.json"]
    elif model == "other.kdtr":
        save(wrong, {"x": np.zeros(3)})
        messages += ["has no attribute 'config'"]
    else:
        config = config_of(load_spec(SPEC))
        write_kdtr(wrong, config, random_tensors(config, 1))
        code, messages = 2, ["no prompt: give --prompt-ids"]
    assert decode(wrong) == (code, "", decode(wrong)[2])
    errors = decode(wrong)[2]
    assert errors.startswith("error: ")
    for message in messages:
        assert message in errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 33}, "num_experts_per_tok"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 128}, "tensor 'model."),
    ],
)
def test_a_configuration_that_contradicts_itself_or_the_weights(directory, tmp_path, decode, changes, message) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    code, _, errors = decode(tmp_path, "--prompt-ids", "1")
    assert code in (1, 2)
    assert errors.startswith("error: ")
    assert "internal error" not in errors
    assert message in errors


def test_a_dtype_that_would_be_rounded(directory, decode) -> None:
    code, _, errors = decode(directory, "--prompt-ids", "1", "--set", "types.weights=bf16", "--set", "types.activations=bf16")
    assert code != 0
    assert errors.startswith("error: ")
    assert "f32" in errors


def test_a_model_that_the_kernels_cannot_be_cut_for(tmp_path, decode) -> None:
    config = config_of(load_spec(SPECS / "tiny-narrow-f32.yaml"))
    odd = config.model_copy(update={"model": config.model.model_copy(update={"experts": 20, "moe_intermediate": 96})})
    write_kdtr(tmp_path / "model.kdtr", odd, random_tensors(odd, 1))
    code, _, errors = decode(tmp_path / "model.kdtr", "--prompt-ids", "1")
    assert code == 2
    assert "no engine spec is for this model, and the kernels of this one cannot be cut for it; give another with --spec" in errors
    assert "kernels.moe_route.params.experts: value 20" in errors


# --------------------------------------------------------------------------------------------------------------------------- bundle


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.yaml", "-o", "x.kdtr"], 2, "nowhere.yaml: no such file"),
        ([str(ROOT / "specs/kernels/argmax.yaml"), "-o", "x.kdtr"], 2, "a kernel spec; a bundle is made from an engine spec"),
        ([str(SPECS / "kimi-k2.6.yaml"), "-o", "x.kdtr"], 2, "a bundle is made from a spec for one rank"),
        ([str(SPEC), "-o", "no/where/x.kdtr", "--no-weights"], 1, "x.kdtr: cannot be written: No such file or directory"),
        ([str(SPEC), "-o", "x.kdtr", "--tokens", "2000"], 2, "12 + 2000 tokens; allowed are at least 1 each, together 1024"),
        ([str(SPEC), "-o", "x.kdtr", "--set", "model.layers=0"], 2, "model.layers"),
        ([str(SPEC), "-o", "x.kdtr", "--set", "types.activations=bf16"], 2, "types.activations: value bf16, but types.weights is f32"),
        ([str(SPEC)], 2, "Missing option '--output'"),
    ],
)  # fmt: skip
def test_what_no_bundle_is_made_of(tmp_path, monkeypatch, capsys, arguments, code, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["bundle", *arguments]) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_bytes_and_replaces_the_file(tmp_path, capsys) -> None:
    path = tmp_path / "toy.kdtr"
    path.write_text("something else")
    assert cli.run(["bundle", str(SPEC), "-o", str(path), "--seed", "4", "--no-weights"]) == 0
    assert path.read_bytes() == BUNDLE.read_bytes()
    assert cli.run(["bundle", str(SPEC), "-o", str(path), "--seed", "5", "--no-weights", "--tokens", "3", "--prompt", "2"]) == 0
    with Reader(path) as reader:
        assert reader["golden.prompt"].shape == (2,)
        assert reader["golden.logits"].shape == (3, 192)


def test_killed_while_writing_leaves_nothing_under_the_name(tmp_path) -> None:
    path = tmp_path / "toy.kdtr"
    # Stops for good where the third tensor would be written, with a part of the file on the disk.
    code = (
        "import sys, time\nfrom kdgen import cli\nfrom kdgen.kdtr import writer\nadd, seen = writer.Writer.add, []\n"
        "def slow(self, name, values, **options):\n"
        "    seen.append(name)\n    if len(seen) == 3: print('writing', flush=True); time.sleep(600)\n"
        "    add(self, name, values, **options)\n"
        "writer.Writer.add = slow\ncli.run(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", code, "bundle", str(SPEC), "-o", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert not path.exists()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    time.sleep(0.1)
    assert not path.exists()
    assert cli.run(["bundle", str(SPEC), "-o", str(path), "--seed", "4", "--no-weights"]) == 0
    assert path.read_bytes() == BUNDLE.read_bytes()
