"""Rotary position embedding with YaRN scaling: frequencies, and the table of cosines and sines that kernels read.

The definitions are those of Hugging Face's `rope_scaling` of type yarn. Pairs are half-split: value i of a head turns with value
i + dim / 2. Checkpoints of the DeepSeek-V3 family store them interleaved (2 i with 2 i + 1); their rows are permuted when they are loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kdgen.spec.model import Rope

Floats = npt.NDArray[np.float32]


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's correction of the attention's temperature: 0.1 · mscale · ln(factor) + 1, and 1 without scaling."""
    return 1.0 if factor <= 1 or mscale == 0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(rope: Rope, head_dim: int) -> float:
    """Factor of the scores: head_dim^(−1/2), times the square of the correction for `mscale_all_dim`.

    Args:
        rope: of the model.
        head_dim: values of a head that are multiplied, nope and rope together.
    """
    return float(magnitude(rope.factor, rope.mscale_all_dim) ** 2 / math.sqrt(head_dim))


def inverse_frequencies(rope: Rope, dim: int) -> Floats:
    """Radians per position of every pair, `[dim / 2]` float32.

    Fast pairs keep their frequency, slow ones are divided by `factor`, with a linear ramp between the pairs that turn `beta_fast` and
    `beta_slow` times within the original context. Every operation is rounded to float32 in the reference's order: a frequency's last bit
    is 0.03 radians at position 262,143. (The power is rounded correctly here; PyTorch's is off by one bit for one of K2.6's 32 pairs.)
    """
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    one, powers = np.float32(1), (np.float64(rope.theta) ** exponents.astype(np.float64)).astype(np.float32)
    plain = one / powers
    if rope.factor <= 1:
        return plain

    def pair_of(turns: float) -> float:
        return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001)), 0, 1)
    slow, kept = one / (np.float32(rope.factor) * powers), one - ramp
    return np.asarray(slow * (one - kept) + plain * kept, np.float32)


def rope_table(rope: Rope, dim: int, positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines `[positions, dim / 2]` float32 of the float32 products position · frequency.

    The product is rounded to float32 first, as references do it: at position 262,143 one ulp of it is 0.03 radians, so that an exact
    product would give another model. The cosine of the rounded product is then exact to half an ulp. Both are multiplied by YaRN's ratio
    of corrections, which is 1 where `mscale` equals `mscale_all_dim`.
    """
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, dim)[None, :]
    ratio = magnitude(rope.factor, rope.mscale) / magnitude(rope.factor, rope.mscale_all_dim)
    wide = angles.astype(np.float64)
    return (np.cos(wide) * ratio).astype(np.float32), (np.sin(wide) * ratio).astype(np.float32)
