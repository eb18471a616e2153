"""Rotary position embedding (https://arxiv.org/abs/2104.09864), and its scalings for long contexts.

A head's elements are taken in pairs; pair i of the token at position p is rotated by the angle
``p * inv_freq[i]``. The pairs are neighbours (``interleaved``), or element i and element
``i + head_dim / 2``, as Hugging Face checkpoints have it. Tables of cosines and sines are computed here, in
float32 as the models were trained, and are constants of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from max._earlier import earlier_names
from max.dtype import DType
from max.graph import DeviceRef, Dim, DimLike, TensorValue, TensorValueLike, ops
from max.nn._rope_scaling import (
    DeepseekYarnRopeScalingParams,
    LinearScalingParams,
    Llama3RopeScalingParams,
    LongRoPEScalingParams,
    YarnScalingParams,
)
from max.nn.layer import Module

__all__ = [
    "DeepseekYarnRopeScalingParams",
    "DeepseekYarnRotaryEmbedding",
    "DynamicRotaryEmbedding",
    "LinearRotaryEmbedding",
    "LinearScalingParams",
    "Llama3RopeScalingParams",
    "Llama3RotaryEmbedding",
    "LongRoPERotaryEmbedding",
    "LongRoPEScalingParams",
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "YarnScalingParams",
]

Floats = npt.NDArray[np.float32]


class RotaryEmbedding(Module):
    """Rotates heads by the positions of their tokens.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence; the table has twice as many rows.
        head_dim: The size of a head; ``dim // n_heads`` by default.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.

    Raises:
        ValueError: The head's size is odd.
    """

    dim: int
    """The model's hidden size."""

    n_heads: int
    """The number of query heads."""

    theta: float
    """The base of the frequencies."""

    max_seq_len: int
    """The longest sequence."""

    head_dim: int
    """The size of a head."""

    interleaved: bool = True
    """Whether the elements of a pair are adjacent."""

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
        self.dim, self.n_heads, self.theta = dim, n_heads, theta
        self.max_seq_len = max_seq_len
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        self.interleaved = interleaved
        self._freqs_cis = _freqs_cis
        self._table: Floats | None = None
        if self._rotated % 2:
            raise ValueError(
                f"{type(self).__name__}: heads of {self._rotated} elements cannot be taken in pairs"
            )

    @property
    def _rotated(self) -> int:
        """The number of rotated elements of a head."""
        return self.head_dim

    @property
    def _rows(self) -> int:
        """The number of positions in the table."""
        return 2 * self.max_seq_len

    def _inv_freqs(self) -> Floats:
        """The angle of each pair for one position."""
        exponents = np.arange(0, self._rotated, 2, dtype=np.float32) / np.float32(self._rotated)
        return (np.float32(1.0) / np.float32(self.theta) ** exponents).astype(np.float32)

    def _angles(self) -> Floats:
        """Angles ``[2 * max_seq_len, head_dim / 2]``."""
        positions = np.arange(self._rows, dtype=np.float32)
        return positions[:, None] * self._inv_freqs()[None, :]

    def _magnitude(self) -> float:
        """The factor of cosines and sines."""
        return 1.0

    def table(self) -> Floats:
        """Cosines and sines, float32 ``[2 * max_seq_len, head_dim / 2, 2]``; computed once."""
        if self._table is None:
            angles = self._angles()
            table = np.empty((*angles.shape, 2), np.float32)
            np.cos(angles, out=table[..., 0])
            np.sin(angles, out=table[..., 1])
            if (magnitude := self._magnitude()) != 1.0:
                table *= np.float32(magnitude)
            table.flags.writeable = False
            self._table = table
        return self._table

    def freqs_cis_base(self) -> TensorValue:
        """Cosines and sines, float32 ``[max_seq_len * 2, head_dim / 2, 2]``, on the CPU."""
        if self._freqs_cis is not None:
            return TensorValue(self._freqs_cis)
        return ops.constant(self.table(), DType.float32, DeviceRef.CPU())

    @property
    def freqs_cis(self) -> TensorValue:
        """`freqs_cis_base` as the attention kernels take it: ``[max_seq_len * 2, head_dim]``."""
        base = self.freqs_cis_base()
        if base.rank == 2:
            return base
        return ops.reshape(base, [base.shape[0], base.shape[1] * base.shape[2]])

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The factor of the attention scores.

        Args:
            user_scale: The scale where it is given; ``1 / sqrt(head_dim)`` by default.
        """
        return user_scale if user_scale is not None else math.sqrt(1.0 / self.head_dim)

    def __call__(
        self,
        x: TensorValue,
        start_pos: TensorValue | None = None,
        seq_len: DimLike | None = None,
    ) -> TensorValue:
        """The heads, rotated; computed in float32.

        Args:
            x: ``[batch, seq_len, heads, head_dim]``.
            start_pos: The position of the first token, an integer scalar; 0 by default.
            seq_len: The number of tokens; that of `x` by default.

        Raises:
            ValueError: `x` has another rank or head size.
        """
        if x.rank != 4 or x.shape[-1] != self._rotated:
            raise ValueError(
                f"{type(self).__name__}: the input is {x!r}, expected [batch, seq_len, heads, "
                f"{self._rotated}]"
            )
        start = ops.constant(0, DType.int64, DeviceRef.CPU()) if start_pos is None else start_pos
        length = None if seq_len is None else Dim(seq_len)
        return rotate_positions(
            x, self.freqs_cis_base().to(x.device), start, length, self.interleaved
        )


def rotate_positions(
    x: TensorValueLike,
    base: TensorValueLike,
    start: TensorValueLike,
    length: Dim | None = None,
    interleaved: bool = True,
) -> TensorValue:
    """Rotates each head by its position; computed in float32.

    Args:
        x: ``[batch, seq_len, heads, head_dim]``.
        base: The cosine and the sine of each position and pair: ``[positions, head_dim / 2, 2]``, on the device of `x`.
        start: The position of the first token, an integer scalar.
        length: The number of tokens; that of `x` where it is None.
        interleaved: Whether a pair are neighbouring elements; otherwise they are half a head apart.
    """
    x, base = TensorValue(x), TensorValue(base)
    length = x.shape[1] if length is None else length
    half = base.shape[1]
    first_row = ops.cast(TensorValue(start), DType.int64).to(DeviceRef.CPU())
    rows = ops.slice_tensor(base, [(slice(first_row, first_row + TensorValue(length)), length)])
    cos, sin = (ops.reshape(rows[:, :, i], [1, length, 1, half]) for i in (0, 1))
    heads = ops.cast(x, DType.float32)
    if interleaved:
        pairs = ops.reshape(heads, [*x.shape[:-1], half, 2])
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = ops.split(heads, [half, half], -1)
    rotated = first * cos - second * sin, first * sin + second * cos
    if interleaved:
        result = ops.reshape(ops.stack(rotated, axis=-1), x.shape)
    else:
        result = ops.concat(rotated, axis=-1)
    return ops.cast(result, x.dtype)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with the frequencies of Llama 3.1.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.
        scaling_params: How frequencies are scaled; not at all by default.
    """

    scaling_params: Llama3RopeScalingParams | None = None
    """How frequencies are scaled."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: Llama3RopeScalingParams | None = None,
    ) -> None:
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        self.scaling_params = scaling_params

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        if p is None:
            return inv_freqs
        wavelengths = np.float32(2 * math.pi) / inv_freqs
        low = p.orig_max_position / p.low_freq_factor
        high = p.orig_max_position / p.high_freq_factor
        scaled = inv_freqs / np.float32(p.factor)
        span = p.high_freq_factor - p.low_freq_factor
        if span == 0:
            return np.where(wavelengths > low, scaled, inv_freqs).astype(np.float32)
        blend = (p.orig_max_position / wavelengths - p.low_freq_factor) / span
        between = (1 - blend) * scaled + blend * inv_freqs
        return np.where(
            wavelengths > low, scaled, np.where(wavelengths < high, inv_freqs, between)
        ).astype(np.float32)


class LinearRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with positions divided by a factor.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.
        scaling_params: The factor; not scaled by default.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: LinearScalingParams | None = None,
    ) -> None:
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        self.scaling_params = scaling_params

    def _inv_freqs(self) -> Floats:
        inv_freqs = super()._inv_freqs()
        p = self.scaling_params
        return inv_freqs if p is None else inv_freqs / np.float32(p.factor)


def _yarn_inv_freqs(
    inv_freqs: Floats,
    theta: float,
    factor: float,
    bounds: tuple[float, float],
    original: int,
    truncate: bool,
) -> Floats:
    """Frequencies blended by their number of rotations over the original length; `bounds` is fast, slow."""
    size = 2 * len(inv_freqs)

    def dimension(turns: float) -> float:
        """The pair with the given number of rotations over the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (dimension(turns) for turns in bounds)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # no division by 0
    high = high + 0.001 if low == high else high
    ramp = (np.arange(size // 2, dtype=np.float32) - low) / (high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    scaled = inv_freqs / np.float32(factor)
    return (scaled * (1 - kept) + inv_freqs * kept).astype(np.float32)


def _yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class YarnRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with YaRN scaling.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.
        scaling_params: How frequencies are scaled.
    """

    scaling_params: YarnScalingParams | None = None
    """How frequencies are scaled."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        theta: float,
        max_seq_len: int,
        head_dim: int | None = None,
        _freqs_cis: TensorValueLike | None = None,
        interleaved: bool = True,
        scaling_params: YarnScalingParams | None = None,
    ) -> None:
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        self.scaling_params = scaling_params

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
        return 1.0 if p is None else _yarn_magnitude(p.factor)


class DeepseekYarnRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with YaRN scaling in DeepSeek's variant.

    The table has `max_seq_len` rows, and is for the rotated part of heads.

    Args:
        dim: The number of rotated elements of a head.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head, for the scale of the scores; `dim` by default.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.
        scaling_params: How frequencies are scaled; not at all by default.
    """

    scaling_params: DeepseekYarnRopeScalingParams | None = None
    """How frequencies are scaled."""

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
        super().__init__(dim, n_heads, theta, max_seq_len, size, _freqs_cis, interleaved)
        self.scaling_params = scaling_params

    @property
    def _rotated(self) -> int:
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
        both = (_yarn_magnitude(p.scaling_factor, w) for w in (p.mscale, p.mscale_all_dim))
        own, all_dim = both
        return own / all_dim

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The factor of the attention scores: with the correction for the extended length.

        Args:
            user_scale: The scale before the correction; ``1 / sqrt(head_dim)`` by default.
        """
        scale = super().compute_scale(user_scale)
        p = self.scaling_params
        if p is None:
            return scale
        return scale * _yarn_magnitude(p.scaling_factor, p.mscale_all_dim) ** 2


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding whose base grows with the sequence, once it is longer than `max_seq_len` (dynamic NTK scaling).

    `maybe_update_freqs` stages the frequencies of a call: those of `theta` while all positions are less than
    `max_seq_len`, else those of ``theta * (length / max_seq_len) ** (head_dim / (head_dim - 2))``.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence with the original frequencies; the table has twice as many rows.
        head_dim: The size of a head; ``dim // n_heads`` by default.
        _freqs_cis: Not used: the table is computed.
        interleaved: Whether the elements of a pair are adjacent.

    Raises:
        ValueError: The head's size is odd, or less than 4.
    """

    inv_freq: TensorValue | None
    """The angle of each pair for one position, float32 ``[head_dim / 2]``; None before `maybe_update_freqs`."""

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
        """Stages the frequencies for some positions: original ones, or scaled ones where a position is beyond them.

        Args:
            position_ids: The positions of all tokens, integers of any rank.
        """
        positions = ops.reshape(TensorValue(position_ids), [-1])
        length = ops.cast(ops.max(positions, axis=0) + 1, DType.float32)
        size = self._rotated
        longest = float(self.max_seq_len)
        growth = ops.log(ops.max(length, longest) / longest) * (size / (size - 2))
        exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
        device = positions.device
        original = ops.constant(self._inv_freqs(), DType.float32, device)
        scaled = original * ops.exp(-growth * ops.constant(exponents, DType.float32, device))
        self.inv_freq = ops.where(ops.greater(length, longest), scaled, original)

    def freqs_cis_base(self) -> TensorValue:
        """Cosines and sines by the current frequencies, float32 ``[max_seq_len * 2, head_dim / 2, 2]``."""
        if self.inv_freq is None:
            return super().freqs_cis_base()
        positions = ops.range(
            0, self._rows, 1, out_dim=self._rows, dtype=DType.int64, device=self.inv_freq.device
        )
        angles = ops.unsqueeze(ops.cast(positions, DType.float32), 1) * ops.unsqueeze(
            self.inv_freq, 0
        )
        return ops.stack([ops.cos(angles), ops.sin(angles)], axis=-1)


class LongRoPERotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with LongRoPE scaling, as Phi-3.5 has it.

    The table has the short factors up to the original length, the long factors from there on.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence.
        head_dim: The size of a head.
        _freqs_cis: The table, if it is computed already.
        interleaved: Whether the elements of a pair are adjacent.
        scaling_params: The factors.

    Raises:
        ValueError: The number of factors differs from the number of pairs.
    """

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
        super().__init__(dim, n_heads, theta, max_seq_len, head_dim, _freqs_cis, interleaved)
        self.scaling_params = scaling_params
        if scaling_params is not None:
            pairs = self._rotated // 2
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
        short, long = (
            inv_freqs / np.asarray(f, np.float32) for f in (p.short_factor, p.long_factor)
        )
        return np.where(positions < p.original_max_position, positions * short, positions * long)

    def _stretch(self) -> float:
        p = self.scaling_params
        return 1.0 if p is None else p.max_position_embeddings / p.original_max_position

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The factor of the attention scores: with the correction for the extended length.

        Args:
            user_scale: The scale before the correction; ``1 / sqrt(head_dim)`` by default.
        """
        scale = super().compute_scale(user_scale)
        p = self.scaling_params
        if p is None or self._stretch() <= 1:
            return scale
        # the correction is for queries and for keys
        return scale * (1 + math.log(self._stretch()) / math.log(p.original_max_position))


__getattr__ = earlier_names(__name__)
