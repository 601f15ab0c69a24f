"""The reference of mla_prepare against plain formulas in float64, and what it does at the edges."""

import numpy as np
import pytest

from kdgen.kernels.cache_layout import swizzled
from kdgen.kernels.mla_prepare import FAMILY, Params, reference

SHAPE = {"heads": 3, "latent": 64, "rope": 32, "nope": 16, "rows": 40, "sequences": 2, "page_size": 8, "max_pages": 16}
WIDE = Params(**SHAPE, dtype="f32", projected="f32")


def cases(params, seed=0):
    return list(FAMILY.cases(params, np.random.default_rng(seed)))


def test_norm_and_rotation_are_the_textbook_ones():
    for case in cases(WIDE):
        got = reference(WIDE, case.inputs)
        kv, queries = case.inputs["kv"].astype(np.float64), case.inputs["queries"].astype(np.float64)
        turn = case.inputs["cosines"][case.inputs["positions"]] + 1j * case.inputs["sines"][case.inputs["positions"]].astype(np.float64)
        plain = swizzled(got["cache"])
        for row, slot in enumerate(case.inputs["slots"]):
            if slot < 0:
                assert not got["q"][row, :, 64:].any()
                continue
            page = case.inputs["page_tables"][case.inputs["row_sequences"][row], slot // 8]
            latent = kv[row, :64] / np.sqrt((kv[row, :64] ** 2).mean() + WIDE.eps) * case.inputs["kv_norm"]
            np.testing.assert_allclose(plain[page, slot % 8, :64], latent, rtol=2e-6, atol=1e-9)
            for values, found in [(kv[row, 64:], plain[page, slot % 8, 64:])] + [
                (queries[row, head, 16:], got["q"][row, head, 64:]) for head in range(3)
            ]:
                turned = (values[:16] + 1j * values[16:]) * turn[row]
                np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag]), rtol=1e-5, atol=1e-5 * np.abs(values).max())


def test_other_rows_of_the_cache_and_the_absorbed_part_are_left_alone():
    (case, *_) = cases(WIDE)
    got = reference(WIDE, case.inputs)
    assert (got["cache"].view(np.uint32) != case.inputs["cache"].view(np.uint32)).any(axis=2).sum() == 1
    assert np.array_equal(got["q"][:, :, :64].view(np.uint32), case.inputs["q"][:, :, :64].view(np.uint32))


def test_rounding_to_bf16_stands_before_the_weight():
    params = Params(**{**SHAPE, "rope": 64})
    case = cases(params)[2]
    got = swizzled(reference(params, case.inputs)["cache"]).astype(np.float64)
    row = int(np.flatnonzero(case.inputs["slots"] >= 0)[0])
    slot, sequence = case.inputs["slots"][row], case.inputs["row_sequences"][row]
    entry = got[case.inputs["page_tables"][sequence, slot // 8], slot % 8, :64]
    kv = case.inputs["kv"][row, :64].astype(np.float64)
    factor = 1 / np.sqrt((kv**2).mean() + params.eps)
    bf16 = case.inputs["kv"].dtype
    want = ((kv * factor).astype(bf16).astype(np.float64) * case.inputs["kv_norm"].astype(np.float64)).astype(bf16)
    assert (entry == want.astype(np.float64)).mean() > 0.95  # a value next to a rounding boundary may fall on the other side


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope": 8, "projected": "bf16"}, "half of rope"),
        ({"latent": 48}, "swizzle needs rows"),
        ({"page_size": 4}, "pages of a multiple of 8"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Params(**{**SHAPE, "dtype": "f32", "projected": "f32", **change})
