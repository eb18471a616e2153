"""Rotary embeddings whose frequencies are scaled for long contexts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from max.dtype import DType
from max.graph import TensorValue, TensorValueLike, ops
from max.nn.layers.rope_scaling import (
    DeepseekYarnRopeScalingParams,
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
)
from max.nn.layers.rotary import Floats, RotaryEmbedding

__all__ = [
    "DeepseekYarnRotaryEmbedding",
    "DynamicRotaryEmbedding",
    "FactorRotaryEmbedding",
    "LinearRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "LongRoPERotaryEmbedding",
    "YarnRotaryEmbedding",
    "yarn_magnitude",
]


ScalingParams = TypeVar("ScalingParams")


class _ScaledRotaryEmbedding(RotaryEmbedding, Generic[ScalingParams]):
    """Rotary embedding with parameters that scale its frequencies.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The scaling of the frequencies; None: no scaling.
    """

    scaling_params: ScalingParams | None = None
    """The scaling of the frequencies."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: ScalingParams | None = None,
    ) -> None:
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        self.scaling_params = scaling_params


class Llama3RotaryEmbedding(_ScaledRotaryEmbedding[Llama3RopeScalingParams]):
    """Rotary embedding with the frequency scaling of Llama 3.1.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The scaling of the frequencies; no scaling by default.
    """

    __module__ = "max.nn.rotary_embedding"

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        if p is None:
            return inv_freqs
        # positions of a full turn: long ones are scaled, short ones kept, others blended
        wavelengths = np.float32(2 * math.pi) / inv_freqs
        low = p.orig_max_position / p.low_freq_factor
        high = p.orig_max_position / p.high_freq_factor
        # as if positions were `factor` times as near
        scaled = inv_freqs / np.float32(p.factor)
        span = p.high_freq_factor - p.low_freq_factor
        if span == 0:
            return np.where(wavelengths > low, scaled, inv_freqs).astype(np.float32)
        blend = (p.orig_max_position / wavelengths - p.low_freq_factor) / span
        between = (1 - blend) * scaled + blend * inv_freqs
        return np.where(
            wavelengths > low, scaled, np.where(wavelengths < high, inv_freqs, between)
        ).astype(np.float32)


class LinearRotaryEmbedding(_ScaledRotaryEmbedding[LinearScalingParams]):
    """Rotary embedding with linear scaling: positions are divided by a factor.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The factor; no scaling by default.
    """

    __module__ = "max.nn.rotary_embedding"

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        return inv_freqs if p is None else inv_freqs / np.float32(p.factor)


class FactorRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with a separate divisor for each frequency.

    Args:
        factors: The divisors ``[head_dim / 2]``.
        magnitude: The factor of cosines and sines.
        options: The arguments of `RotaryEmbedding`.
    """

    def __init__(self, factors: list[float], magnitude: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.factors, self.magnitude = factors, magnitude

    def _inv_freqs(self) -> Floats:
        return super()._inv_freqs() / np.asarray(self.factors, np.float32)

    def _magnitude(self) -> float:
        return self.magnitude


def _yarn_inv_freqs(
    inv_freqs: Floats,
    theta: float,
    factor: float,
    bounds: tuple[float, float],
    original: int,
    truncate: bool,
) -> Floats:
    """Interpolates frequencies by their number of rotations over the original length; `bounds` is (fast, slow)."""
    size = 2 * len(inv_freqs)

    def dimension(turns: float) -> float:
        """The pair with the given number of rotations over the original length."""
        # solves turns = original / (2 pi theta ** (2 d / size)) for d, as in the YaRN paper
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (dimension(turns) for turns in bounds)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # pairs below `low` turn often and are kept, those above `high` are scaled, between them a ramp
    low, high = max(low, 0), min(high, size - 1)
    # avoid a division by 0
    high = high + 0.001 if low == high else high
    ramp = (np.arange(size // 2, dtype=np.float32) - low) / (high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    scaled = inv_freqs / np.float32(factor)
    return (scaled * (1 - kept) + inv_freqs * kept).astype(np.float32)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor of queries and keys (https://arxiv.org/abs/2309.00071): ``0.1 * weight * ln(factor) + 1``.

    Args:
        factor: The divisor of low frequencies.
        weight: The weight of the logarithm (``mscale``).
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class YarnRotaryEmbedding(_ScaledRotaryEmbedding[YarnScalingParams]):
    """Rotary embedding with YaRN scaling.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The scaling of the frequencies.
    """

    __module__ = "max.nn.rotary_embedding"

    magnitude: float | None = None
    """The factor of cosines and sines; None: `yarn_magnitude` of the scaling."""

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        if p is None:
            return inv_freqs
        bounds = (p.beta_fast, p.beta_slow)
        original = p.original_max_position_embeddings
        return _yarn_inv_freqs(inv_freqs, self.theta, p.factor, bounds, original, p.truncate)

    def _magnitude(self) -> float:
        p = self.scaling_params
        if self.magnitude is not None:
            return self.magnitude
        return 1.0 if p is None else yarn_magnitude(p.factor)


class DeepseekYarnRotaryEmbedding(_ScaledRotaryEmbedding[DeepseekYarnRopeScalingParams]):
    """Rotary embedding with YaRN scaling in DeepSeek's variant.

    The table has `max_seq_len` rows and covers the rotated part of a head only.

    Args:
        dim: The number of rotated elements of a head.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head, for the scale of the scores; `dim` by default.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The scaling of the frequencies; no scaling by default.
    """

    __module__ = "max.nn.rotary_embedding"

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: DeepseekYarnRopeScalingParams | None = None,
    ) -> None:
        size = dim if head_dim is None else head_dim
        super().__init__(
            dim, n_heads, theta, max_seq_len, size, _freqs_cis, interleaved, scaling_params
        )

    @property
    def _rotated_dim(self) -> int:
        return self.dim

    @property
    def _rows(self) -> int:
        return self.max_seq_len

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        if p is None:
            return inv_freqs
        bounds = (float(p.beta_fast), float(p.beta_slow))
        original = p.original_max_position_embeddings
        return _yarn_inv_freqs(inv_freqs, self.theta, p.scaling_factor, bounds, original, True)

    def _magnitude(self) -> float:
        p = self.scaling_params
        if p is None:
            return 1.0
        both = (yarn_magnitude(p.scaling_factor, w) for w in (p.mscale, p.mscale_all_dim))
        own, all_dim = both
        # divided by what `compute_scale` multiplies into the scores
        return own / all_dim

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The scale of the attention scores, corrected for the extended context length.

        Args:
            user_scale: The scale before the correction; ``1 / sqrt(head_dim)`` by default.
        """
        scale = super().compute_scale(user_scale)
        p = self.scaling_params
        if p is None:
            return scale
        # squared: the factor belongs to queries and to keys
        return scale * yarn_magnitude(p.scaling_factor, p.mscale_all_dim) ** 2


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with dynamic NTK scaling: the base grows with sequences longer than `max_seq_len`.

    `maybe_update_freqs` stages the frequencies of a call: those of `theta` if all positions are less than
    `max_seq_len`, otherwise those of ``theta * (length / max_seq_len) ** (head_dim / (head_dim - 2))``.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence with the original frequencies; the table has ``2 * max_seq_len`` rows.
        head_dim: The size of a head; ``dim // n_heads`` by default.
        _freqs_cis: Not used; the table is always computed.
        interleaved: Whether the two elements of a rotated pair are adjacent.

    Raises:
        ValueError: The head's size is odd, or less than 4.
    """

    __module__ = "max.nn.rotary_embedding"

    inv_freq: TensorValue | None
    """The frequency of each pair, float32 ``[head_dim / 2]``; None before `maybe_update_freqs`."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
    ) -> None:
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, None, interleaved)
        if self.head_dim < 4:
            raise ValueError(
                f"DynamicRotaryEmbedding: heads of {self.head_dim} elements, expected 4 or more"
            )
        self.inv_freq = None

    def maybe_update_freqs(self, position_ids: TensorValueLike) -> None:
        """Stages the frequencies for positions: the original ones, or scaled ones past `max_seq_len`.

        Args:
            position_ids: The positions of all tokens, integers of any rank.
        """
        positions = ops.reshape(TensorValue(position_ids), [-1])
        length = ops.cast(ops.max(positions, axis=0) + 1, DType.float32)
        size = self._rotated_dim
        longest = float(self.max_seq_len)
        # up to the trained length the growth is 0, and the frequencies stay as they are
        growth = ops.log(ops.max(length, longest) / longest) * (size / (size - 2))
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        device = positions.device
        original = ops.constant(self._inv_freqs(), DType.float32, device)
        # frequency i is theta ** -(2i / size): log(base) grows by `growth`
        scaled = original * ops.exp(-growth * ops.constant(exponents, DType.float32, device))
        self.inv_freq = ops.where(ops.greater(length, longest), scaled, original)

    def freqs_cis_base(self) -> TensorValue:
        """Cosines and sines of the current frequencies, float32 ``[max_seq_len * 2, head_dim / 2, 2]``."""
        if self.inv_freq is None:
            return super().freqs_cis_base()
        positions = ops.range(
            0, self._rows, 1, out_dim=self._rows, dtype=DType.int64, device=self.inv_freq.device
        )
        angles = ops.unsqueeze(ops.cast(positions, DType.float32), 1) * ops.unsqueeze(
            self.inv_freq, 0
        )
        return ops.stack([ops.cos(angles), ops.sin(angles)], axis=-1)


class LongRoPERotaryEmbedding(_ScaledRotaryEmbedding[LongRoPEScalingParams]):
    """Rotary embedding with LongRoPE scaling, as in Phi-3.5.

    The table uses the short factors up to the original length, and the long factors past it.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.
        scaling_params: The factors.

    Raises:
        ValueError: The number of factors differs from the number of pairs.
    """

    __module__ = "max.nn.rotary_embedding"

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: LongRoPEScalingParams | None = None,
    ) -> None:
        super().__init__(
            dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved, scaling_params
        )
        if scaling_params is not None:
            pairs = self._rotated_dim // 2
            for name in ("short_factor", "long_factor"):
                factors: Sequence[float] = getattr(scaling_params, name)
                if len(factors) != pairs:
                    raise ValueError(
                        f"LongRoPERotaryEmbedding: {len(factors)} factors in {name}, expected one "
                        f"for each of {pairs} pairs"
                    )

    def _angles(self) -> Floats:
        p = self.scaling_params
        if p is None:
            return super()._angles()
        inv_freqs = self._inv_freqs()
        positions = np.arange(self._rows, dtype=np.float32)[:, None]
        # one table for both: rows up to the original length have the short factors
        short, long = (
            inv_freqs / np.asarray(f, np.float32) for f in (p.short_factor, p.long_factor)
        )
        return np.where(positions < p.original_max_position, positions * short, positions * long)

    def _stretch(self) -> float:
        p = self.scaling_params
        return 1.0 if p is None else p.max_position_embeddings / p.original_max_position

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The scale of the attention scores, corrected for the extended context length.

        Args:
            user_scale: The scale before the correction; ``1 / sqrt(head_dim)`` by default.
        """
        scale = super().compute_scale(user_scale)
        p = self.scaling_params
        if p is None or self._stretch() <= 1:
            return scale
        # squared: the correction applies to both queries and keys
        return scale * (1 + math.log(self._stretch()) / math.log(p.original_max_position))
