import math
from pathlib import Path

import numpy as np
import pytest

from kdgen.rope import inverse_frequencies, magnitude, rope_table, softmax_scale
from kdgen.spec import load_spec
from kdgen.spec.model import Rope

ROOT = Path(__file__).parents[1]
ENGINE = load_spec(ROOT / "specs" / "engines" / "kimi-k2.6.yaml").engine
assert ENGINE is not None
K26 = ENGINE.model.rope
PLAIN = Rope(theta=10000.0, factor=1.0, original_max_position=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)


def test_frequencies_of_kimi():
    """Pairs up to 8 keep their frequency, from 20 on it is a 64th; between them a linear ramp."""
    plain = 50000.0 ** (-np.arange(32) / 32)
    ratio = inverse_frequencies(K26, 64) / plain
    np.testing.assert_allclose(ratio[:9], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[20:], 1 / 64, rtol=1e-6)
    ramp = (np.arange(9, 20) - 8) / 12
    np.testing.assert_allclose(ratio[9:20], ramp / 64 + 1 - ramp, rtol=1e-6)


def test_scale_of_kimi():
    assert softmax_scale(K26, 192) == pytest.approx(0.1446796, abs=1e-7)
    attention = load_spec(ROOT / "specs" / "engines" / "kimi-k2.6.yaml").kernel("tree_attention").params
    assert attention.scale == pytest.approx(softmax_scale(K26, 192), rel=1e-12)


def test_no_scaling():
    assert magnitude(1.0, 1.0) == 1.0
    np.testing.assert_allclose(inverse_frequencies(PLAIN, 8), 10000.0 ** (-np.arange(4) / 4), rtol=1e-6)
    assert softmax_scale(PLAIN, 64) == pytest.approx(1 / 8)


def test_the_table_is_that_of_the_rounded_product():
    cosines, sines = rope_table(K26, 64, 1 << 18)
    assert (cosines.dtype, cosines.shape) == (np.float32, (1 << 18, 32))
    position = np.float32(262143)
    for pair in (0, 5, 31):
        angle = position * inverse_frequencies(K26, 64)[pair]
        assert angle.dtype == np.float32
        assert cosines[262143, pair] == np.float32(math.cos(float(angle)))
        assert sines[262143, pair] == np.float32(math.sin(float(angle)))
    assert (cosines[0] == 1).all()
    assert (sines[0] == 0).all()


def test_agrees_with_transformers():
    """Frequencies and attention factor of Hugging Face's yarn."""
    torch = pytest.importorskip("torch")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    settings = {
        "rope_type": "yarn", "type": "yarn", "rope_theta": K26.theta, "factor": K26.factor, "beta_fast": K26.beta_fast,
        "beta_slow": K26.beta_slow, "mscale": K26.mscale, "mscale_all_dim": K26.mscale_all_dim,
        "original_max_position_embeddings": K26.original_max_position,
    }  # fmt: skip
    config = transformers.PretrainedConfig()
    config.rope_theta, config.rope_scaling, config.rope_parameters = K26.theta, settings, settings
    config.head_dim, config.hidden_size, config.num_attention_heads, config.max_position_embeddings = 64, 512, 8, 262144
    frequencies, factor = utilities._compute_yarn_parameters(config, torch.device("cpu"))
    np.testing.assert_allclose(inverse_frequencies(K26, 64), frequencies.numpy(), rtol=3e-7)
    assert factor == 1.0
