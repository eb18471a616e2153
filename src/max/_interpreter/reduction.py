"""Reductions, scans and sorts along an axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen, widest
from max.mlir import MoOp


@implements("reduce_sum")
def _sum(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    (x,) = operands
    return np.sum(widest(x), axis=op.attr("axis"), keepdims=True)


@implements("reduce_mean")
def _mean(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    (x,) = operands
    axis: int = op.attr("axis")
    total = np.sum(widest(x), axis=axis, keepdims=True)
    return total // x.shape[axis] if x.dtype.kind in "iu" else total / x.shape[axis]


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
    total = np.cumsum(x, axis=-1, dtype=x.dtype)
    if op.attr("exclusive"):
        total = np.concatenate([np.zeros_like(total[..., :1]), total[..., :-1]], -1)
        total = total[..., : x.shape[-1]]
    if op.attr("reverse"):
        total = total[..., ::-1]
    return np.moveaxis(total, -1, axis)


@implements("softmax", "logsoftmax")
def _softmax(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    axis: int = op.attr("axis")
    x = widest(operands[0])
    if x.shape[axis] == 0:
        return x
    shifted = x - np.max(x, axis=axis, keepdims=True)
    total = np.sum(np.exp(shifted), axis=axis, keepdims=True)
    return np.exp(shifted) / total if op.name == "mo.softmax" else shifted - np.log(total)


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
