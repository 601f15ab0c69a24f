"""The product bit by bit: its order of operations, exact sums, what must not decide a bit, and parameters that do not fit."""

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.build import build_spec
from kdgen.expressions import evaluate
from kdgen.kernels.gemm import FAMILY, Params, entries, ordered, random_inputs, random_weights, reference
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target
from kdgen.verify.artifacts import target_of
from kdgen.verify.kernel import run_case

BF16 = ml_dtypes.bfloat16
SMALL = {"n": 40, "k": 392, "rows": 70, "out": "f32", "slices": 2, "tile": {"n": 32, "k": 64}, "warps": {"n": 1, "k": 3}}
HEADS = {"n": 32, "k": 128, "heads": 3, "x_width": 160, "x_offset": 16, "out_width": 48, "out_offset": 8}

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


def bits(array):
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_follows_the_stated_order(variant, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(1)
    kernel = built(p, "host", tmp_path)
    for rows in (1, 19, 70):
        inputs = random_inputs(p, rng, rows, random_weights(p, rng))
        assert np.array_equal(bits(run(kernel, inputs)), bits(ordered(p, inputs)))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "bf16 out"])
def test_sums_of_small_integers_are_exact(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    rng = np.random.default_rng(2)
    kernel = built(p, device, tmp_path)
    for rows in (1, 9, 33, 65):
        inputs = random_inputs(p, rng, rows, random_weights(p, rng))
        whole = {name: rng.integers(-8, 9, size=array.shape).astype(array.dtype) for name, array in inputs.items()}
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


@pytest.mark.parametrize("variant", ["heads", "f32 rows, heads"])
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


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_tiles_and_pipelines_decide_no_bits(dtype, device, tmp_path):
    changes = [
        {}, {"tile": {"n": 16, "k": 64}}, {"tile": {"n": 64, "k": 64}, "stages": 2}, {"early_weights": True, "stages": 3},
        {"tile": {"n": 64, "k": 64}, "warps": {"n": 4, "k": 3}}, {"few_rows": 16, "rows": 15}, {"few_rows": 8},
    ]  # fmt: skip
    made = [parameters(x=dtype, w=dtype, **change) for change in changes]
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
    changes = [{}, {"slices": 2}, {"warps": {"n": 2, "k": 4}}, {"tile": {"n": 64, "k": 128}}, {"x": "f32"}, {"w": "f32"}, {"out": "f32"}]
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
        ({"w": "int4"}, "'bf16' or 'f32'"),
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
