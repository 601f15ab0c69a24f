"""The promise: a tree's node, a chunk's row and a decoded token have the same bits, wherever their keys lie and whoever is beside them."""

import ctypes

import numpy as np
import pytest

from kdgen.build import build_spec
from kdgen.kernels import attention_order, attention_plan, tree_attention
from kdgen.kernels.cache_layout import swizzled
from kdgen.runtime import load, open_device
from kdgen.spec import KernelSpec, Spec
from kdgen.targets import get_target
from kdgen.verify.artifacts import target_of
from kdgen.verify.kernel import run_case

SMALL = {
    "latent": 64, "rope": 64, "heads": 8, "scale": 0.2, "rows": 64, "sequences": 4, "page_size": 32, "max_pages": 64, "depth": 7,
    "splits": ({"below": 512, "keys": 64}, {"below": 1024, "keys": 128}, {"keys": 256}), "wide_output": True,
    "widths": (
        {"rows": 1, "columns": (1, 1, 1)}, {"rows": 8, "columns": (2, 2, 4)}, {"rows": 32, "columns": (4, 8, 8)},
        {"rows": 64, "columns": (8, 8, 8)},
    ),
}  # fmt: skip

VARIANTS = {
    "bulk": {},
    "cp_async": {"copy_method": "cp_async", "swizzle": False},
    "large tiles": {"key_tile": 32},
    "several octets": {"heads": 24},
    "f32": {"dtype": "f32"},
    "many rows, deep trees": {"rows": 512, "depth": 16, "widths": ({"rows": 512, "columns": (4, 8, 8)},)},
    "odd latent": {"latent": 80, "rope": 48, "swizzle": True},
    "packed": {"partials": "i16"},
    "packed, large tiles, odd latent": {"partials": "i16", "key_tile": 32, "latent": 208, "rope": 48},
}


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def parameters(**changes):
    return tree_attention.Params.model_validate({**SMALL, **changes})


def built(params, device, out):
    spec = Spec.of("attention", KernelSpec("attention", tree_attention.FAMILY, params, allow_spill=True))
    target = get_target(target_of(device, sanitize=False).name)
    build_spec(spec, [target], out)
    opened = open_device(device) if device != "host" else open_device("host", order="random", copies="random", seed=7)
    return load(out / spec.name / target.name, device=opened)["attention"]


def alone(p, rng, inputs, row):
    """A launch of one row that plain decoding would make: its keys lie in order, in other pages, and it is the last of them."""
    return alone_in(p, rng, inputs["q"][[row]], tree_attention.logical_keys(p, inputs)[row])


def alone_in(p, rng, query, keys):
    """As `alone`, from the query `[1, heads, width]` and the keys `[position + 1, width]`."""
    position = len(keys) - 1
    rows = {
        "starts": np.array([position], np.int32),
        "row_sequences": np.zeros(1, np.int32),
        "row_depths": np.zeros(1, np.int32),
        "row_paths": np.zeros((1, attention_plan.path_bytes(p.depth)), np.uint8),
    }
    made = tree_attention.make_inputs(p, rng, rows, [position + 1])
    cache = swizzled(made["cache"]) if p.swizzle else made["cache"]
    places = np.arange(position + 1)
    cache[made["page_tables"][0, places // p.page_size], places % p.page_size] = keys
    return {**made, "q": query, "cache": swizzled(cache) if p.swizzle else cache}


def random_launch(p, rng):
    """Trees and chunks of one to four sequences, anywhere in the context."""
    shapes = []
    most = p.rows
    for _ in range(int(rng.integers(1, p.sequences + 1))):
        count = int(rng.integers(1, max(2, most // 2)))
        most -= count
        contiguous = bool(rng.integers(3) == 0)
        shapes.append((int(rng.integers(0, p.positions - p.rows)) if rng.random() < 0.8 else int(rng.integers(0, 40)), count, contiguous))
    rows = attention_plan.random_rows(p, rng, shapes, int(rng.integers(0, 3)) if sum(n for _, n, _ in shapes) + 3 <= p.rows else 0)
    return tree_attention.make_inputs(p, rng, rows, [start + count for start, count, _ in shapes])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_is_the_same_alone_as_plain_decoding_would_compute_it(variant, device, tmp_path):
    p = parameters(**VARIANTS[variant])
    kernel = built(p, device, tmp_path)
    launches, rows_each = (3, 8) if device == "host" else (12, 24)
    compared = 0
    for seed in range(launches):
        rng = np.random.default_rng(seed)
        inputs = random_launch(p, rng)
        together = run_case(kernel, inputs, {}, 0xFF)
        real = np.array(sorted(tree_attention.logical_keys(p, inputs)))
        for row in rng.permutation(real)[:rows_each]:
            single = run_case(kernel, alone(p, rng, inputs, row), {}, 0xA5)
            for name in ("out", "out_f32"):
                assert np.array_equal(single[name][0].view(np.uint8), together[name][row].view(np.uint8)), (seed, row, name)
            compared += 1
    assert compared >= launches * 4


def c_exp2(x):
    """The C library's exp2f, which the host target calls; numpy's own differs in the last bit now and then."""
    function = ctypes.CDLL("libm.so.6").exp2f
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    return np.array([function(value) for value in x.ravel()], np.float32).reshape(x.shape)


def test_the_order_of_operations_explains_every_bit(tmp_path):
    """The second reference, step by step in float32, has the host target's bits (its `mma` adds in ascending order)."""
    packed = {"partials": "i16"}
    for changes in ({}, {"key_tile": 32}, {"dtype": "f32"}, {"heads": 24}, packed, {**packed, "latent": 208, "rope": 48}):
        p = parameters(**changes)
        kernel = built(p, "host", tmp_path / str(len(changes)) / "".join(map(str, changes.values())))
        rng = np.random.default_rng(3)
        inputs = random_launch(p, rng)
        got = run_case(kernel, inputs, {}, 0xFF)["out_f32"]
        want = attention_order.ordered(p, inputs, c_exp2)
        same = got.view(np.uint32) == want.view(np.uint32)
        assert same.mean() == 1.0, (changes, same.mean(), np.abs(got - want).max())


NOT_PINNED = (
    {"stages": 3}, {"stagger": False}, {"copy_method": "cp_async"}, {"swizzle": False}, {"page_size": 64, "max_pages": 32},
    {"widths": ({"rows": 64, "columns": (8, 8, 8)},)}, {"widths": ({"rows": 64, "columns": (1, 2, 4)},)}, {"blocks": 3},
)  # fmt: skip


def test_what_is_not_pinned_changes_no_bit(device, tmp_path):
    """Builds with equal `pinned` values are interchangeable: the same rows over the same keys give the same bits."""
    p = parameters()
    rng = np.random.default_rng(11)
    inputs = random_launch(p, rng)
    first = run_case(built(p, device, tmp_path / "first"), inputs, {}, 0xFF)["out_f32"]
    keys = tree_attention.logical_keys(p, inputs)
    for number, changes in enumerate(NOT_PINNED):
        q = parameters(**changes)
        contracts = [tree_attention.contract(params, get_target("host")) for params in (p, q)]
        assert contracts[0].pinned == contracts[1].pinned
        kernel = built(q, device, tmp_path / str(number))
        for row in sorted(keys)[:: max(1, len(keys) // 6)]:
            single = run_case(kernel, alone_in(q, rng, inputs["q"][[row]], keys[row]), {}, 0xA5)["out_f32"]
            assert np.array_equal(single[0].view(np.uint32), first[row].view(np.uint32)), (changes, row)


@pytest.mark.cuda
@pytest.mark.parametrize("copy_method", ["bulk", "cp_async"])
def test_pages_beyond_4_gib(copy_method, tmp_path):
    """The pool is larger than 32 bits of bytes can tell, filled with NaN, and the sequence's pages lie at both ends of it."""
    torch = pytest.importorskip("torch")
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of GPU memory")
    p = parameters(latent=512, rope=64, page_size=64, copy_method=copy_method, wide_output=False)
    kernel = built(p, "cuda", tmp_path)
    rng = np.random.default_rng(5)
    rows = attention_plan.random_rows(p, rng, [(1500, 17, False)])
    inputs = tree_attention.make_inputs(p, rng, rows, [1517])
    want = run_case(kernel, inputs, {}, 0xFF)["out"]
    pages = (5 << 30) // (64 * p.row_bytes)
    pool = torch.full((pages, 64, p.width), float("nan"), dtype=torch.bfloat16, device="cuda")
    tables = inputs["page_tables"].copy()
    used = -(-1517 // 64)
    moved = np.where(np.arange(used) % 2, pages - 1 - np.arange(used), np.arange(used)).astype(np.int32)
    for place, page in zip(moved, tables[0, :used], strict=True):
        pool[int(place)] = torch.from_numpy(inputs["cache"][page].view(np.int16)).cuda().view(torch.bfloat16)
    tables[0, :used] = moved
    torch.cuda.synchronize()
    arrays = {name: kernel.device.array(value) for name, value in {**inputs, "page_tables": tables}.items() if name != "cache"}
    out = kernel.allocate(T=17)
    kernel(**arrays, cache=pool, **out)
    kernel.device.synchronize()
    assert np.array_equal(out["out"].numpy().view(np.uint16), want.view(np.uint16))


def test_packed_sums_of_every_size(tmp_path):
    """Values from tiny to huge, and whole heads of zeros: the integers' error stays in proportion to the largest value around."""
    p = parameters(partials="i16")
    kernel = built(p, "host", tmp_path)
    rng = np.random.default_rng(4)
    for size in (2.0**-100, 2.0**-30, 1.0, 2.0**30, 2.0**90):
        inputs = random_launch(p, rng)
        cache = swizzled(inputs["cache"]) if p.swizzle else inputs["cache"]
        plain = cache.astype(np.float32)
        plain[..., : p.latent] = rng.standard_normal(plain[..., : p.latent].shape) * size
        plain[..., :16] = 0
        inputs["q"] = (inputs["q"].astype(np.float32) / max(size, 1.0)).astype(inputs["q"].dtype)
        stored = plain.astype(cache.dtype)
        inputs["cache"] = swizzled(stored) if p.swizzle else stored
        got = run_case(kernel, inputs, {}, 0xFF)["out_f32"]
        want = attention_order.ordered(p, inputs, c_exp2)
        assert (got.view(np.uint32) == want.view(np.uint32)).all(), size
        exact = tree_attention.reference(p, inputs)["out_f32"]
        assert np.abs(got - exact).max() <= 3e-3 * np.abs(exact).max(), size


def test_packed_sums_need_bf16():
    with pytest.raises(ValueError, match="partials = i16 needs dtype = bf16"):
        parameters(partials="i16", dtype="f32")
