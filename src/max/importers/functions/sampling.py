"""Samples of images between their elements, at places of a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.importers.errors import Unsupported

__all__ = ["Sampler", "cubic_weight"]


class Sampler:
    """Samples of images at places of a grid, whose corners are -1 and 1.

    Args:
        sizes: The spatial sizes of the images.
        aligned: Whether the corners are the centers of the outer elements, else their outer edges.
        padding: What lies outside: zeros, border or reflection.
    """

    def __init__(self, sizes: Sequence[int], aligned: bool, padding: str) -> None:
        if padding not in ("zeros", "border", "reflection"):
            raise Unsupported(f"padding_mode is {padding!r}")
        self.sizes = list(sizes)
        self.aligned, self.padding = aligned, padding

    def sample(self, x: TensorValue, grid: TensorValue, mode: str) -> TensorValue:
        """The samples of images ``[N, C, …]``: ``[N, C, …]`` with the grid's spatial shape."""
        n = len(self.sizes)
        self.lead = x.shape[:2]
        spatial = grid.shape[1:-1]
        count = math.prod(spatial, start=Dim(1))  # places of a grid
        flat = ops.reshape(grid, [grid.shape[0], count, n])
        places: list[TensorValue] = []
        for axis, size in enumerate(self.sizes):
            # the grid has x before y before z
            coordinate = ops.reshape(flat[:, :, n - 1 - axis], [grid.shape[0], count])
            coordinate = ops.cast(
                coordinate, DType.float64 if x.dtype is DType.float64 else DType.float32
            )
            if self.aligned:
                # -1 and 1 are the centers of the first and the last element
                place = (coordinate + 1.0) * ((size - 1) / 2)
            else:
                # -1 and 1 are the outer edges: half an element beyond the centers
                place = ((coordinate + 1.0) * float(size) - 1.0) * 0.5
            places.append(place)
        self.flat = ops.reshape(x, [*self.lead, math.prod(self.sizes)])
        self.count = count
        match mode:
            case "nearest":
                result = self._pick_elements(
                    [ops.round(self._place_inside(p, a)) for a, p in enumerate(places)]
                )
            case "linear":
                result = self._linear([self._place_inside(p, a) for a, p in enumerate(places)])
            case "cubic":
                result = self._cubic(places)
            case _:
                raise Unsupported(f"the mode is {mode!r}")
        return ops.reshape(ops.cast(result, x.dtype), [*self.lead, *spatial])

    def _place_inside(self, place: TensorValue, axis: int) -> TensorValue:
        """A place outside, moved to where its value comes from."""
        last = float(self.sizes[axis] - 1)
        if self.padding == "border":
            return minimum(maximum(place, 0.0), last)
        if self.padding == "reflection":
            # mirrors stand at the centers or at the outer edges of the last elements
            low, high = (0.0, last) if self.aligned else (-0.5, last + 0.5)
            span = high - low
            if span <= 0:
                return place * 0.0
            distance = ops.abs(place - low)
            # a way there and back is the period
            rest = ops.mod(distance, 2 * span)
            return low + ops.where(rest > span, 2 * span - rest, rest)
        return place

    def _pick_elements(self, places: Sequence[TensorValue]) -> TensorValue:
        """The elements at whole places; 0 outside."""
        inside: TensorValue | None = None
        index: TensorValue | None = None
        for axis, place in enumerate(places):
            last = float(self.sizes[axis] - 1)
            within = ops.logical_and(place >= 0.0, place <= last)
            inside = within if inside is None else ops.logical_and(inside, within)
            # places outside read an element of the border, which is replaced below
            whole = ops.cast(minimum(maximum(place, 0.0), last), DType.int64)
            index = whole if index is None else index * self.sizes[axis] + whole  # of a flat image
        assert index is not None and inside is not None
        shape = [self.lead[0], self.lead[1], self.count]
        rows = ops.broadcast_to(ops.unsqueeze(index, 1), shape)
        values = ops.gather_nd(self.flat, ops.unsqueeze(rows, -1), 2)
        if self.padding != "zeros":
            return values
        return ops.where(ops.unsqueeze(inside, 1), values, 0.0)

    def _linear(self, places: Sequence[TensorValue]) -> TensorValue:
        lows = [ops.floor(place) for place in places]
        total: TensorValue | None = None
        # the neighbors of a place, each with the product of its closeness along the axes
        for corner in np.ndindex(*[2] * len(places)):
            weight: TensorValue | None = None
            at: list[TensorValue] = []
            for place, low, step in zip(places, lows, corner, strict=True):
                at.append(low + float(step))
                part = 1.0 - ops.abs(place - at[-1])
                weight = part if weight is None else weight * part
            assert weight is not None
            part = self._pick_elements(at) * ops.cast(ops.unsqueeze(weight, 1), self.flat.dtype)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _cubic(self, places: Sequence[TensorValue]) -> TensorValue:
        if len(places) != 2:
            raise Unsupported("cubic samples are of images with two spatial axes")
        lows = [ops.floor(place) for place in places]
        total: TensorValue | None = None
        # taps at -1, 0, 1 and 2 from the element before the place
        for corner in np.ndindex(4, 4):
            at = [low + float(step - 1) for low, step in zip(lows, corner, strict=True)]
            weight: TensorValue | None = None
            for place, tap in zip(places, at, strict=True):
                part = cubic_weight(ops.abs(place - tap))
                weight = part if weight is None else weight * part
            assert weight is not None
            # weights are of the taps as they lie, values of where they come from
            moved = [self._place_inside(tap, axis) for axis, tap in enumerate(at)]
            part = self._pick_elements(moved) * ops.cast(ops.unsqueeze(weight, 1), self.flat.dtype)
            total = part if total is None else total + part
        assert total is not None
        return total


def cubic_weight(d: TensorValue, a: float = -0.75) -> TensorValue:
    """The weight of an element at a distance of at most 2, in cubic interpolation."""
    near = ((a + 2) * d - (a + 3)) * d * d + 1.0
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return ops.where(d <= 1.0, near, far)
