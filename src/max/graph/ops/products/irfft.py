"""Inverse Fourier transforms."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from max.graph.ops.creation.constant import constant
from max.graph.ops.movement.concat import stack
from max.graph.ops.movement.shape import broadcast_to
from max.graph.ops.staging.stage import as_tensor, normalize_axis, stage
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["Normalization", "irfft"]


class Normalization(StrEnum):
    """The scale of an inverse transform of length n, with NumPy's names."""

    BACKWARD = "backward"
    """1 / n."""
    ORTHO = "ortho"
    """1 / sqrt(n)."""
    FORWARD = "forward"
    """1."""


def irfft(
    input_tensor: TensorValueLike,
    n: int | None = None,
    axis: int = -1,
    normalization: Normalization | str = Normalization.BACKWARD,
    input_is_complex: bool = False,
    buffer_size_mb: int = 512,
) -> TensorValue:
    """The inverse Fourier transform with a real result, as ``numpy.fft.irfft``.

    Args:
        input_tensor: The first ``n // 2 + 1`` elements of the spectrum along `axis`; further elements are ignored,
            missing ones are 0.
        n: The size of the result along `axis`; by default ``2 * (size - 1)``.
        axis: The axis; negative counts from the last.
        normalization: The scale; see `Normalization`.
        input_is_complex: Whether the spectrum has a further last axis of size 2, real and imaginary part, which
            `axis` does not count. Otherwise the spectrum is real.
        buffer_size_mb: Workspace in MB on devices that need one; CPUs ignore it.

    Returns:
        A tensor of the spectrum's dtype and (real) shape, with size n along `axis`.

    Raises:
        ValueError: The axis is out of range, the last axis of a complex spectrum is not of size 2, n is less than 1, n
            is None and the size is symbolic, or the normalization is unknown.
        TypeError: The spectrum is not of a floating-point type, or n is not an int.
    """
    x = as_tensor(input_tensor)
    if not x.dtype.is_float():
        raise TypeError(f"irfft: the input is {x.mlir_type.short}, expected a floating-point type")
    if input_is_complex and (x.rank == 0 or x.shape[-1] != 2):
        raise ValueError(
            f"irfft: the input is {x.mlir_type.short}, expected a last axis of size 2: real and imaginary part"
        )
    if buffer_size_mb < 1:
        raise ValueError(f"irfft: buffer_size_mb is {buffer_size_mb}, expected 1 or more")
    rank = x.rank - 1 if input_is_complex else x.rank
    index = normalize_axis("irfft", axis, rank)
    if n is None:
        size = x.mlir_type.shape[index]
        if not size.is_static:
            raise ValueError(f"irfft: axis {axis} of {x.mlir_type.short} is symbolic; say n")
        n = 2 * (size.value - 1)
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"irfft: n is {n!r}, expected an int")
    if n < 1:
        raise ValueError(f"irfft: n is {n}, expected 1 or more, for {x.mlir_type.short}")
    # the n-th roots of unity, computed in float64
    angles = 2 * np.pi * np.arange(n) / n
    roots = constant(np.stack([np.cos(angles), np.sin(angles)], -1), x.dtype, x.device)
    attrs = {
        "n": n.__index__(),
        "axis": index,
        "normalization": Normalization(normalization).value,
    }
    # a real spectrum has imaginary parts of 0
    if not input_is_complex:
        x = stack([x, broadcast_to(constant(0, x.dtype, x.device), x.shape)], -1)
    return stage("irfft", (x, roots), attrs)
