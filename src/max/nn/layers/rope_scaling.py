"""Parameters that scale the frequencies of rotary embeddings for long contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LinearScalingParams:
    """Linear scaling: positions are divided by a factor.

    Args:
        factor: The factor.
    """

    factor: float


@dataclass
class Llama3RopeScalingParams:
    """Llama 3.1: divides low frequencies by a factor, keeps high ones, and interpolates in between.

    Args:
        factor: The divisor of low frequencies.
        low_freq_factor: Frequencies with fewer rotations than this over the original length are low.
        high_freq_factor: Frequencies with more rotations than this are high.
        orig_max_position: The context length of the original training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    orig_max_position: int


@dataclass
class YarnScalingParams:
    """YaRN (https://arxiv.org/abs/2309.00071).

    Args:
        factor: The divisor of low frequencies.
        beta_fast: Frequencies with more rotations than this over the original length are kept.
        beta_slow: Frequencies with fewer rotations than this are divided.
        original_max_position_embeddings: The context length of the original training.
        truncate: Whether the bounds of the interpolated range are rounded to whole dimensions.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    truncate: bool


@dataclass
class DeepseekYarnRopeScalingParams:
    """YaRN in DeepSeek's variant.

    Args:
        scaling_factor: The divisor of low frequencies.
        original_max_position_embeddings: The context length of the original training.
        beta_fast: Frequencies with more rotations than this over the original length are kept.
        beta_slow: Frequencies with fewer rotations than this are divided.
        mscale: The weight of the correction that scales cosines and sines.
        mscale_all_dim: The weight of the correction that scales attention scores.
    """

    scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: int
    beta_slow: int
    mscale: float
    mscale_all_dim: float


@dataclass
class LongRoPEScalingParams:
    """LongRoPE (https://arxiv.org/abs/2402.13753): a factor for each frequency.

    Args:
        short_factor: The factors for sequences up to the original length.
        long_factor: The factors for longer sequences.
        original_max_position: The context length of the original training.
        max_position_embeddings: The extended context length.
    """

    short_factor: list[float]
    long_factor: list[float]
    original_max_position: int
    max_position_embeddings: int


for _params in (
    LinearScalingParams,
    Llama3RopeScalingParams,
    YarnScalingParams,
    DeepseekYarnRopeScalingParams,
    LongRoPEScalingParams,
):
    # the decorator looks the module up, which may not be loaded
    _params.__module__ = "max.nn.rotary_embedding"
