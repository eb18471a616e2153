"""The cases of resizing with coordinate modes, of regions of images, and of boxes, against NumPy in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from max.graph import ops
from tests.ops.case import Array, OpCase

ROUNDINGS: tuple[Callable[[Any], Any], ...] = (
    lambda v: np.ceil(v - 0.5),
    lambda v: np.floor(v + 0.5),
    np.floor,
    np.ceil,
)


def positions(old: int, new: int, mode: int) -> Array:
    """Where the new elements of an axis lie, as ONNX's Resize defines it."""
    i = np.arange(new)
    if mode == 1:
        return i * (old - 1) / max(new - 1, 1)
    if mode == 2:
        return i * old / new
    if mode == 3 and new == 1:
        return np.zeros(1)
    return ((2 * i + 1) * old - new) / (2 * new)


def resize_axis(
    x: Array, axis: int, new: int, weights: Callable[[float, int, int], Array]
) -> Array:
    """Weighted sums along an axis, the weights of each new element from its index."""
    old = x.shape[axis]
    matrix = np.array([weights(i, old, new) for i in range(new)]).reshape(new, old)
    return np.moveaxis(np.tensordot(matrix, np.moveaxis(x, axis, 0), 1), 0, axis)


def nearest_weights(mode: int, rounding: int) -> Any:
    def weights(i: int, old: int, new: int) -> Array:
        at = int(np.clip(ROUNDINGS[rounding](positions(old, new, mode)[i]), 0, old - 1))
        return np.eye(old)[at]

    return weights


def linear_weights(mode: int, antialias: bool) -> Any:
    def weights(i: int, old: int, new: int) -> Array:
        at = positions(old, new, mode)[i]
        reach = max(old / new, 1) if antialias else 1
        at = at if antialias else np.clip(at, 0, old - 1)
        row = np.maximum(0, 1 - np.abs(np.arange(old) - at) / reach)
        return row / row.sum()

    return weights


def _resized(weights: Any, size: tuple[int, ...]) -> Callable[[Array], Array]:
    def reference(x: Array) -> Array:
        result = x.astype(np.float64)
        for axis, new in enumerate(size, start=x.ndim - len(size)):
            result = resize_axis(result, axis, new, weights)
        return result.astype(x.dtype)

    return reference


def _resize_case(op: str, mode: int, other: int, size: tuple[int, ...], **options: Any) -> OpCase:
    linear = op == "resize_linear"
    weights = linear_weights(mode, bool(other)) if linear else nearest_weights(mode, other)
    return OpCase(
        f"{op}_{mode}_{other}_{len(size)}",
        lambda x: getattr(ops, op)(x, [*x.shape[: x.rank - len(size)], *size], mode, other),
        _resized(weights, size),
        options.pop("shape", ("n", 2, "h", "w")),
        scale=4.0,
        sizes=(1, 2, 5, 11),
        **options,
    )


# tuples of shapes: one operand each
RESAMPLED = (
    *(
        _resize_case(
            "resize_linear", mode, antialias, size, shape=(("n", 2, "h", "w"),), dtypes=types
        )
        for mode, antialias, size, types in (
            (0, 0, (7, 3), ("float32", "float64", "bfloat16")),
            (0, 1, (4, 3), ("float32", "float16")),
            (1, 0, (7, 1), ("float32",)),
            (1, 1, (3, 16), ("float32",)),
            (2, 0, (4, 13), ("float32",)),
            (3, 0, (1, 8), ("float64",)),
            (0, 0, (5, 4, 3), ("float32",)),
        )
    ),
    *(
        _resize_case(
            "resize_nearest", mode, rounding, (7, 4), shape=(("n", 2, "h", "w"),), dtypes=types
        )
        for mode, types in (
            (0, ("float32", "uint8")),
            (1, ("int64",)),
            (2, ("float32",)),
            (3, ("bfloat16",)),
        )
        for rounding in range(4)
    ),
    _resize_case("resize_nearest", 3, 1, (1,), shape=(("n",),), dtypes=("int32",)),
)


def _bins(low: float, high: float, bins: int, samples: int, aligned: bool) -> list[list[float]]:
    size = high - low if aligned else max(high - low, 1.0)
    count = samples or max(math.ceil(size / bins), 0)
    return [
        [low + (i + (p + 0.5) / count) * size / bins for p in range(count)] for i in range(bins)
    ]


def _corners(position: float, size: int) -> list[tuple[int, float]] | None:
    if not -1 <= position <= size:
        return None
    position = max(position, 0)
    low = min(int(position), size - 1)
    return [(low, 1 - (position - low)), (min(low + 1, size - 1), position - low)]


def roi_align(scale: float, samples: int, aligned: bool, mode: str) -> Callable[..., Array]:
    """RoIAlign sample by sample, to 3 x 2 bins."""

    def reference(x: Array, rois: Array) -> Array:
        out = np.zeros((len(rois), 3, 2, x.shape[3]))
        for m, row in enumerate(rois):
            image = int(row[0])
            left, top, right, bottom = (v * scale - (0.5 if aligned else 0) for v in row[1:])
            rows = _bins(top, bottom, 3, samples, aligned)
            columns = _bins(left, right, 2, samples, aligned)
            for i, j in np.ndindex(3, 2):
                values = []
                for y in rows[i]:
                    for z in columns[j]:
                        down, across = _corners(y, x.shape[1]), _corners(z, x.shape[2])
                        parts = [np.zeros(x.shape[3])]
                        if down is not None and across is not None:
                            parts = [x[image, r, c] * v * h for r, v in down for c, h in across]
                        values.append(np.sum(parts, 0) if mode == "AVG" else np.max(parts, 0))
                if values:
                    out[m, i, j] = np.mean(values, 0) if mode == "AVG" else np.max(values, 0)
        return out

    return reference


def _regions(rois: Any) -> Any:
    """Regions from random numbers of 0 to 12: the first column becomes the number of one of two images."""
    return ops.concat([ops.floor(rois[:, :1] / 6.5), rois[:, 1:] - 1.0], axis=1)


def _roi_case(samples: int, aligned: bool, mode: str, dtypes: tuple[str, ...]) -> OpCase:
    run = roi_align(0.75, samples, aligned, mode)
    return OpCase(
        f"roi_align_{samples}_{aligned}_{mode}",
        lambda x, r: ops.roi_align(
            x, _regions(r), 3, 2, 0.75, sampling_ratio=samples, aligned=aligned, mode=mode
        ),
        lambda x, r: run(x, np.concatenate([np.floor(r[:, :1] / 6.5), r[:, 1:] - 1], 1)),
        ((2, "h", "w", "c"), ("m", 5)),
        dtypes,
        fixed={1: ("float64", (0.0, 12.0))},
        sizes=(1, 2, 5, 9),
        scale=8.0,
    )


ROIS = tuple(
    _roi_case(
        samples, aligned, mode, ("float32", "float64") if mode == "AVG" else ("float32", "float16")
    )
    for samples in (0, 2)
    for aligned in (False, True)
    for mode in ("AVG", "MAX")
)


def suppressed(boxes: Array, scores: Array, most: int, overlap: float, least: float) -> Array:
    """Non-maximum suppression box by box."""
    chosen: list[tuple[int, int, int]] = []
    for b, c in np.ndindex(*scores.shape[:2]):
        kept: list[int] = []
        for i in np.argsort(-scores[b, c], kind="stable"):
            if len(kept) == most or not scores[b, c, i] > least:
                break
            if all(_iou(boxes[b, i], boxes[b, j]) <= overlap for j in kept):
                kept.append(int(i))
        chosen += [(b, c, i) for i in kept]
    return np.array(chosen, np.int64).reshape(-1, 3)


def _iou(a: Array, b: Array) -> float:
    (y0, x0, y1, x1), (v0, u0, v1, u1) = (
        (min(p[0], p[2]), min(p[1], p[3]), max(p[0], p[2]), max(p[1], p[3])) for p in (a, b)
    )
    common = max(min(y1, v1) - max(y0, v0), 0) * max(min(x1, u1) - max(x0, u0), 0)
    union = (y1 - y0) * (x1 - x0) + (v1 - v0) * (u1 - u0) - common
    return common / union if union > 0 else 0


SUPPRESSIONS = tuple(
    OpCase(
        f"nms_{most}_{overlap}_{least}",
        lambda b, s, most=most, overlap=overlap, least=least: ops.non_maximum_suppression(
            b, s, most, overlap, least
        ),
        lambda b, s, most=most, overlap=overlap, least=least: suppressed(
            b, s, most, overlap, least
        ),
        (("b", "n", 4), ("b", "c", "n")),
        ("float32", "float64"),
        sizes=(1, 2, 7, 19),
    )
    for most, overlap, least in ((5, 0.3, 0.0), (3, 0.0, -1.0), (19, 0.6, -9.0), (0, 0.5, 0.0))
)

DETECTION = (*RESAMPLED, *ROIS, *SUPPRESSIONS)
