"""Maxima and means over windows of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.ops.elementwise.binary import maximum
from max.graph.ops.staging.stage import stage
from max.importers.errors import Unsupported
from max.importers.functions.convolutions import Pairs
from max.importers.functions.indexing import pad_axes

__all__ = ["Windows", "average_pool", "max_pool", "max_pool_with_places"]


@dataclass(frozen=True)
class Windows:
    """The windows of a pooling op.

    Attributes:
        kernel: The size along each spatial axis.
        strides: The strides.
        dilations: The dilations.
        pairs: The padding before and after each axis.
        static: A size of the operand as a number; it raises an error where the size depends on a symbol.
        ceil: Whether the last window may end behind the operand.
    """

    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pairs: Pairs
    static: Callable[[Dim], int]
    ceil: bool = False

    def check(self, x: TensorValue) -> None:
        """Raises an error if the operand has another number of spatial axes."""
        n = len(self.kernel)
        if x.rank != n + 2:
            raise Unsupported(f"has {n} sizes of windows for an operand of rank {x.rank}")

    def sizes(self, x: TensorValue) -> list[int]:
        """The sizes of the operand's spatial axes."""
        return [self.static(dim) for dim in x.shape[2:]]

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """The number of windows along each axis."""
        found: list[int] = []
        for size, taps, stride, dilation, (low, high) in zip(
            sizes, self.kernel, self.strides, self.dilations, self.pairs, strict=True
        ):
            room = size + low + high - dilation * (taps - 1) - 1
            if room < 0:
                raise Unsupported(f"a window of {taps} elements is larger than an axis of {size}")
            count = (-(-room // stride) if self.ceil else room // stride) + 1
            # a last window that would begin in the padding behind the operand does not count
            if self.ceil and (count - 1) * stride >= size + low:
                count -= 1
            found.append(count)
        return found

    def taps(self, x: TensorValue, sizes: Sequence[int], fill: Any) -> list[TensorValue]:
        """For each element of a window the tensor of that element of all windows."""
        counts = self.counts(sizes)
        pairs: Pairs = []
        for size, count, taps, stride, dilation, (low, _) in zip(
            sizes, counts, self.kernel, self.strides, self.dilations, self.pairs, strict=True
        ):
            # the padding behind ends with the last window: more of it where windows end outside
            end = (count - 1) * stride + dilation * (taps - 1) + 1
            pairs.append((low, end - size - low))
        x = pad_axes(x, [(0, 0), (0, 0), *pairs], "constant", fill)
        parts: list[TensorValue] = []
        for place in np.ndindex(*self.kernel):
            index = [
                slice(p * d, p * d + (count - 1) * s + 1, s)
                for p, d, count, s in zip(place, self.dilations, counts, self.strides, strict=True)
            ]
            parts.append(x[(slice(None), slice(None), *index)])
        return parts

    def attributes(self) -> dict[str, Any]:
        """The attributes of the ops of two spatial axes."""
        # a sequence is an image of height 1
        one = [1] * (2 - len(self.kernel))
        pairs = [*[(0, 0)] * len(one), *self.pairs]
        return {
            "kernel": tuple([*one, *self.kernel]),
            "stride": tuple([*one, *self.strides]),
            "dilation": tuple([*one, *self.dilations]),
            "padding": tuple(amount for pair in pairs for amount in pair),
            "ceil_mode": self.ceil,
        }

    @property
    def is_plain(self) -> bool:
        """Whether the ops of images compute it."""
        return len(self.kernel) <= 2 and all(
            0 <= low <= window // 2 and 0 <= high <= window // 2
            for (low, high), window in zip(self.pairs, self.kernel, strict=True)
        )


def _images(name: str, x: TensorValue, attributes: dict[str, Any]) -> TensorValue:
    """A pooling op of images with channels last."""
    flat = x.rank == 3
    images = ops.unsqueeze(x, 2) if flat else x
    y = stage(name, (ops.permute(images, [0, 2, 3, 1]),), attributes)  # [N, H, W, C]
    y = ops.permute(y, [0, 3, 1, 2])
    return ops.squeeze(y, 2) if flat else y


def _parts(windows: Windows, x: TensorValue) -> list[TensorValue]:
    dtype = x.dtype
    # no element of the padding is a maximum
    low = -math.inf if dtype.is_float() else np.iinfo(dtype.to_numpy()).min
    return windows.taps(x, windows.sizes(x), low)


def max_pool(windows: Windows, x: TensorValue) -> TensorValue:
    """The maxima of windows of images ``[N, C, …]``."""
    windows.check(x)
    if windows.is_plain:
        return _images("max_pool", x, windows.attributes())
    parts = _parts(windows, x)
    result = parts[0]
    for part in parts[1:]:
        result = maximum(result, part)
    return result


def max_pool_with_places(
    windows: Windows, x: TensorValue, column_major: bool = False
) -> tuple[TensorValue, TensorValue]:
    """The maxima of windows of images ``[N, C, …]``, and their places in the operand.

    Args:
        windows: The windows.
        x: The operand.
        column_major: Whether places are counted with the first spatial axis as the fastest.
    """
    windows.check(x)
    parts = _parts(windows, x)
    stacked = ops.stack(parts, 0)  # [taps, N, C, …]
    best, shape = ops.argmax(stacked, 0), parts[0].shape
    places = _places(x, windows, ops.reshape(best, shape), column_major)
    return ops.reshape(ops.max(stacked, axis=0), shape), places


def _places(x: TensorValue, windows: Windows, best: TensorValue, column_major: bool) -> TensorValue:
    """The places of maxima in the operand, counted in its memory's order."""
    sizes = windows.sizes(x)
    counts = windows.counts(sizes)
    order = range(len(sizes)) if column_major else reversed(range(len(sizes)))
    strides = dict.fromkeys(range(len(sizes)), 1)
    total = 1
    for axis in order:
        # the distance of neighbors along the axis, in elements of an image
        strides[axis] = total
        total *= sizes[axis]
    offsets = np.zeros(tuple(windows.kernel), np.int64)
    base = np.zeros(counts, np.int64)
    for axis in range(len(sizes)):
        tap = np.arange(windows.kernel[axis]) * windows.dilations[axis] * strides[axis]
        first = (
            np.arange(counts[axis]) * windows.strides[axis] - windows.pairs[axis][0]
        ) * strides[axis]
        shape = [-1 if other == axis else 1 for other in range(len(sizes))]
        # [kernel]: from the first element of a window to each of its taps
        offsets += tap.reshape(shape)
        # [counts]: the first element of each window, which may lie in the padding
        base += first.reshape(shape)
    inner = ops.gather(ops.constant(offsets.reshape(-1)), best, 0) + ops.constant(base)
    batch, channels = x.shape[:2]
    # places are counted through all images
    image = ops.range(0, batch * channels, 1, dtype=DType.int64, device=x.device) * total
    return inner + ops.reshape(image, [batch, channels, *[1] * len(sizes)])


def average_pool(windows: Windows, x: TensorValue, counts_padding: bool) -> TensorValue:
    """The means of windows of images ``[N, C, …]``.

    Args:
        windows: The windows.
        x: The operand.
        counts_padding: Whether the padding is part of the number of elements.
    """
    windows.check(x)
    if windows.is_plain and x.dtype.is_float():
        attributes = {**windows.attributes(), "count_boundary": counts_padding}
        return _images("avg_pool", x, attributes)
    sizes = windows.sizes(x)
    total, *parts = windows.taps(x, sizes, 0)
    for part in parts:
        total = total + part
    # the elements of each window that count: the product over the axes of those inside
    number = np.ones(windows.counts(sizes))
    for axis, count in enumerate(windows.counts(sizes)):
        low, high = windows.pairs[axis] if counts_padding else (0, 0)
        places = np.arange(count)[:, None] * windows.strides[axis] - windows.pairs[axis][0]
        places = places + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        inside = ((places >= -low) & (places < sizes[axis] + high)).sum(1)
        number = number * inside.reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return total / ops.constant(number.astype(x.dtype.to_numpy()))
