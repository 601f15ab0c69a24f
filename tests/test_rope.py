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
    """Frequencies, table and softmax scale of Hugging Face's DeepSeek-V3 with K2.6's settings."""
    torch = pytest.importorskip("torch")
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    settings = {
        "rope_type": "yarn", "rope_theta": K26.theta, "factor": K26.factor, "beta_fast": K26.beta_fast, "beta_slow": K26.beta_slow,
        "mscale": K26.mscale, "mscale_all_dim": K26.mscale_all_dim, "original_max_position_embeddings": K26.original_max_position,
    }  # fmt: skip
    config = deepseek.DeepseekV3Config(
        rope_parameters=settings, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, kv_lora_rank=512, q_lora_rank=1536,
        hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1, max_position_embeddings=262144,
    )  # fmt: skip
    embedding = deepseek.DeepseekV3RotaryEmbedding(config)
    ours, theirs = inverse_frequencies(K26, 64), embedding.inv_freq.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1.2e-7)
    assert (ours.view(np.uint32) == theirs.view(np.uint32)).sum() >= 31  # torch's power is off by one bit for pair 5
    assert deepseek.DeepseekV3Attention(config, 0).scaling == pytest.approx(softmax_scale(K26, 192), rel=1e-6)
    positions = torch.tensor([[0, 1, 77, 4095, 100_000]])
    cosines, sines = (values[0, :, :32].numpy() for values in embedding(torch.zeros(1), positions))
    table = rope_table(K26, 64, 100_001)
    # Where frequencies differ in the last bit, so does the angle: by one ulp of it, 0.008 at position 100,000.
    np.testing.assert_allclose(table[0][positions[0].numpy()], cosines, atol=0.01)
    np.testing.assert_allclose(table[1][positions[0].numpy()], sines, atol=0.01)
    np.testing.assert_allclose(table[0][:2], cosines[:2], atol=1e-6)
