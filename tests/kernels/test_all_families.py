"""Every family in many shapes against its reference, on the CPU and on a GPU."""

from pathlib import Path

import pytest
import yaml

from kdgen.build import build_spec
from kdgen.kernels import families, get_family
from kdgen.spec import KernelSpec, Spec, load_spec
from kdgen.targets import get_target
from kdgen.verify import verify_spec

ROOT = Path(__file__).parents[2]

TREE = {"depth": 5, "top_k": 7, "budget": 20, "sequences": 3}
CACHE = {"layers": 2, "width": 64, "depth": 4, "page_size": 8, "max_pages": 6, "sequences": 3}
PLAN = {"heads": 8, "rows": 40, "sequences": 3, "page_size": 32, "max_pages": 64, "depth": 5}
ATTENTION = {**PLAN, "latent": 64, "rope": 64, "scale": 0.2}
PREPARE = {"heads": 4, "latent": 64, "rope": 64, "nope": 32, "rows": 33, "sequences": 3, "page_size": 16, "max_pages": 8}
ROUTE = {"experts": 64, "hidden": 256, "top_k": 4, "rows": 70, "slices": 2, "warps": 3}
PLAIN_ROUTE = {**ROUTE, "x_dtype": "f32", "gate_dtype": "f32", "row_tile": 16}
GEMM = {"n": 64, "k": 256, "rows": 64}
NARROW = [{"rows": 40, "stages": 2}]
EXPERTS = {
    "role": "gate_up", "experts": 9, "top_k": 3, "n": 48, "k": 512, "rows": 40, "slices": 2, "parts": 2, "warps": 4,
    "launches": [{"rows": 2, "wide": True, "stages": 2}, {"rows": 12, "stages": 2}, {"rows": 40, "row_tile": 16, "stages": 2}],
}  # fmt: skip
DOWN = {
    **EXPERTS, "role": "down", "n": 96, "k": 256, "slices": 1, "parts": 1, "out_dtype": "f32",
    "launches": [{"rows": 12, "stages": 4}, {"rows": 40, "row_tile": 32, "stages": 2}],
}  # fmt: skip
MANY = {
    "role": "gate_up", "experts": 600, "top_k": 2, "n": 32, "k": 128, "rows": 20, "slices": 1, "warps": 2, "out_dtype": "f32",
    "launches": [{"rows": 20, "stages": 2}],
}  # fmt: skip
COMBINE = {"experts": 9, "top_k": 3, "hidden": 68, "threads": 64, "rows": 40}
NORM = {"hidden": 64, "eps": 1e-5, "rows": 9}
PROBE = {"n": 64, "k": 256, "rows": 64}

VARIANTS = {
    "tree_build": [
        TREE, {**TREE, "budget": 0}, {**TREE, "budget": 1, "depth": 1, "top_k": 1}, {**TREE, "chain_seed": True},
        {**TREE, "depth_bonus": 0.5}, {**TREE, "width_cap": 2}, {**TREE, "pad": True}, {**TREE, "depth": 16, "top_k": 64},
        {"depth": 7, "top_k": 16, "budget": 255, "sequences": 2}, {"depth": 16, "top_k": 64, "budget": 255, "sequences": 2, "pad": True},
        {"depth": 7, "top_k": 64, "budget": 64, "sequences": 2, "chain_seed": True, "depth_bonus": 0.25, "width_cap": 9, "pad": True},
    ],
    "tree_accept": [
        {"depth": 1, "budget": 1, "sequences": 2}, {"depth": 7, "budget": 31, "sequences": 5}, {"depth": 16, "budget": 64, "sequences": 3},
        {"depth": 7, "budget": 255, "sequences": 3},
    ],
    "kv_compact": [
        CACHE, {**CACHE, "swizzle": True}, {**CACHE, "dtype": "f32"}, {**CACHE, "dtype": "f32", "swizzle": True},
        {**CACHE, "width": 576, "layers": 3, "page_size": 64, "swizzle": True, "depth": 16}, {**CACHE, "page_size": 1},
    ],
    "gemm_probe": [
        PROBE, {**PROBE, "tile": {"n": 32, "t": 8, "k": 32}, "stages": 2}, {**PROBE, "tile": {"n": 64, "t": 32, "k": 128}, "stages": 2},
        {**PROBE, "tile": {"n": 16, "t": 64, "k": 64}, "stages": 4},
        {**PROBE, "rows": 33, "tile": {"n": 64, "t": 16, "k": 32}, "stages": 8},
    ],
    "attention_plan": [
        PLAN, {**PLAN, "heads": 24}, {**PLAN, "heads": 64, "rows": 9}, {**PLAN, "key_tile": 32, "depth": 16},
        {**PLAN, "rows": 300, "page_size": 64, "max_pages": 4096},
    ],
    "tree_attention": [
        ATTENTION, {**ATTENTION, "copy_method": "cp_async"}, {**ATTENTION, "stagger": False, "stages": 3}, {**ATTENTION, "dtype": "f32"},
        {**ATTENTION, "heads": 16, "wide_output": True}, {**ATTENTION, "latent": 512, "rope": 64, "rows": 17},
        {**ATTENTION, "latent": 512, "key_tile": 16, "heads": 64, "rows": 4},
        {**ATTENTION, "partials": "i16"}, {**ATTENTION, "partials": "i16", "latent": 208, "rope": 48},
    ],
    "mla_prepare": [
        PREPARE, {**PREPARE, "dtype": "f32", "projected": "f32"}, {**PREPARE, "projected": "f32", "swizzle": False},
        {**PREPARE, "latent": 1040, "swizzle": False, "heads": 1, "nope": 0}, {**PREPARE, "dtype": "f32", "eps": 1e-5},
        {**PREPARE, "kv_width": 200, "kv_offset": 40},
    ],
    "rmsnorm": [
        NORM, {**NORM, "x": "f32", "weight": "f32", "out": "f32"}, {**NORM, "residual": "bf16"},
        {**NORM, "residual": "f32", "hidden": 1100, "threads": 64}, {**NORM, "hidden": 4, "x": "f32", "eps": 0.0},
        {**NORM, "residual": "f32", "out": "f32", "hidden": 7168, "threads": 448},
        {**NORM, "residual": "bf16", "weight": "f32", "hidden": 7168},
        {**NORM, "hidden": 16384, "x": "f32", "residual": "f32", "out": "f32", "weight": "f32", "rows": 5},
        {**NORM, "hidden": 16384, "threads": 1024, "residual": "f32", "rows": 5}, {**NORM, "x_width": 144, "x_offset": 16},
    ],
    "embed": [{"hidden": 64}, {"hidden": 64, "out": "f32"}, {"hidden": 7168, "dtype": "f32", "out": "f32"}, {"hidden": 2056, "rows": 5}],
    "argmax": [
        {"vocab": 64, "rows": 40}, {"vocab": 1024, "dtype": "bf16", "threads": 32, "loads": 1},
        {"vocab": 4100, "threads": 64, "loads": 2, "blocks": 12}, {"vocab": 20480, "dtype": "bf16", "blocks": 1, "rows": 20},
        {"vocab": 4104, "dtype": "bf16", "threads": 32, "loads": 2, "blocks": 40, "rows": 30}, {"vocab": 163840, "rows": 14},
        {"vocab": 40960, "threads": 1024, "loads": 8, "dtype": "bf16", "blocks": 20, "rows": 14},
    ],
    "argmax_merge": [{"ranks": 8}, {"ranks": 1, "rows": 3}, {"ranks": 64, "rows": 200}],
    "moe_route": [
        ROUTE, {**ROUTE, "scoring": "softmax"}, {**ROUTE, "bias": False, "normalise": False, "tile_e": 64, "row_tile": 32},
        {**ROUTE, "experts": 256, "top_k": 8, "n_group": 8, "topk_group": 4, "scaling": 2.5, "rows": 17, "early_weights": True},
        {**ROUTE, "top_k": 3, "n_group": 32, "topk_group": 2, "scoring": "softmax", "rows": 9},
        {**ROUTE, "experts": 32, "hidden": 64, "top_k": 16, "slices": 1, "warps": 1, "tile_e": 16},
        {**ROUTE, "experts": 512, "hidden": 1024, "top_k": 16, "rows": 8, "slices": 3, "warps": 8},
        {**ROUTE, "hidden": 2048, "slices": 1, "warps": 1, "rows": 9},
        {**ROUTE, "experts": 384, "hidden": 512, "top_k": 8, "rows": 16, "slices": 4, "warps": 4, "scaling": 2.827},
        PLAIN_ROUTE, {**PLAIN_ROUTE, "x_dtype": "bf16", "tile_e": 64, "row_tile": 8, "scoring": "softmax"},
        {**PLAIN_ROUTE, "gate_dtype": "bf16", "tile_e": 16, "row_tile": 32, "n_group": 4, "topk_group": 2, "bias": False},
    ],
    "moe_plan": [
        {"experts": 384, "top_k": 8, "rows": 128}, {"experts": 1, "top_k": 1, "rows": 5}, {"experts": 7, "top_k": 7, "rows": 33},
        {"experts": 33, "top_k": 2, "rows": 300}, {"experts": 512, "top_k": 16, "rows": 16},
    ],
    "topk_logprob": [
        {"vocab": 64, "top_k": 16, "rows": 40}, {"vocab": 1024, "top_k": 64, "dtype": "bf16", "chunk": 512, "threads": 64, "slice": True},
        {"vocab": 20480, "top_k": 64}, {"vocab": 20480, "top_k": 16, "dtype": "bf16", "slice": True},
        {"vocab": 163840, "top_k": 64, "rows": 7}, {"vocab": 4100, "top_k": 1, "chunk": 256, "threads": 64},
        {"vocab": 4, "top_k": 4, "rows": 3}, {"vocab": 40968, "top_k": 33, "dtype": "bf16", "chunk": 8192, "threads": 512, "rows": 5},
        {"vocab": 33000, "top_k": 64, "chunk": 16384, "threads": 1024, "rows": 6},
        {"vocab": 10000, "top_k": 7, "chunk": 1024, "threads": 128, "slice": True, "rows": 1},
    ],
    "topk_logprob_merge": [
        {"ranks": 8, "top_k": 16}, {"ranks": 1, "top_k": 1, "rows": 3}, {"ranks": 64, "top_k": 64, "rows": 40},
        {"ranks": 5, "top_k": 64}, {"ranks": 33, "top_k": 5},
    ],
    "moe_gemm": [
        EXPERTS, DOWN, {**EXPERTS, "weights": "bf16"}, {**DOWN, "weights": "bf16", "out_dtype": "bf16"},
        {**EXPERTS, "x_dtype": "f32", "out_dtype": "f32", "launches": NARROW}, {**DOWN, "x_dtype": "f32", "launches": NARROW},
        {**EXPERTS, "x_dtype": "f32", "weights": "f32", "out_dtype": "f32", "launches": NARROW},
        {**DOWN, "x_dtype": "f32", "weights": "f32", "launches": NARROW}, {**DOWN, "x_dtype": "f32", "weights": "bf16", "launches": NARROW},
        {**DOWN, "slices": 4, "k": 1024, "warps": 8, "launches": [{"rows": 40, "stages": 3}]},
        {**EXPERTS, "slices": 1, "parts": 8, "k": 1024, "top_k": 1, "launches": NARROW},
        MANY, {**MANY, "role": "down", "warps": 8},
        {**DOWN, "early": True, "launches": [{"rows": 12, "stages": 4, "resident": True},
                                             {"rows": 40, "row_tile": 32, "stages": 2, "resident": True}]},
        {**DOWN, "x_dtype": "f32", "weights": "f32", "early": True, "warps": 2, "launches": [{"rows": 40, "stages": 3, "resident": True}]},
        {**EXPERTS, "early": True}, {**MANY, "role": "down", "launches": [{"rows": 20, "stages": 2, "resident": True}]},
    ],
    "moe_combine": [
        COMBINE, {**COMBINE, "y_dtype": "bf16", "shared": "bf16"}, {**COMBINE, "shared": "f32", "residual": "f32", "out_dtype": "f32"},
        {**COMBINE, "hidden": 7168, "threads": 256, "residual": "bf16", "rows": 20},
    ],
    "gemm": [
        GEMM, {**GEMM, "x": "f32", "w": "f32", "out": "f32"}, {**GEMM, "w": "f32", "out": "f32", "residual": True},
        {**GEMM, "x": "f32", "slices": 2, "few_rows": 4, "warps": {"n": 2, "k": 1}},
        {**GEMM, "n": 83, "k": 200, "rows": 33, "residual": True, "tile": {"n": 32, "k": 64}, "warps": {"n": 1, "k": 3}},
        {**GEMM, "n": 66, "k": 1000, "rows": 128, "slices": 3, "tile": {"n": 64, "k": 128}, "warps": {"n": 1, "k": 2}, "stages": 2,
         "early_weights": True, "few_rows": 8, "out": "f32"},
        {**GEMM, "k": 128, "heads": 3, "x_width": 192, "x_offset": 8, "out_width": 100, "out_offset": 20, "rows": 128,
         "tile": {"n": 32, "k": 64}, "warps": {"n": 2, "k": 1}, "slices": 2, "few_rows": 1},
        {**GEMM, "n": 48, "k": 44, "x": "f32", "w": "f32", "heads": 1, "out_width": 50, "tile": {"n": 48, "k": 64},
         "warps": {"n": 3, "k": 1}, "residual": True, "rows": 17},
        {**GEMM, "n": 256, "k": 1024, "tile": {"n": 256, "k": 64}, "warps": {"n": 4, "k": 1}, "stages": 2, "out": "f32",
         "slices": 2, "residual": True, "few_rows": 16},
        {**GEMM, "n": 128, "k": 2048, "tile": {"n": 32, "k": 64}, "warps": {"n": 2, "k": 8}, "stages": 3, "rows": 16,
         "early_weights": True},
        {**GEMM, "n": 1, "k": 8, "heads": 2, "warps": {"n": 1, "k": 1}, "tile": {"n": 16, "k": 256}, "rows": 9, "stages": 8},
        {**GEMM, "epilogue": "swiglu", "rows": 128, "slices": 2, "few_rows": 4, "warps": {"n": 2, "k": 1}},
        {**GEMM, "epilogue": "swiglu", "n": 83, "k": 200, "rows": 33, "tile": {"n": 64, "k": 64}, "warps": {"n": 1, "k": 3}, "out": "f32"},
        {**GEMM, "epilogue": "swiglu", "n": 37, "k": 1152, "heads": 2, "out_width": 50, "out_offset": 3, "tile": {"n": 256, "k": 64},
         "warps": {"n": 4, "k": 1}, "stages": 2, "slices": 18, "rows": 17},
        {**GEMM, "epilogue": "swiglu", "x": "f32", "w": "f32", "out": "f32", "slices": 2, "warps": {"n": 2, "k": 1}},
        {**GEMM, "epilogue": "swiglu", "n": 16, "k": 512, "rows": 512, "tile": {"n": 16, "k": 256}, "warps": {"n": 1, "k": 2}, "stages": 2},
        {**GEMM, "w": "int4", "rows": 128, "slices": 2, "few_rows": 8, "warps": {"n": 4, "k": 2}},
        {**GEMM, "w": "int4", "n": 96, "k": 448, "rows": 33, "residual": True, "out": "f32", "tile": {"n": 64, "k": 128},
         "warps": {"n": 1, "k": 3}, "stages": 3, "early_weights": True},
        {**GEMM, "w": "int4", "k": 320, "heads": 3, "x_width": 384, "x_offset": 8, "out_width": 100, "out_offset": 20,
         "tile": {"n": 256, "k": 256}, "warps": {"n": 4, "k": 1}, "stages": 2, "slices": 2},
        {**GEMM, "w": "int4", "epilogue": "swiglu", "n": 80, "rows": 128, "tile": {"n": 64, "k": 64}, "warps": {"n": 4, "k": 2},
         "slices": 2, "few_rows": 1},
        {**GEMM, "w": "int4", "epilogue": "swiglu", "n": 16, "k": 512, "rows": 512, "tile": {"n": 32, "k": 128}, "warps": {"n": 2, "k": 2}},
        {**GEMM, "w": "int4", "x": "f32", "out": "f32", "n": 96, "k": 448, "rows": 33, "tile": {"n": 32, "k": 128},
         "warps": {"n": 2, "k": 2}, "residual": True},
        {**GEMM, "w": "int4", "epilogue": "swiglu", "x": "f32", "heads": 2, "slices": 2, "few_rows": 8, "warps": {"n": 2, "k": 1}},
    ],
    "loop_condition": [{}],
    "tree_rows": [
        {"depth": 1, "budget": 0, "sequences": 2}, {"depth": 7, "budget": 64, "sequences": 5}, {"depth": 16, "budget": 31, "sequences": 20},
        {"depth": 15, "budget": 255, "sequences": 3},
    ],
    "tree_commit": [
        {"depth": 7, "budget": 64, "sequences": 64, "max_new": 100, "positions": 500},
        {"depth": 1, "budget": 1, "sequences": 33, "stops": 1, "max_new": 3, "positions": 7},
        {"depth": 16, "budget": 255, "sequences": 3, "stops": 32, "max_new": 40, "positions": 300},
        {"depth": 3, "budget": 4, "sequences": 300, "max_new": 9, "positions": 1}, {"depth": 8, "budget": 0, "max_new": 1, "positions": 64},
    ],
    "draft_oracle": [
        {"depth": 7, "top_k": 16, "positions": 300, "vocab": 163840}, {"depth": 1, "top_k": 1, "positions": 1, "vocab": 2},
        {"depth": 16, "top_k": 64, "positions": 50, "vocab": 65}, {"depth": 3, "top_k": 5, "positions": 40, "vocab": 11},
        {"depth": 5, "top_k": 40, "positions": 100, "vocab": 1 << 30},
    ],
    "draft_ngram": [
        {"depth": 7, "top_k": 16, "positions": 700}, {"depth": 1, "top_k": 1, "positions": 1, "n_max": 1, "n_min": 1},
        {"depth": 16, "top_k": 64, "positions": 3000, "n_max": 32, "n_min": 3}, {"depth": 4, "top_k": 3, "positions": 9000, "n_min": 1},
        {"depth": 3, "top_k": 2, "positions": 20000, "n_max": 2, "sequences": 3}, {"depth": 5, "top_k": 7, "positions": 40, "n_min": 4},
    ],
    "primitives": [{"blocks": 1}, {"blocks": 3}],
    "ceiling_read": [{}, {"unroll": 1}],
    "ceiling_mma": [{}],
}  # fmt: skip

KERNELS = [
    pytest.param(KernelSpec(f"{name}{i}", get_family(name), get_family(name).params.model_validate(params)), id=f"{name}{i}")
    for name, variants in VARIANTS.items()
    for i, params in enumerate(variants)
]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def test_no_family_is_left_out():
    assert set(VARIANTS) == set(families())


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_case_equals_its_reference(kernel, device, tmp_path):
    spec = Spec.of(kernel.name, kernel)
    (verdict,) = verify_spec(spec, device, schedules=3, regroup=4, out=tmp_path)
    assert verdict.passed, verdict.failures
    assert verdict.cases


@pytest.mark.cuda
@pytest.mark.parametrize(
    "path", sorted(path for kind in ("kernels", "engines") for path in (ROOT / "specs" / kind).glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_specs_as_they_ship(path, tmp_path):
    for verdict in verify_spec(load_spec(path), "cuda", schedules=2, out=tmp_path):
        assert verdict.passed, verdict.failures


@pytest.mark.parametrize("target", ["sm_120", "sm_90"])
def test_every_variant_compiles_without_spills(target, tmp_path):
    kernels = tuple(kernel.values[0] for kernel in KERNELS)
    (built,) = build_spec(Spec.of("all", *kernels), [get_target(target)], tmp_path).targets
    for kernel in built.kernels:
        for figures in kernel.resources.values():
            assert (figures["spill_bytes"], figures["stack_bytes"]) == (0, 0), kernel.name


def test_specs_are_yaml_that_names_its_schema():
    for path in (ROOT / "specs").glob("[ek]*/*.yaml"):
        assert path.read_text().startswith("# yaml-language-server: $schema="), path
        assert isinstance(yaml.safe_load(path.read_text()), dict)
