"""Opening models, and writing them; directories need the package safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.dtypes import numpy_dtype
from kdgen.engine.checkpoint import Checkpoint, open_checkpoint, open_tensors
from kdgen.engine.config import ModelConfig
from kdgen.engine.inventory import MATRICES, TensorType, expected_experts, expert_name, faults, fused_name, wanted_tensors
from kdgen.engine.random_model import normal, random_tensors, write_hf, write_kdtr
from kdgen.errors import ArtifactError, SpecError
from kdgen.kdtr import Reader, save
from kdgen.weights.int4 import Int4Weight
from tests.engine.models import CONFIGS, INT4, config
from tests.engine.test_config import KIMI

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

PLAIN = CONFIGS["yarn"]
PACKED = config(quantization=INT4, dtype="bf16", layers=2)
WRAPPED = config(quantization=INT4, dtype="bf16", layers=2, prefix="language_model.")
BF16 = numpy_dtype("bf16")


def tensors_of(model: ModelConfig) -> Tensors:
    return dict(random_tensors(model, 1))


def fused(model: ModelConfig, tensors: Tensors) -> Tensors:
    """The experts of every layer in two tensors."""
    result = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in range(model.model.dense_layers, model.model.layers):

        def stack(matrix: str, layer: int = layer) -> Array:
            return np.stack([tensors[f"{expert_name(layer, e, matrix)}.weight"] for e in range(model.model.experts)])

        result[fused_name(layer, "up_proj")] = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        result[fused_name(layer, "down_proj")] = stack("down_proj")
    return result


def open_memory(model: ModelConfig, tensors: Tensors, path: Path) -> Checkpoint:
    return open_tensors(model, tensors, "memory")


def open_kdtr(model: ModelConfig, tensors: Tensors, path: Path) -> Checkpoint:
    save(path / "model.kdtr", tensors, {"config": model.to_hf()})
    return open_checkpoint(path / "model.kdtr")


def save_directory(directory: Path, model: ModelConfig, shards: dict[str, Tensors]) -> None:
    """Like `write_hf`, but without looking at the tensors."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.to_hf()))
    for file, tensors in shards.items():
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, directory / file)
    if list(shards) != ["model.safetensors"]:
        index = {name: file for file, tensors in shards.items() for name in tensors}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def open_directory(model: ModelConfig, tensors: Tensors, path: Path) -> Checkpoint:
    save_directory(path / "model", model, {"model.safetensors": tensors})
    return open_checkpoint(path / "model")


def open_shards(model: ModelConfig, tensors: Tensors, path: Path) -> Checkpoint:
    names = list(tensors)
    shards = {f"model-{i + 1:05}-of-000003.safetensors": {name: tensors[name] for name in names[i::3]} for i in range(3)}
    save_directory(path / "model", model, shards)
    return open_checkpoint(path / "model")


OPENERS = [open_memory, open_kdtr, open_directory, open_shards]
Opener = Callable[[ModelConfig, Tensors, Path], Checkpoint]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("model", [PLAIN, PACKED, WRAPPED, CONFIGS["tied, all dense but one"]])
def test_every_tensor_comes_back(opener: Opener, model: ModelConfig, tmp_path: Path) -> None:
    tensors = tensors_of(model)
    with opener(model, tensors, tmp_path) as checkpoint:
        assert checkpoint.config == model
        assert set(checkpoint.names) == {name.removeprefix(model.prefix) for name in tensors}
        for name in checkpoint.names:
            array = checkpoint.tensor(name)
            want = tensors[model.prefix + name]
            assert array.dtype == want.dtype
            assert array.tobytes() == want.tobytes()
            assert not array.flags.writeable
        m = model.model
        for e in (0, 7, m.experts - 1):
            for matrix in MATRICES:
                weight = checkpoint.expert(m.layers - 1, e, matrix)
                want = tensors[f"{model.prefix}{expert_name(m.layers - 1, e, matrix)}.weight{'_packed' if m.quantization else ''}"]
                got = weight.packed if isinstance(weight, Int4Weight) else weight
                assert got.tobytes() == want.tobytes()
                assert weight.shape == ((128, 64) if matrix == "down_proj" else (64, 128))
        head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
        assert np.array_equal(checkpoint.tensor("lm_head.weight"), tensors[model.prefix + head])


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_fused_experts(opener: Opener, dtype: str, tmp_path: Path) -> None:
    model = config(dtype=dtype)
    tensors = tensors_of(model)
    with opener(model, fused(model, tensors), tmp_path) as checkpoint:
        for matrix in MATRICES:
            assert np.array_equal(checkpoint.expert(2, 5, matrix), tensors[f"{expert_name(2, 5, matrix)}.weight"])  # type: ignore[arg-type]


def test_what_is_skipped(tmp_path: Path) -> None:
    model = config(quantization=INT4, dtype="bf16", layers=2, prefix="language_model.", predict_layers=1)
    tensors = tensors_of(model)
    extra = {
        "vision_tower.blocks.0.weight": np.zeros((2, 2), BF16),
        "mm_projector.proj.0.bias": np.zeros(3, BF16),
        "language_model.model.layers.2.eh_proj.weight": np.zeros((2, 2), np.uint8),
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }
    checkpoint = open_tensors(model, tensors | extra)
    assert len(checkpoint.names) == len(tensors)
    with pytest.raises(ArtifactError, match=r"tensor 'model\.layers\.3\.x' \(u8 \[1\]\) is unexpected"):
        open_tensors(model, tensors | {"language_model.model.layers.3.x": np.zeros(1, np.uint8)})
    with pytest.raises(ArtifactError, match=r"tensor 'vision_tower\.x' .* is unexpected"):
        open_tensors(PACKED, tensors_of(PACKED) | {"vision_tower.x": np.zeros(1, np.uint8)})
    with pytest.raises(ArtifactError, match=r"'\(without language_model\.\) lm_head\.weight' .* is unexpected"):
        open_tensors(model, tensors | {"lm_head.weight": tensors["language_model.lm_head.weight"]})


def test_other_dtypes_of_the_router() -> None:
    tensors = tensors_of(PACKED)
    gate = "model.layers.1.mlp.gate"
    tensors[f"{gate}.weight"] = tensors[f"{gate}.weight"].astype(np.float32)
    tensors[f"{gate}.e_score_correction_bias"] = tensors[f"{gate}.e_score_correction_bias"].astype(np.float32)
    assert open_tensors(PACKED, tensors).tensor(f"{gate}.weight").dtype == np.float32


def renamed(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors.pop("model.layers.0.self_attn.q_b_proj.weight")


def replace(name: str, array: Array) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: array})


def missing_scale(tensors: Tensors) -> None:
    del tensors[f"{expert_name(1, 3, 'up_proj')}.weight_scale"]


DAMAGES: dict[str, tuple[Callable[[Tensors], None], list[str]]] = {
    "renamed": (renamed, [
        "tensor 'model.layers.0.self_attn.q_b_proj.weight' is missing; it must be bf16 [256, 32]",
        "tensor 'model.layers.0.self_attn.q_proj.weight' (bf16 [256, 32]) is unexpected",
    ]),
    "mis-shaped": (
        replace("model.norm.weight", np.zeros((1, 128), BF16)),
        ["tensor 'model.norm.weight' is bf16 [1, 128]; it must be bf16 [128]"],
    ),
    "wrong dtype": (
        replace("model.norm.weight", np.zeros(128, np.float16)),
        ["tensor 'model.norm.weight' is f16 [128]; it must be bf16 [128]"],
    ),
    "bias in i32": (
        replace("model.layers.1.mlp.gate.e_score_correction_bias", np.zeros(16, np.int32)),
        ["tensor 'model.layers.1.mlp.gate.e_score_correction_bias' is i32 [16]; it must be bf16 or f32 [16]"],
    ),
    "no scales": (missing_scale, ["tensor 'model.layers.1.mlp.experts.3.up_proj.weight_scale' is missing; it must be bf16 [64, 4]"]),
    "packed in u8": (
        replace(f"{expert_name(1, 3, 'up_proj')}.weight_packed", np.zeros((64, 64), np.uint8)),
        ["tensor 'model.layers.1.mlp.experts.3.up_proj.weight_packed' is u8 [64, 64]; it must be i32 [64, 16]"],
    ),
    "zero points": (
        replace(f"{expert_name(1, 3, 'up_proj')}.weight_zero_point", np.zeros((8, 4), np.int32)),
        ["tensor 'model.layers.1.mlp.experts.3.up_proj.weight_zero_point' (i32 [8, 4]) is unexpected"],
    ),
    "an expert too many": (
        replace(f"{expert_name(1, 16, 'up_proj')}.weight_shape", np.zeros(2, np.int32)),
        ["tensor 'model.layers.1.mlp.experts.16.up_proj.weight_shape' (i32 [2]) is unexpected"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("name", DAMAGES)
def test_every_difference_is_named(opener: Opener, name: str, tmp_path: Path) -> None:
    damage, messages = DAMAGES[name]
    tensors = tensors_of(PACKED)
    damage(tensors)
    with pytest.raises(ArtifactError) as caught:
        opener(PACKED, tensors, tmp_path)
    text = str(caught.value)
    assert all(message in text for message in messages), text
    assert text.startswith("memory: " if opener is open_memory else str(tmp_path))
    assert text.count("tensor '") == len(messages)


def test_the_inventory_of_kimi() -> None:
    model = ModelConfig.from_mapping(KIMI, "config.json")
    wanted = wanted_tensors(model, {})
    # Published are 208,550, of which 335 are the vision tower's and the projector's.
    assert len(wanted) == 208_215
    assert not list(faults(model, {name: TensorType(want.dtypes[-1], want.shape) for name, want in wanted.items()}))
    assert wanted["model.layers.60.mlp.experts.383.down_proj.weight_packed"].shape == (7168, 256)
    assert wanted["model.layers.0.self_attn.kv_b_proj.weight"].shape == (16384, 512)


@pytest.mark.parametrize("opener", OPENERS)
def test_rows(opener: Opener, tmp_path: Path) -> None:
    tensors, name = tensors_of(PACKED), "model.layers.1.self_attn.q_b_proj.weight"
    with opener(PACKED, tensors, tmp_path) as checkpoint:
        for start, stop in ((0, 256), (3, 4), (250, 256), (7, 7)):
            assert checkpoint.rows(name, start, stop).tobytes() == tensors[name][start:stop].tobytes()
        with pytest.raises(ValueError, match=r"rows 0 … 256 of tensor 'model.*'; it is \[256, 32\]"):
            checkpoint.rows(name, 0, 257)


def test_many_differences_are_counted() -> None:
    tensors = {name: array for name, array in tensors_of(PACKED).items() if ".experts." not in name}
    with pytest.raises(ArtifactError) as caught:
        open_tensors(PACKED, tensors)
    count = len(expected_experts(PACKED, 1))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"tensors: {count} faults:"
    assert len(lines) == 22
    assert lines[-1] == f"  and {count - 20} more"


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_weight_shape(kind: type[Any]) -> None:
    tensors, name = tensors_of(PACKED), expert_name(1, 0, "down_proj")
    tensors[f"{name}.weight_shape"] = np.array([128, 64], kind)
    assert open_tensors(PACKED, tensors).expert(1, 0, "down_proj").shape == (128, 64)
    tensors[f"{name}.weight_shape"] = np.array([64, 128], kind)
    with pytest.raises(ArtifactError, match=r"tensor 'model.*down_proj': weight_shape is \[64, 128\], but weight_packed holds \[128, 64\]"):
        open_tensors(PACKED, tensors).expert(1, 0, "down_proj")
    tensors[f"{name}.weight_shape"] = np.array([128, 64], kind)
    tensors[f"{name}.weight_scale"] = np.full((128, 2), np.nan, BF16)
    with pytest.raises(ArtifactError, match=r"tensor 'model.*down_proj': weight_scale has nan"):
        open_tensors(PACKED, tensors).expert(1, 0, "down_proj")


def test_asking_for_what_is_not_there() -> None:
    checkpoint = open_tensors(PLAIN, tensors_of(PLAIN))
    with pytest.raises(ArtifactError, match=r"tensors: no tensor 'lm_head\.bias'") as caught:
        checkpoint.tensor("lm_head.bias")
    assert isinstance(caught.value, KeyError)
    for layer, expert, matrix in ((0, 0, "up_proj"), (3, 0, "up_proj"), (1, 16, "up_proj"), (1, -1, "up_proj"), (1, 0, "gate")):
        with pytest.raises(ArtifactError, match=r"there are layers 1 … 2, experts 0 … 15, gate_proj, up_proj, down_proj"):
            checkpoint.expert(layer, expert, matrix)


def truncate(file: Path, keep: float) -> None:
    """Keep a number of bytes, or a fraction of them, or all but a few."""
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_directory(keep: float, tmp_path: Path) -> None:
    open_directory(PLAIN, tensors_of(PLAIN), tmp_path).close()
    truncate(tmp_path / "model" / "model.safetensors", keep)
    with pytest.raises(ArtifactError, match=r"model\.safetensors: truncated, damaged or unreadable: "):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_kdtr_file(keep: float, tmp_path: Path) -> None:
    write_kdtr(tmp_path / "model.kdtr", PLAIN, random_tensors(PLAIN, 1))
    truncate(tmp_path / "model.kdtr", keep)
    with pytest.raises(ArtifactError, match=r"model\.kdtr: .*truncated"):
        open_checkpoint(tmp_path / "model.kdtr")


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(directory: Path) -> None:
        file = directory / "model.safetensors.index.json"
        values = json.loads(file.read_text())
        change(values)
        file.write_text(json.dumps(values))

    return apply


SECOND = "model-00002-of-000003.safetensors"
INDEX_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda d: (d / SECOND).unlink(), f"{SECOND}: is missing"),
    "no index": (lambda d: (d / "model.safetensors.index.json").unlink(), "has neither model.safetensors nor model.safetensors.index.json"),
    "no JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json: cannot be read as JSON"),
    "no map": (change_index(lambda v: v.pop("weight_map")), "index.json: weight_map must be an object"),
    "another directory": (
        change_index(lambda v: v["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        "weight_map: 'lm_head.weight' is in '../x.safetensors'; allowed: a .safetensors file beside the index",
    ),
    "a promise": (change_index(lambda v: v["weight_map"].update(zebra=SECOND)), f"{SECOND}: has no tensor 'zebra', which the index says"),
    "a tensor on its own": (
        change_index(lambda v: v["weight_map"].pop(next(name for name, file in v["weight_map"].items() if file == SECOND))),
        f"{SECOND}: has a tensor ",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: cannot be read"),
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_a_damaged_index(name: str, tmp_path: Path) -> None:
    open_shards(PLAIN, tensors_of(PLAIN), tmp_path).close()
    damage, message = INDEX_DAMAGES[name]
    damage(tmp_path / "model")
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(tmp_path / "model")
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_kdtr_file_without_a_model(tmp_path: Path) -> None:
    save(tmp_path / "x.kdtr", {"w": np.zeros(3)})
    with pytest.raises(ArtifactError, match=r"x\.kdtr: has no attribute 'config'"):
        open_checkpoint(tmp_path / "x.kdtr")
    save(tmp_path / "x.kdtr", {"w": np.zeros(3)}, {"config": {"model_type": "llama"}})
    with pytest.raises(SpecError, match=r"x\.kdtr: config: model_type: is \"llama\""):
        open_checkpoint(tmp_path / "x.kdtr")
    with pytest.raises(ArtifactError, match=r"nothing: cannot be read: No such file"):
        open_checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize("model", [PLAIN, WRAPPED])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000, 1])
def test_written_directories(model: ModelConfig, shard_bytes: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    write_hf(tmp_path / "a", model, random_tensors(model, 1), shard_bytes=shard_bytes)
    with open_checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.config == model
        for name, array in random_tensors(model, 1):
            assert checkpoint.tensor(name.removeprefix(model.prefix)).tobytes() == array.tobytes()
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert ("model.safetensors" in files) == (shard_bytes > 1_000_000)
    write_hf(tmp_path / "b", model, random_tensors(model, 1), shard_bytes=shard_bytes)
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    with pytest.raises(ArtifactError, match="exists and is no empty directory"):
        write_hf(tmp_path / "a", model, random_tensors(model, 2))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b"]


def test_written_kdtr_files(tmp_path: Path) -> None:
    write_kdtr(tmp_path / "m.kdtr", WRAPPED, random_tensors(WRAPPED, 1), {"made by": "a test"})
    with open_checkpoint(tmp_path / "m.kdtr") as checkpoint:
        assert (checkpoint.config, checkpoint.attributes) == (WRAPPED, {"made by": "a test"})
    with Reader(tmp_path / "m.kdtr") as reader:
        reader.check()
        assert list(reader) == [name for name, _ in random_tensors(WRAPPED, 1)]
    with pytest.raises(ArtifactError, match="attribute 'config'"):
        write_kdtr(tmp_path / "n.kdtr", WRAPPED, [], {"config": 1})
    assert not (tmp_path / "n.kdtr").exists()


def lost(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    return ((name, array) for name, array in tensors if name != "model.norm.weight")


def twice(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    yield from tensors
    yield "model.norm.weight", np.zeros(128, np.float32)


def broken(tensors: Iterator[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    yield next(tensors)
    raise RuntimeError("broken")


@pytest.mark.parametrize("fault", [lost, twice, broken])
@pytest.mark.parametrize("write", [write_hf, write_kdtr])
def test_nothing_is_left_of_a_failed_write(write: Callable[..., None], fault: Callable[..., Any], tmp_path: Path) -> None:
    if write is write_hf:
        pytest.importorskip("safetensors")
    kind, message = (
        (RuntimeError, "broken") if fault is broken else (ArtifactError, r"tensor 'model\.norm\.weight' is (missing|given twice)")
    )
    with pytest.raises(kind, match=message):
        write(tmp_path / "model", PLAIN, fault(random_tensors(PLAIN, 1)))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match=r"lacks the prefix 'language_model\.'"):
        write(tmp_path / "model", WRAPPED, random_tensors(PACKED, 1))
    with pytest.raises(ArtifactError, match="cannot be written"):
        write(tmp_path / "no" / "where", PLAIN, random_tensors(PLAIN, 1))
    assert not list(tmp_path.iterdir())


def test_random_values() -> None:
    values = normal(3, "x", (1000, 100), 2.0)
    assert (values.dtype, values.shape) == (np.float32, (1000, 100))
    assert abs(values.mean()) < 0.02
    assert values.std() == pytest.approx(2, rel=0.01)
    assert np.abs(values).max() <= 2 * 3.4642
    # Philox 4x64-10 with a key is the same everywhere; the first word's four parts, by hand.
    word = int(np.random.Philox(key=int.from_bytes(hashlib.sha256(b"3:x").digest()[:16], "little")).random_raw())
    parts = sum(word >> shift & 0xFFFF for shift in (0, 16, 32, 48)) - 131070
    assert values[0, 0] == np.float32(parts) * np.float32(2.0 / ((65536**2 - 1) / 3) ** 0.5)
    first, again, other = (dict(random_tensors(PACKED, seed)) for seed in (1, 1, 2))
    assert list(first) == list(other)
    assert all(array.tobytes() == again[name].tobytes() for name, array in first.items())
    assert all(array.tobytes() != other[name].tobytes() for name, array in first.items() if not name.endswith("_shape"))
    # The words of a tensor depend on nothing but its name: a prefix or more experts change no others.
    for name, array in random_tensors(WRAPPED, 1):
        assert array.tobytes() == first[name.removeprefix("language_model.")].tobytes()
