"""Fourier transforms as matrix products, windows, mel weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.indexing import pad_axes
from max.importers.node import Node
from max.importers.onnx.element_types import dtype_of
from max.importers.onnx.table import op

Array = npt.NDArray[Any]
_LARGEST = 1 << 14
"""The largest transform: its matrix has as many rows and columns."""


def _roots(size: int, rows: int, sign: float, dtype: DType) -> tuple[TensorValue, TensorValue]:
    """Real and imaginary parts of the matrix of a transform, ``[rows, size]``: exact angles, rounded once."""
    if size > _LARGEST:
        raise Unsupported(f"a transform of {size} elements; at most {_LARGEST}")
    # whole turns are left out as integers, before they are rounded
    steps = np.outer(np.arange(rows), np.arange(size)) % max(size, 1)
    angles = sign * 2 * math.pi * steps / max(size, 1)
    real, imaginary = np.cos(angles), np.sin(angles)
    return ops.constant(real.astype(dtype.to_numpy())), ops.constant(
        imaginary.astype(dtype.to_numpy())
    )


def transform(x: TensorValue, rows: int, sign: float) -> TensorValue:
    """The transform along the axis before the last; the last has real parts, or real and imaginary parts."""
    size = int(x.shape[-2])
    real, imaginary = _roots(size, rows, sign, x.dtype)
    y = ops.matmul(real, x)
    z = ops.matmul(imaginary, x)
    # a real signal: the imaginary part of x is 0
    if x.shape[-1] == 1:
        return ops.concat([y, z], -1)
    # the complex product (real + i imaginary) (x0 + i x1)
    first = y[..., 0:1] - z[..., 1:2]
    second = y[..., 1:2] + z[..., 0:1]
    return ops.concat([first, second], -1)


@op("DFT")
def dft(node: Node) -> TensorValue:
    x = node.tensor(0)
    if node.version >= 20:
        axis = int(node.number(2)) if node.has(2) else -2
    else:
        axis = node.attr("axis", 1)
    axis = node.checked_axis(axis, x.rank)
    length = int(node.number(1)) if node.has(1) else node.static(x.shape[axis])
    inverse, onesided = bool(node.attr("inverse", 0)), bool(node.attr("onesided", 0))
    if onesided and inverse:
        return _real_inverse(x, axis, length, node.has(1))
    # the transformed axis before that of the parts
    order = [i for i in range(x.rank - 1) if i != axis] + [axis, x.rank - 1]
    moved = ops.permute(x, order)
    size = node.static(moved.shape[-2])
    if length != size:
        pairs = [(0, 0)] * moved.rank
        pairs[-2] = (0, length - size)  # a negative amount cuts
        moved = pad_axes(moved, pairs, "constant", 0)
    # the other half of a real signal's spectrum is the conjugate of this one
    rows = length // 2 + 1 if onesided else length
    y = transform(moved, rows, 1.0 if inverse else -1.0)
    if inverse:
        y = y / float(length)
    return ops.permute(y, [order.index(i) for i in range(x.rank)])


def _real_inverse(x: TensorValue, axis: int, length: int, given: bool) -> TensorValue:
    """The real signal of the first half of its spectrum."""
    size = length if given else 2 * (length - 1)
    return ops.unsqueeze(ops.irfft(x, size, axis, input_is_complex=x.shape[-1] == 2), -1)


@op("STFT")
def stft(node: Node) -> TensorValue:
    signal = node.tensor(0)
    step = int(node.number(1))
    window = node.tensor(2) if node.has(2) else None
    length = int(node.number(3)) if node.has(3) else None
    if length is None:
        if window is None:
            raise Unsupported("has neither a window nor the length of frames")
        length = node.static(window.shape[0], 2)
    if signal.rank == 2:
        signal = ops.unsqueeze(signal, -1)
    size = node.static(signal.shape[1])
    frames = 1 + (size - length) // step
    places = np.arange(frames)[:, None] * step + np.arange(length)  # [frames, length]
    parts = ops.gather(signal, ops.constant(places.astype(np.int64)), 1)
    if window is not None:
        parts = parts * ops.reshape(window, [length, 1])
    rows = length // 2 + 1 if node.attr("onesided", 1) else length
    return transform(parts, rows, -1.0)


_WINDOWS: dict[str, tuple[float, ...]] = {
    "HannWindow": (0.5, 0.5),
    "HammingWindow": (25 / 46, 21 / 46),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@op(*_WINDOWS)
def window(node: Node) -> Any:
    size = int(node.number(0))
    dtype = dtype_of(node.attr("output_datatype", 1)).to_numpy()
    span = size if node.attr("periodic", 1) else size - 1
    places = np.arange(size) * (2 * math.pi / span) if span else np.zeros(size)
    values = np.zeros(size)
    for number, weight in enumerate(_WINDOWS[node.op]):
        values += (-1) ** number * weight * np.cos(number * places)
    return values.astype(dtype)


@op("MelWeightMatrix")
def mel_weight_matrix(node: Node) -> Any:
    bins, length, rate = (int(node.number(index)) for index in range(3))
    low, high = float(node.number(3)), float(node.number(4))
    spectrum = length // 2 + 1

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    points = mel(low) + np.arange(bins + 2) * (mel(high) - mel(low)) / (bins + 2)
    hertz = 700 * (10 ** (points / 2595) - 1)
    places = ((length + 1) * hertz) // rate
    places = places.astype(np.int64)
    matrix = np.zeros((spectrum, bins))
    for index in range(bins):
        first, middle, last = places[index : index + 3]
        if middle == first:
            matrix[middle, index] = 1
        else:
            for place in range(first, middle + 1):
                matrix[place, index] = (place - first) / (middle - first)
        if last > middle:
            for place in range(middle, last):
                matrix[place, index] = (last - place) / (last - middle)
    return matrix.astype(dtype_of(node.attr("output_datatype", 1)).to_numpy())
