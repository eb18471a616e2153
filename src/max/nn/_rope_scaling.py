"""The numbers that scale the frequencies of rotary embeddings for long contexts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LinearScalingParams:
    """Positions are divided by a factor.

    Args:
        factor: The factor.
    """

    factor: float


@dataclass
class Llama3RopeScalingParams:
    """Divides low frequencies by a factor, keeps high ones, and blends the frequencies in between.

    Args:
        factor: The divisor of low frequencies.
        low_freq_factor: Frequencies with fewer rotations over the original length are low.
        high_freq_factor: Frequencies with more rotations are high.
        orig_max_position: The length that the model was first trained with.
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
        beta_fast: Frequencies with more rotations over the original length are kept.
        beta_slow: Frequencies with fewer rotations are divided.
        original_max_position_embeddings: The length that the model was first trained with.
        truncate: Whether the bounds between are rounded to whole dimensions.
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
        original_max_position_embeddings: The length that the model was first trained with.
        beta_fast: Frequencies with more rotations over the original length are kept.
        beta_slow: Frequencies with fewer rotations are divided.
        mscale: The weight of the correction of cosines and sines.
        mscale_all_dim: The weight of the correction of scores.
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
        long_factor: The factors for longer ones.
        original_max_position: The length that the model was first trained with.
        max_position_embeddings: The length that it was extended to.
    """

    short_factor: list[float]
    long_factor: list[float]
    original_max_position: int
    max_position_embeddings: int
