"""The product bit by bit: its order of operations, exact sums, what must not decide a bit, and parameters that do not fit."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.build import build_spec
from kdgen.expressions import evaluate
from kdgen.kernels import moe_gemm
from kdgen.kernels.gemm import FAMILY, Params, entries, matrices, ordered, random_inputs, random_weights, reference
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target
from kdgen.verify.artifacts import target_of
from kdgen.verify.kernel import run_case
from kdgen.weights import prepack
from kdgen.weights.int4 import Int4Weight

BF16 = ml_dtypes.bfloat16
SMALL = {"n": 40, "k": 392, "rows": 70, "out": "f32", "slices": 2, "tile": {"n": 32, "k": 64}, "warps": {"n": 1, "k": 3}}
HEADS = {"n": 32, "k": 128, "heads": 3, "x_width": 160, "x_offset": 16, "out_width": 48, "out_offset": 8}

SWIGLU = {"epilogue": "swiglu", "n": 44}
INT4 = {"w": "int4", "n": 96, "k": 448}

VARIANTS = {
    "bf16": {},
    "bf16 out": {"out": "bf16"},
    "one slice": {"slices": 1, "warps": {"n": 2, "k": 2}},
    "residual": {"residual": True},
    "few rows": {"few_rows": 8, "residual": True},
    "heads": {**HEADS, "warps": {"n": 2, "k": 1}, "few_rows": 2},
    "f32": {"x": "f32", "w": "f32", "k": 332},
    "f32 weights": {"w": "f32", "residual": True, "slices": 1},
    "f32 rows, heads": {**HEADS, "x": "f32", "slices": 1, "warps": {"n": 2, "k": 2}},
    "swiglu": SWIGLU,
    "swiglu, one slice": {**SWIGLU, "slices": 1, "out": "bf16", "tile": {"n": 64, "k": 64}, "warps": {"n": 2, "k": 2}},
    "swiglu, few rows": {**SWIGLU, "n": 43, "few_rows": 8, "x": "f32"},
    "swiglu, heads": {**SWIGLU, **HEADS, "warps": {"n": 2, "k": 1}, "few_rows": 2, "w": "f32"},
    "int4": INT4,
    "int4, residual": {**INT4, "residual": True, "tile": {"n": 64, "k": 128}, "warps": {"n": 4, "k": 2}, "few_rows": 8},
    "int4, heads": {**INT4, **HEADS, "warps": {"n": 1, "k": 1}, "few_rows": 2},
    "int4, swiglu": {**INT4, **SWIGLU, "n": 80, "tile": {"n": 64, "k": 64}, "warps": {"n": 2, "k": 3}, "few_rows": 4},
    "int4, f32 rows": {**INT4, "x": "f32", "k": 320, "warps": {"n": 2, "k": 1}},
    "int4, f32 rows, swiglu": {**INT4, **SWIGLU, "n": 48, "k": 320, "x": "f32", "slices": 1, "warps": {"n": 1, "k": 2}},
}


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def parameters(**changes):
    return Params.model_validate({**SMALL, **changes})


def built(p, device, out):
    spec = Spec.of("gemm", KernelSpec("gemm", FAMILY, p))
    target = get_target(target_of(device, sanitize=False).name)
    build_spec(spec, [target], out)
    opened = open_device(device) if device != "host" else open_device("host", order="random", copies="random", seed=7)
    return load(out / spec.name / target.name, device=opened)["gemm"]


def run(kernel, inputs):
    return run_case(kernel, inputs, {}, 0xFF)["out"]


def c_exp2(x):
    """2 to some power as the host target has it: by the C library, and zero for what is not normal."""
    function = ctypes.CDLL("libm.so.6").exp2f
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    power = np.array([function(value) for value in x.ravel()], np.float32).reshape(x.shape)
    return np.where(power < np.finfo(np.float32).tiny, np.float32(0), power)


def plain_int4(p, rng, scale):
    """The argument `w` with one scale everywhere."""
    heads = (p.heads,) if p.heads else ()
    words = rng.integers(0, 1 << 32, size=(*heads, p.n, p.k // 8), dtype=np.uint32)
    return prepack.prepack(Int4Weight(words, np.full((*heads, p.n, p.k // 32), scale, BF16)))


def bits(array):
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_follows_the_stated_order(variant, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(1)
    kernel = built(p, "host", tmp_path)
    for rows in (1, 19, 70):
        inputs = random_inputs(p, rng, rows, random_weights(p, rng))
        assert np.array_equal(bits(run(kernel, inputs)), bits(ordered(p, inputs, c_exp2)))


@pytest.mark.parametrize("variant", [name for name, changes in VARIANTS.items() if name != "bf16 out" and "epilogue" not in changes])
def test_sums_of_small_integers_are_exact(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(2)
    kernel = built(p, device, tmp_path)
    for rows in (1, 9, 33, 65):
        inputs = random_inputs(p, rng, rows, random_weights(p, rng))
        whole = {name: rng.integers(-8, 9, size=array.shape).astype(array.dtype) for name, array in inputs.items()}
        if p.int4:
            whole["w"] = plain_int4(p, rng, 0.5)
        assert np.array_equal(run(kernel, whole), reference(p, whole)["out"].astype(np.float32))


@pytest.mark.parametrize("variant", ["bf16", "f32"])
def test_a_small_row_is_as_exact_as_a_large_one(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(3)
    inputs = random_inputs(p, rng, 40, random_weights(p, rng), 2.0 ** rng.integers(-30, 30, size=40))
    got, want = run(built(p, device, tmp_path), inputs).astype(np.float64), reference(p, inputs)["out"]
    assert (np.abs(got - want).max(axis=1) <= np.abs(want).max(axis=1) * FAMILY.tolerances(p)["out"].relative).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_other_rows_hold_does_not_matter(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(4)
    kernel = built(p, device, tmp_path)
    inputs = random_inputs(p, rng, 21, random_weights(p, rng))
    before = run(kernel, inputs)
    broken = inputs["x"].copy()
    broken[3], broken[8], broken[20] = np.nan, np.inf, 3e38
    after = run(kernel, {**inputs, "x": broken})
    others = np.setdiff1d(np.arange(21), (3, 8, 20))
    assert np.array_equal(bits(before[others]), bits(after[others]))
    used = after[3][..., p.out_offset : p.out_offset + p.n]
    assert np.isnan(used.astype(np.float32)).all()


@pytest.mark.parametrize("variant", ["heads", "f32 rows, heads", "swiglu, heads", "int4, heads"])
def test_columns_that_are_not_the_products_keep_their_bits(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(5)
    inputs = random_inputs(p, rng, 17, random_weights(p, rng))
    inputs["out"][...] = np.full(inputs["out"].shape, 0xFFFFFFFF, np.uint32).view(np.float32)
    got = bits(run(built(p, device, tmp_path), inputs))
    columns = np.arange(p.out_columns)
    mine = (columns >= p.out_offset) & (columns < p.out_offset + p.n)
    assert (got[..., ~mine] == 0xFFFFFFFF).all()
    assert (got[..., mine] != 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    "types",
    [
        {"x": "bf16", "w": "bf16"}, {"x": "f32", "w": "f32"}, {**SWIGLU, "x": "bf16", "w": "bf16"},
        {**INT4, "x": "bf16"}, {**INT4, **SWIGLU, "n": 48, "x": "bf16"},
    ],
    ids=["bf16", "f32", "swiglu", "int4", "int4, swiglu"],
)  # fmt: skip
def test_tiles_and_pipelines_decide_no_bits(types, device, tmp_path):
    changes = [
        {}, {"tile": {"n": 16, "k": 64}}, {"tile": {"n": 64, "k": 64}, "stages": 2}, {"early_weights": True, "stages": 3},
        {"tile": {"n": 64, "k": 64}, "warps": {"n": 4, "k": 3}}, {"few_rows": 16, "rows": 15}, {"few_rows": 8},
    ]  # fmt: skip
    if types["w"] == "int4":
        changes = [change for change in changes if change.get("tile", {}).get("n") != 16]
    made = [parameters(**types, **change) for change in changes]
    assert len({str(FAMILY.contract(p, get_target("host")).pinned) for p in made}) == 1
    rng = np.random.default_rng(6)
    kernels = [built(p, device, tmp_path / str(i)) for i, p in enumerate(made)]
    w = random_weights(made[0], rng)
    for rows in (7, 15, 37):
        inputs = random_inputs(made[0], rng, rows, w)
        first, *others = [run(kernel, inputs) for p, kernel in zip(made, kernels, strict=True) if rows <= p.rows]
        for other in others:
            assert np.array_equal(bits(first), bits(other))


def test_what_decides_bits_is_pinned():
    base = {"n": 64, "k": 1024, "rows": 9}
    changes = [
        {}, {"slices": 2}, {"warps": {"n": 2, "k": 4}}, {"tile": {"n": 64, "k": 128}}, {"x": "f32"}, {"w": "f32"}, {"out": "f32"},
        {"w": "int4"}, {"epilogue": "swiglu"},
    ]  # fmt: skip
    pinned = [str(FAMILY.contract(Params.model_validate({**base, **change}), get_target("sm_120")).pinned) for change in changes]
    assert len(set(pinned)) == len(changes)


@pytest.mark.parametrize("target", ["sm_120", "sm_90", "host"])
@pytest.mark.parametrize("rows", [1, 8, 9, 64, 65, 300])
@pytest.mark.parametrize("few", [0, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_one_launch_covers_each_number_of_rows(target, rows, few, dtype):
    p = Params.model_validate({"n": 130, "k": 1024, "rows": rows, "slices": 2, "x": dtype, "w": dtype, "few_rows": few})
    contract = FAMILY.contract(p, get_target(target))
    made = {entry.name: entry for entry in entries(p, get_target(target))}
    assert all(item.entry in made or item.entry == "gemm_join" for item in contract.launches)
    for count in range(1, rows + 1):
        first, *join = (item for item in contract.launches if not item.when or evaluate(item.when, {"T": count}))
        entry = made[first.entry]
        blocks = evaluate(str(first.grid[0]), {"T": count})
        assert (blocks - 1) * entry.rows < count <= blocks * entry.rows
        assert first.grid[1:] == ((9, 1) if count <= few else (3, 2))
        assert first.shared_bytes <= get_target(target).shared_limit
        assert [item.entry for item in join] == ([] if count <= few else ["gemm_join"])


def test_fewer_stages_are_taken_where_memory_is_short():
    p = Params.model_validate({"n": 2112, "k": 7168, "slices": 4})
    small, large = (entries(p, get_target(name))[-1] for name in ("sm_120", "sm_90"))
    assert (small.rows, small.stages) == (64, 3)
    assert (large.rows, large.stages) == (64, 4)


def test_a_tile_that_the_target_has_no_room_for_is_refused():
    p = Params.model_validate({"n": 256, "k": 1024, "tile": {"n": 256, "k": 256}, "warps": {"n": 4, "k": 1}})
    with pytest.raises(ValueError, match="need 270336 bytes of shared memory; sm_120 has"):
        FAMILY.contract(p, get_target("sm_120"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 100}, "k = 100 is not a multiple of 8"),
        ({"k": 102, "x": "f32", "w": "f32"}, "k = 102 is not a multiple of 4"),
        ({"k": 100, "x": "f32"}, "k = 100 is not a multiple of 8"),
        ({"x_width": 260}, "x_width = 260 is not a multiple of 8"),
        ({"x_offset": 4}, "is not a multiple of 8"),
        ({"x_offset": 8, "x_width": 256}, "columns 8 … 263 of x do not fit x_width = 256"),
        ({"out_offset": 1, "out_width": 64}, "columns 1 … 64 of out do not fit out_width = 64"),
        ({"tile": {"n": 48, "k": 64}}, r"tile.n = 48 must be 16, 32 or 64 columns for each of warps.n = 4"),
        ({"warps": {"n": 1, "k": 2}, "tile": {"n": 48, "k": 64}}, "must be 16, 32 or 64 columns"),
        ({"warps": {"n": 4, "k": 8}}, "32 warps; at most 16"),
        ({"warps": {"n": 4, "k": 4}, "slices": 2}, "8 parts, but K = 256 has only 4 steps"),
        ({"tile": {"n": 64, "k": 256}, "x": "f32", "warps": {"n": 4, "k": 1}}, "tile.k = 256 of f32 is more than 128"),
        ({"few_rows": 8, "warps": {"n": 4, "k": 1}}, "few_rows needs 2 or more slices"),
        ({"few_rows": 8, "k": 8192, "slices": 9}, "at most 16 parts"),
        ({"few_rows": 3}, "Input should be"),
        ({"heads": 1024, "slices": 64, "k": 8192, "warps": {"n": 4, "k": 1}}, "at most 65535"),
        ({"n": 1 << 20, "tile": {"n": 16, "k": 64}, "warps": {"n": 1, "k": 1}}, "at most 65535"),
        ({"w": "int8"}, "'bf16', 'f32' or 'int4'"),
        ({"w": "int4", "n": 80}, "n = 80 is not a multiple of 32: int4 weights are atoms of 32 rows of w and 64 columns"),
        ({"w": "int4", "n": 72, "epilogue": "swiglu"}, "n = 72 is not a multiple of 16: .*, half of them gate rows,"),
        ({"w": "int4", "k": 288}, "k = 288 is not a multiple of 64"),
        ({"w": "int4", "tile": {"n": 48, "k": 64}, "warps": {"n": 3, "k": 1}}, "tile.n = 48 is not a multiple of 32"),
        ({"w": "int4", "x": "f32", "tile": {"n": 64, "k": 256}, "warps": {"n": 4, "k": 1}}, "tile.k = 256 of f32"),
        ({"epilogue": "swiglu", "residual": True}, "set residual = false"),
        ({"epilogue": "swiglu", "tile": {"n": 48, "k": 64}, "warps": {"n": 3, "k": 1}}, "warps.n = 3 must be a power of two for swiglu"),
        ({"w": "int4", "n": 96, "tile": {"n": 96, "k": 64}, "warps": {"n": 3, "k": 1}}, "warps.n = 3 must be a power of two for int4"),
        ({"epilogue": "gelu"}, "'none' or 'swiglu'"),
        ({"bias": True}, "Extra inputs"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        Params.model_validate({"n": 64, "k": 256, **change})


def test_moved_bytes_count_every_weight_once():
    p = Params.model_validate({"n": 64, "k": 256, "rows": 8, "residual": True, "out": "f32"})
    one, eight = (workload.moved_bytes for workload in FAMILY.workloads(p, np.random.default_rng(0)))
    assert one == 64 * 256 * 2 + 256 * 2 + 64 * 8
    assert eight - one == 7 * (256 * 2 + 64 * 8)


def test_moved_bytes_of_gate_and_up_rows():
    p = Params.model_validate({"n": 64, "k": 256, "rows": 8, "epilogue": "swiglu", "w": "int4"})
    first, _ = FAMILY.workloads(p, np.random.default_rng(0))
    assert first.moved_bytes == 128 * (256 // 2 + 256 // 32 * 2) + 256 * 2 + 64 * 2
    assert first.flops == 2 * 128 * 256


def test_layouts_of_four_bit_weights():
    base = {"n": 64, "k": 256, "w": "int4"}
    for change, layout, shape in (
        ({}, "w4a16-m32k64-g32/1", (2, 4, 288)),
        ({"epilogue": "swiglu"}, "w4a16-m32k64-g32-gateup/1", (4, 4, 288)),
        ({"heads": 3, "residual": True}, "w4a16-m32k64-g32/1", (3, 2, 4, 288)),
    ):
        contract = FAMILY.contract(Params.model_validate({**base, **change}), get_target("sm_90"))
        assert contract.layouts == {"w": layout}
        assert (contract.arguments[1].dtype, contract.arguments[1].shape) == ("u32", shape)
    assert FAMILY.contract(Params.model_validate({**base, "w": "bf16"}), get_target("sm_90")).layouts == {}


def test_the_groups_sums_have_room_where_weights_are_small():
    p = Params.model_validate(
        {"n": 256, "k": 1024, "w": "int4", "stages": 2, "tile": {"n": 256, "k": 64}, "warps": {"n": 4, "k": 4}, "rows": 512}
    )
    for entry in entries(p, get_target("sm_90")):
        assert entry.shared_bytes >= 3 * 256 * entry.rows * 4


@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_four_bit_weights_of_f32_rows_have_the_bits_of_the_same_f32_weights(epilogue, device, tmp_path):
    p = parameters(**{**INT4, "x": "f32", "epilogue": epilogue})
    plain = parameters(**{**INT4, "x": "f32", "epilogue": epilogue, "w": "f32"})
    rng = np.random.default_rng(8)
    inputs = random_inputs(p, rng, 21, random_weights(p, rng), 2.0 ** rng.integers(-9, 9, size=21))
    got = run(built(p, device, tmp_path / "int4"), inputs)
    wide = run(built(plain, device, tmp_path / "f32"), {**inputs, "w": matrices(p, inputs["w"])})
    assert np.array_equal(bits(got), bits(wide))


@pytest.mark.parametrize("role", ["gate_up", "down"])
def test_four_bit_weights_have_the_bits_of_an_expert(role, device, tmp_path):
    """With its K cut in the same way, the product is that of `moe_gemm` with one expert, bit by bit."""
    p = parameters(**{**INT4, "k": 512, "epilogue": "swiglu" if role == "gate_up" else "none", "warps": {"n": 1, "k": 2}})
    experts = moe_gemm.Params.model_validate(
        {"role": role, "experts": 1, "top_k": 1, "n": 96, "k": 512, "rows": 70, "slices": 2, "parts": 2, "warps": 4, "out_dtype": "f32",
         "launches": ({"rows": 70, "stages": 2},)}
    )  # fmt: skip
    rng = np.random.default_rng(9)
    inputs = random_inputs(p, rng, 37, random_weights(p, rng), 2.0 ** rng.integers(-3, 3, size=37))
    routed = moe_gemm.make_inputs(experts, rng, np.zeros((37, 1), np.int32), inputs["w"][None])
    routed["x"] = inputs["x"].reshape(routed["x"].shape)
    spec = Spec.of("experts", KernelSpec("experts", moe_gemm.FAMILY, experts))
    target = get_target(target_of(device, sanitize=False).name)
    build_spec(spec, [target], tmp_path / "experts")
    kernel = load(tmp_path / "experts" / "experts" / target.name, device=open_device(device))["experts"]
    want = run_case(kernel, routed, {}, 0xFF)["out"].reshape(37, 96)
    assert np.array_equal(bits(run(built(p, device, tmp_path / "gemm"), inputs)), bits(want))


@pytest.mark.parametrize("variant", ["swiglu", "int4, swiglu"])
def test_large_gates_neither_overflow_nor_lose_their_row(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(10)
    inputs = random_inputs(p, rng, 12, random_weights(p, rng), 2.0 ** np.arange(-4.0, 8.0))
    got, want = run(built(p, device, tmp_path), inputs).astype(np.float64), reference(p, inputs)["out"]
    assert np.isfinite(got).all()
    assert (np.abs(got - want).max(axis=1) <= np.abs(want).max(axis=1) * FAMILY.tolerances(p)["out"].relative).all()
