"""Rotary position embedding (https://arxiv.org/abs/2104.09864).

A head's elements are taken in pairs; pair i of the token at position p is rotated by the angle
``p * inv_freq[i]``. A pair is two adjacent elements (``interleaved``), or elements i and ``i + head_dim / 2`` as in
Hugging Face checkpoints. Tables of cosines and sines are computed here in float32, as in training, and are constants of
the graph.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import DeviceRef, Dim, DimLike, TensorValue, TensorValueLike, ops
from max.nn.kernels.rope import rotate_pairs
from max.nn.layer import Module

__all__ = ["Floats", "RotaryEmbedding", "rotate_positions"]


Floats = npt.NDArray[np.float32]


class RotaryEmbedding(Module):
    """Rotates heads by the positions of their tokens.

    Args:
        dim: The model's hidden size.
        n_heads: The number of query heads.
        theta: The base of the frequencies.
        max_seq_len: The longest sequence; the table has ``2 * max_seq_len`` rows.
        head_dim: The size of a head; ``dim // n_heads`` by default.
        _freqs_cis: A precomputed table.
        interleaved: Whether the two elements of a rotated pair are adjacent.

    Raises:
        ValueError: The head's size is odd.
    """

    __module__ = "max.nn.rotary_embedding"

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
    """Whether the two elements of a rotated pair are adjacent."""

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
        if self._rotated_dim % 2:
            raise ValueError(
                f"{type(self).__name__}: heads of {self._rotated_dim} elements cannot be taken in pairs"
            )

    @property
    def _rotated_dim(self) -> int:
        """The number of rotated elements of a head."""
        return self.head_dim

    @property
    def _rows(self) -> int:
        """The number of positions in the table."""
        return 2 * self.max_seq_len

    def _inv_freqs(self) -> Floats:
        """The frequency of each pair: its angle at position 1."""
        # float32 on purpose: checkpoints were trained with the roundings of these steps
        exponents = np.arange(0, self._rotated_dim, 2, dtype=np.float32) / np.float32(
            self._rotated_dim
        )
        return (np.float32(1.0) / np.float32(self.theta) ** exponents).astype(np.float32)

    def _angles(self) -> Floats:
        """Angles ``[2 * max_seq_len, head_dim / 2]``."""
        positions = np.arange(self._rows, dtype=np.float32)
        return positions[:, None] * self._inv_freqs()[None, :]

    def _magnitude(self) -> float:
        """The factor that multiplies cosines and sines."""
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
            # a constant of every graph that uses it: it is shared, not copied
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
        """`freqs_cis_base` in the layout of the attention kernels: ``[max_seq_len * 2, head_dim]``."""
        base = self.freqs_cis_base()
        if base.rank == 2:
            return base
        # cosine and sine of a pair are neighbors
        return ops.reshape(base, [base.shape[0], base.shape[1] * base.shape[2]])

    def compute_scale(self, user_scale: float | None = None) -> float:
        """The scale of the attention scores.

        Args:
            user_scale: The scale; ``1 / sqrt(head_dim)`` by default.
        """
        return user_scale if user_scale is not None else math.sqrt(1.0 / self.head_dim)

    def __call__(
        self,
        x: TensorValue,
        start_pos: TensorValue | None = None,
        seq_len: DimLike | None = None,
    ) -> TensorValue:
        """Rotates the heads; computed in float32.

        Args:
            x: ``[batch, seq_len, heads, head_dim]``.
            start_pos: The position of the first token, an integer scalar; 0 by default.
            seq_len: The number of tokens; that of `x` by default.

        Raises:
            ValueError: `x` has another rank or head size.
        """
        if x.rank != 4 or x.shape[-1] != self._rotated_dim:
            raise ValueError(
                f"{type(self).__name__}: the input is {x!r}, expected [batch, seq_len, heads, "
                f"{self._rotated_dim}]"
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
        length: The number of tokens; by default that of `x`.
        interleaved: Whether the two elements of a rotated pair are adjacent; otherwise they are half a head apart.
    """
    x, base = TensorValue(x), TensorValue(base)
    length = x.shape[1] if length is None else length
    half = base.shape[1]
    # the host slices the table, so it needs the position
    first_row = ops.cast(TensorValue(start), DType.int64).to(DeviceRef.CPU())
    # [length, head_dim / 2, 2]
    rows = ops.slice_tensor(base, [(slice(first_row, first_row + TensorValue(length)), length)])
    # [1, length, 1, half] broadcasts over the batch and the heads
    cos, sin = (ops.reshape(rows[:, :, i], [1, length, 1, half]) for i in (0, 1))
    heads = ops.cast(x, DType.float32)
    result = rotate_pairs(heads, cos, sin, interleaved)
    return ops.cast(result, x.dtype)
