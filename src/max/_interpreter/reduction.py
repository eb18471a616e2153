"""Reductions, normalizations, scans and sorts along an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen, widest
from max.mlir import MoOp


def total(x: Array, axis: int) -> Array:
    """The sum along an axis, which stays with size 1; of floats pairwise, in float64."""
    # NumPy adds pairwise only along the contiguous axis
    last = np.ascontiguousarray(np.moveaxis(widest(x), axis, -1))
    return np.moveaxis(np.sum(last, axis=-1, keepdims=True), -1, axis)


@implements("reduce_sum")
def _sum(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return total(operands[0], op.attr("axis"))


@implements("reduce_mean")
def _mean(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    (x,) = operands
    axis: int = op.attr("axis")
    size = x.shape[axis]
    return total(x, axis) // size if x.dtype.kind in "iu" else total(x, axis) / size


@implements("reduce_mul")
def _product(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.prod(widest(operands[0]), axis=op.attr("axis"), keepdims=True)


@implements("reduce_max")
def _max(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.max(widen(operands[0]), axis=op.attr("axis"), keepdims=True)


@implements("reduce_min")
def _min(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.min(widen(operands[0]), axis=op.attr("axis"), keepdims=True)


@implements("argmax")
def _argmax(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.argmax(widen(operands[0]), axis=op.attr("axis"), keepdims=True)


@implements("argmin")
def _argmin(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.argmin(widen(operands[0]), axis=op.attr("axis"), keepdims=True)


@implements("cumsum")
def _cumsum(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    axis: int = op.attr("axis")
    x = np.moveaxis(widest(operands[0]), axis, -1)
    if op.attr("reverse"):
        x = x[..., ::-1]
    # integers wrap; sequential float sums need more bits than float64 to be a reference
    wide = x.dtype if x.dtype.kind in "iub" else np.longdouble
    sums = np.cumsum(x, axis=-1, dtype=wide)
    if op.attr("exclusive"):
        sums = np.concatenate([np.zeros_like(sums[..., :1]), sums[..., :-1]], -1)
        # an empty axis: the concatenation has made one element
        sums = sums[..., : x.shape[-1]]
    if op.attr("reverse"):
        sums = sums[..., ::-1]
    with np.errstate(over="ignore"):
        return np.moveaxis(sums, -1, axis).astype(x.dtype)


@implements("softmax", "logsoftmax")
def _softmax(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    axis: int = op.attr("axis")
    x = widest(operands[0])
    if x.shape[axis] == 0:
        return x
    shifted = x - np.max(x, axis=axis, keepdims=True)
    powers = np.exp(shifted)
    weight = total(powers, axis)
    return powers / weight if op.name == "mo.softmax" else shifted - np.log(weight)


@implements("top_k")
def _top_k(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    (x,) = operands
    axis: int = op.attr("axis")
    k: int = op.attr("k")
    size = x.shape[axis]
    # a stable ascending sort of the reversed axis, read backwards: descending, ties in order
    backwards: Array = np.flip(widen(x), axis)
    order: Array = np.argsort(backwards, axis=axis, kind="stable")
    first: Array = np.arange(k)
    descending: Array = np.flip(size - 1 - order, axis)
    indices: Array = np.take(descending, first, axis=axis)
    return np.take_along_axis(x, indices, axis), indices.astype(np.int64)


@implements("bottom_k")
def _bottom_k(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    (x,) = operands
    axis: int = op.attr("axis")
    order: Array = np.argsort(widen(x), axis=axis, kind="stable")
    k: int = op.attr("k")
    first: Array = np.arange(k)
    indices: Array = np.take(order, first, axis=axis)
    return np.take_along_axis(x, indices, axis), indices.astype(np.int64)


@implements("argsort")
def _argsort(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    axis: int = op.attr("axis")
    x = np.moveaxis(widen(operands[0]), axis, -1)
    if op.attr("ascending"):
        order = np.argsort(x, axis=-1, kind="stable")
    else:
        # as in top_k: the reversed axis, read backwards, keeps ties in order
        order = x.shape[-1] - 1 - np.argsort(x[..., ::-1], axis=-1, kind="stable")[..., ::-1]
    return np.moveaxis(order, -1, axis)


@implements("layer_norm")
def _layer_norm(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, gamma, beta = (widen(v) for v in operands)
    mean = np.mean(x, axis=-1, keepdims=True, dtype=np.float64)
    centered = (x - mean).astype(x.dtype)
    variance = total(centered * centered, -1) / x.dtype.type(x.shape[-1])
    return centered / np.sqrt(variance + x.dtype.type(op.attr("epsilon"))) * gamma + beta


@implements("rms_norm")
def _rms_norm(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, gamma = (widen(v) for v in operands)
    scale = gamma + gamma.dtype.type(op.attr("weight_offset"))
    mean = total(x * x, -1) / x.dtype.type(x.shape[-1])
    normal = x / np.sqrt(mean + x.dtype.type(op.attr("epsilon")))
    if not op.attr("multiply_before_cast"):
        normal = widen(normal.astype(operands[0].dtype))
    return normal * scale
