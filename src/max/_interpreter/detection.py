"""Regions of images, and boxes that overlap, one element at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from max._interpreter.core import Array, Frame, implements, widest
from max.mlir import MoOp


def _bins(low: float, high: float, bins: int, op: MoOp) -> tuple[list[list[float]], int]:
    """The positions of the samples of each bin along an axis, and their number."""
    scale: float = op.attr("spatial_scale")
    samples: int = op.attr("sampling_ratio")
    offset = 0.5 if op.attr("aligned") else 0.0
    start = low * scale - offset
    size = high * scale - offset - start
    if not op.attr("aligned"):
        # as in torchvision: a pixel at least
        size = max(size, 1.0)
    step = size / bins
    if not samples:
        # not `step > 4096`: NaN is an error too
        if not step <= 4096:
            raise ValueError(f"roi_align: a region is {size} pixels long for {bins} bins")
        samples = max(math.ceil(step), 0)
    return [
        [start + i * step + (p + 0.5) * step / samples for p in range(samples)] for i in range(bins)
    ], samples


def _neighbors(position: float, size: int) -> list[tuple[int, float]]:
    """The elements around a position, and their weights; none where it is outside."""
    if not -1 <= position <= size:
        return []
    position = max(position, 0.0)
    low = min(int(position), size - 1)
    weight = position - low
    return [(low, 1 - weight), (min(low + 1, size - 1), weight)]


@implements("roi_align")
def _roi_align(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, rois = widest(operands[0]), widest(operands[1])
    shape = frame.shape(op.results[0].type)
    out = np.zeros(shape)
    for m, (number, left, top, right, bottom) in enumerate(rois.tolist()):
        if not 0 <= number < len(x):
            raise IndexError(f"roi_align: region {m} is of image {number} of {len(x)}")
        rows, down = _bins(top, bottom, shape[1], op)
        columns, across = _bins(left, right, shape[2], op)
        for i, j in product(range(shape[1]), range(shape[2])):
            parts = [
                # a sample outside of the image is 0, also for the maximum
                [x[int(number), r, c] * (v * h) for r, v in vertical for c, h in horizontal]
                or [np.zeros(shape[3])]
                for vertical in (_neighbors(y, x.shape[1]) for y in rows[i])
                for horizontal in (_neighbors(z, x.shape[2]) for z in columns[j])
            ]
            if parts and op.attr("mode") == "AVG":
                out[m, i, j] = sum(sum(part) for part in parts) / (down * across)
            elif parts:
                out[m, i, j] = np.max([np.max(part, 0) for part in parts], 0)
    return out


def _overlap(a: Array, b: Array) -> float:
    """Intersection over union."""
    # the two corners of a box may come in either order
    low = np.maximum(np.minimum(a[:2], a[2:]), np.minimum(b[:2], b[2:]))
    high = np.minimum(np.maximum(a[:2], a[2:]), np.maximum(b[:2], b[2:]))
    common = float(np.prod(np.maximum(high - low, 0)))
    union = sum(float(np.prod(np.abs(box[2:] - box[:2]))) for box in (a, b)) - common
    return common / union if union > 0 else 0.0


@implements("nms")
def _nms(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    boxes, scores = widest(operands[0]), widest(operands[1])
    most, most_overlap, least_score = (operand.item() for operand in operands[2:])
    order = np.full(scores.shape, -1, np.int64)
    for b, c in np.ndindex(*scores.shape[:2]):
        kept: list[int] = []
        candidates = [i for i, score in enumerate(scores[b, c]) if score > least_score]
        # of equal scores, the box of the least index is first
        for i in sorted(candidates, key=lambda i: (-scores[b, c, i], i)):
            if len(kept) < most and all(
                not _overlap(boxes[b, i], boxes[b, j]) > most_overlap for j in kept
            ):
                kept.append(i)
        order[b, c, : len(kept)] = kept
    return order
