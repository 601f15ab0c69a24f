"""The definition by hand, bits that tiling must not change, the order of operations to the last bit, and parameters that do not fit."""

import ctypes
import itertools

import numpy as np
import pytest
from pydantic import ValidationError

from kdgen.build import build_spec
from kdgen.dtypes import numpy_dtype
from kdgen.kernels import moe_gemm, moe_plan
from kdgen.kernels.moe_combine import fma
from kdgen.kernels.moe_gemm import (
    FAMILY,
    Params,
    choices,
    make_inputs,
    matrices,
    planned,
    random_choices,
    random_weights,
    reference,
    take_rows,
)
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target
from kdgen.verify.artifacts import target_of
from kdgen.verify.kernel import run_case

NARROW = ({"rows": 40, "stages": 2},)
SMALL = {
    "role": "gate_up", "experts": 9, "top_k": 3, "n": 48, "k": 512, "rows": 40, "slices": 2, "parts": 2, "warps": 4, "launches": NARROW,
}  # fmt: skip
DOWN = {**SMALL, "role": "down", "n": 96, "k": 256, "slices": 1, "parts": 1, "out_dtype": "f32"}


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def parameters(base=SMALL, **changes):
    return Params.model_validate({**base, **changes})


def built(params, device, out, name="experts"):
    spec = Spec.of(name, KernelSpec(name, FAMILY, params))
    target = get_target(target_of(device, sanitize=False).name)
    build_spec(spec, [target], out)
    opened = open_device(device) if device != "host" else open_device("host", order="random", copies="random", seed=7)
    return load(out / spec.name / target.name, device=opened)[name]


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def test_the_definition_by_hand():
    p = parameters(weights="f32", x_dtype="f32", out_dtype="f32")
    ids = np.array([[1, -1, 0], [-1, -1, 1]], np.int32)
    inputs = make_inputs(p, np.random.default_rng(5), ids, random_weights(p, np.random.default_rng(6), 3))
    out = reference(p, inputs)["out"]
    for (row, slot), e in np.ndenumerate(ids):
        if e < 0:
            assert (out[row, slot] == 0.5).all()
            continue
        for i in (0, 17, 47):
            gate = sum(float(a) * float(b) for a, b in zip(inputs["w"][e, i], inputs["x"][row], strict=True))
            up = sum(float(a) * float(b) for a, b in zip(inputs["w"][e, 48 + i], inputs["x"][row], strict=True))
            assert abs(out[row, slot, i] - gate / (1 + np.exp(-gate)) * up) < 1e-12


def test_four_bit_weights_are_read_exactly():
    rng = np.random.default_rng(0)
    for base in (SMALL, DOWN):
        p = parameters(base)
        weights = random_weights(p, rng, 3)
        wide = matrices(p, weights)
        assert wide.shape == (3, p.weight_rows, p.k)
        # A matrix of the definition, as plain weights, gives the same result.
        plain = parameters(base, weights="f32", x_dtype="f32")
        ids = random_choices(p, rng, 5, 9)
        ids[ids > 2] = -1
        inputs = make_inputs(p, rng, ids, weights)
        other = {**inputs, "w": wide.astype(np.float32), "x": inputs["x"].astype(np.float32)}
        assert np.array_equal(reference(p, inputs)["out"], reference(plain, other)["out"])


def test_choices_come_back_from_their_plan():
    p = parameters()
    rng = np.random.default_rng(1)
    ids = random_choices(p, rng, 20, 9)
    ids[rng.random(ids.shape) < 0.3] = -1
    inputs = make_inputs(p, rng, ids, random_weights(p, rng, 9))
    assert np.array_equal(choices(p, inputs), ids)
    rows = rng.permutation(20)[:7]
    part = take_rows(p, inputs, rows)
    assert np.array_equal(choices(p, part), ids[rows])
    whole = reference(p, inputs)["out"][rows].astype(np.float64)
    assert np.allclose(reference(p, part)["out"].astype(np.float64), whole, rtol=1e-9)


@pytest.mark.parametrize("base", [SMALL, DOWN], ids=["gate_up", "down"])
@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_tiles_teams_and_rings_change_no_bit(base, weights, device, tmp_path):
    """A row alone, in a launch cut for few rows, has the bits it has among many, in one cut for many."""
    # Cuts of K are pinned; those of the launch are free.
    cuts = [
        {"launches": ({"rows": 40, "stages": 2},)}, {"launches": ({"rows": 40, "stages": 2, "row_tile": 16},), "warps": 8},
        {"launches": ({"rows": 40, "stages": 2, "row_tile": 32},), "warps": 2}, {"launches": ({"rows": 40, "stages": 2, "wide": True},)},
        {"blocks": 1}, {"blocks": 64},
    ]  # fmt: skip
    kernels = [built(parameters(base, weights=weights, **cut), device, tmp_path / str(i)) for i, cut in enumerate(cuts)]
    assert all(kernel.contract.pinned == kernels[0].contract.pinned for kernel in kernels)
    p, rng = parameters(base, weights=weights), np.random.default_rng(2)
    matrix = random_weights(p, rng, 9)
    ids = random_choices(p, rng, 21, 9)
    ids[:, 0] = np.where((ids == 4).any(axis=1), ids[:, 0], 4)  # one expert has every row
    inputs = make_inputs(p, rng, ids, matrix)
    want = run_case(kernels[0], inputs, {}, 0xFF)["out"]
    for kernel, row in zip(kernels[1:], rng.permutation(21), strict=False):
        assert np.array_equal(bits(run_case(kernel, inputs, {}, 0xA5)["out"]), bits(want))
        alone = run_case(kernel, take_rows(p, inputs, np.array([row])), {}, 0xFF)["out"]
        assert np.array_equal(bits(alone[0]), bits(want[row]))


def c_exp2(x):
    """The C library's exp2f, which the host target calls; numpy's own differs in the last bit now and then."""
    function = ctypes.CDLL("libm.so.6").exp2f
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return np.array([function(value) for value in x.ravel()], np.float32).reshape(x.shape)


def ordered(p, x, matrix, scales):
    """x · matrixᵀ in float32 in the documented order; the host's `mma` adds its products in ascending order, each rounded.

    Args:
        p: the parameters.
        x: f32 [entries, k].
        matrix: f32 [weight rows, k]; the integers alone for 4-bit weights.
        scales: f32 [weight rows, k / 32]; ones for others.
    """
    shape = (len(x), len(matrix))
    slices = []
    length = p.part_steps * 2
    for at in range(p.slices):
        parts = []
        for part in range(at * p.parts, (at + 1) * p.parts):
            sums = np.zeros((4, *shape), np.float32)
            for group in range(part * length, (part + 1) * length):
                scale = np.broadcast_to(scales[:, group], shape)
                if p.matrix:
                    product = np.zeros(shape, np.float32) if p.weights == "int4" else sums[0]
                    for half, pair, t, odd in itertools.product(range(2), range(2), range(4), range(2)):
                        column = 32 * group + 8 * t + 4 * half + 2 * pair + odd
                        product = product + x[:, None, column] * matrix[None, :, column]
                    sums[0] = fma(product, scale, sums[0]) if p.weights == "int4" else product
                else:
                    for t in range(4):
                        product = np.zeros(shape, np.float32)
                        for column in range(32 * group + 8 * t, 32 * group + 8 * t + 8):
                            product = fma(np.broadcast_to(matrix[:, column], shape), np.broadcast_to(x[:, None, column], shape), product)
                        sums[t] = fma(product, scale, sums[t]) if p.weights == "int4" else sums[t] + product
            parts.append(sums[0] if p.matrix else (sums[0] + sums[1]) + (sums[2] + sums[3]))
        slices.append(in_order(parts))
    return in_order(slices)


def in_order(sums):
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total


def integers_and_scales(p, weights):
    """The integers and scales of one expert, gate rows before up rows."""
    unpacked = [moe_gemm.prepack.unprepack(weights)] if p.role == "down" else list(moe_gemm.prepack.unprepack_gate_up(weights))
    scales = np.concatenate([half.scale[0] for half in unpacked]).astype(np.float32)
    wide = matrices(p, weights)[0].astype(np.float32)
    return np.rint(wide / np.repeat(scales, 32, axis=1)), scales


@pytest.mark.parametrize("base", [SMALL, DOWN], ids=["gate_up", "down"])
@pytest.mark.parametrize(("weights", "x_dtype"), [("int4", "bf16"), ("bf16", "bf16"), ("int4", "f32"), ("f32", "f32"), ("bf16", "f32")])
def test_the_order_of_operations_explains_every_bit(base, weights, x_dtype, tmp_path):
    p = parameters(base, weights=weights, x_dtype=x_dtype)
    kernel = built(p, "host", tmp_path)
    rng = np.random.default_rng(3)
    ids = np.zeros((9, p.top_k), np.int32) - 1
    ids[:, 1] = 2
    inputs = make_inputs(p, rng, ids, random_weights(p, rng, 3))
    got = run_case(kernel, inputs, {}, 0xFF)["out"]
    x = (inputs["x"] if p.role == "gate_up" else inputs["x"][:, 1]).astype(np.float32)
    if weights == "int4":
        matrix, scales = integers_and_scales(p, inputs["w"][2:3])
    else:
        matrix = inputs["w"][2].astype(np.float32)
        scales = np.ones((len(matrix), p.k // 32), np.float32)
    sums = ordered(p, x, matrix, scales)
    if p.role == "gate_up":
        gate, up = sums[:, : p.n], sums[:, p.n :]
        log2_e = np.float32(np.log2(np.e))
        sums = gate / (np.float32(1) + c_exp2(gate * -log2_e)) * up
    assert np.array_equal(bits(got[:, 1]), bits(sums.astype(numpy_dtype(p.out_dtype))))
    # The entries in no list are as they were.
    assert np.array_equal(got[:, 0], inputs["out"][:, 0])


def test_a_router_s_plan_fits():
    p = parameters()
    plan = moe_plan.Params(experts=9, top_k=3, rows=40)
    ids = random_choices(p, np.random.default_rng(4), 6, 9)
    whole = moe_plan.reference(plan, {"topk_ids": ids})
    assert all(np.array_equal(whole[name], value) for name, value in planned(p, ids, 9).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 40}, "n = 40 must be a multiple of 16 for gate_up"),
        ({"role": "down"}, "n = 48 must be a multiple of 32 for down"),
        ({"top_k": 10}, "top_k = 10 is more than experts = 9"),
        ({"weights": "f32"}, "f32 weights need f32 rows"),
        ({"parts": 3}, "slices · parts = 6 does not divide the 8 steps of k = 512"),
        ({"k": 8192}, "a part has 32 steps, at most 16 are allowed"),
        ({"warps": 3}, "slices = 2 does not divide warps = 3"),
        ({"launches": ({"rows": 8, "stages": 2}, {"rows": 8, "stages": 2})}, "ascending rows; got 8 after 8"),
        ({"launches": ({"rows": 40, "stages": 3},)}, "stages = 3 is more than the 2 steps of a part"),
        ({"launches": ({"rows": 40, "stages": 2, "wide": True},), "parts": 16, "k": 4096}, "wide needs a warp for each of the 32 parts"),
        ({"launches": ({"rows": 40, "stages": 2, "row_tile": 16},), "x_dtype": "f32"}, "row_tile = 16 needs bf16 rows"),
        ({"launches": ({"rows": 39, "stages": 2},)}, "no launch is for more than 39 rows, but rows = 40"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        parameters(**changes)


def test_a_launch_that_is_too_large_names_itself():
    p = parameters(k=4096, slices=8, parts=1, warps=16, launches=({"rows": 40, "stages": 8, "row_tile": 32},))
    with pytest.raises(ValueError, match=r"launches\[0\]: .* bytes of shared memory; sm_120 has 101376"):
        FAMILY.contract(p, get_target("sm_120"))


def test_launches_cover_every_row_count_once():
    p = parameters(rows=30, launches=({"rows": 2, "wide": True, "stages": 2}, {"rows": 16, "stages": 2}, {"rows": 99, "stages": 2}))
    conditions = [launch.when for launch in FAMILY.contract(p, get_target("sm_120")).launches]
    assert conditions == ["T <= 2", "T > 2 and T <= 16", "T > 16"]
