"""Ops that move elements without computing, and shapes as values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, InterpreterError, implements
from max.mlir import MoOp
from max.mlir.types import ShapedType


@implements("broadcast_to")
def _broadcast_to(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.broadcast_to(operands[0], frame.shape(op.results[0].type))


@implements("reshape")
def _reshape(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return operands[0].reshape(frame.shape(op.results[0].type))


@implements("rebind")
def _rebind(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    type_ = op.results[0].type
    assert isinstance(type_, ShapedType)
    try:
        frame.bind("rebind", type_, operands[0])
    except InterpreterError as error:
        message: str = op.attr("message")
        raise InterpreterError(f"{error}: {message}" if message else str(error)) from error
    return operands[0]


@implements("transpose")
def _transpose(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.transpose(operands[0], op.attr("perm"))


def slices(frame: Frame, op: MoOp, shape: Sequence[int]) -> tuple[slice, ...]:
    """Converts the bounds of a normalized slice to Python slices.

    Raises:
        IndexError: A bound is out of range.
    """
    bounds = (frame.dims(op.attr(name)) for name in ("start", "stop", "step"))
    slices: list[slice] = []
    for axis, (size, start, stop, step) in enumerate(zip(shape, *bounds, strict=True)):
        # the elements that are read, for steps of either sign
        low, high = (start, stop) if step > 0 else (stop + 1, start + 1)
        if low < high and not (low >= 0 and high <= size):
            raise IndexError(
                f"slice: {start}:{stop}:{step} is out of range for axis {axis} of size {size}"
            )
        if low >= high:
            slices.append(slice(0, 0, 1))
        else:
            slices.append(slice(start, None if stop < 0 else stop, step))
    return tuple(slices)


@implements("slice")
def _slice(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return operands[0][slices(frame, op, operands[0].shape)]


@implements("slice_dynamic")
def _slice_dynamic(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, *bounds = operands
    return x[tuple(slice(*map(int, b)) for b in zip(*bounds, strict=True))]


@implements("concat")
def _concat(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.concatenate(operands, axis=op.attr("axis"))


@implements("pad")
def _pad(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    low, high = frame.dims(op.attr("low")), frame.dims(op.attr("high"))
    (x,) = operands
    value = np.asarray(op.attr("value")).astype(x.dtype)
    padded = np.full([a + n + b for a, n, b in zip(low, x.shape, high, strict=True)], value)
    padded[tuple(slice(a, a + n) for a, n in zip(low, x.shape, strict=True))] = x
    return padded


@implements("range")
def _range(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    start, stop, step = (x.item() for x in operands)
    if step == 0:
        raise InterpreterError("range: the step is 0")
    dtype = operands[0].dtype
    if dtype.kind in "iu":
        count = max(0, -((start - stop) // step))
    else:
        exact = (stop - start) / step
        # neither NaN nor infinite
        if not exact <= 2**62:
            raise InterpreterError(
                f"range: from {start} to {stop} in steps of {step} is not a range"
            )
        count = math.ceil(max(0, exact))
    type_ = op.results[0].type
    assert isinstance(type_, ShapedType)
    # checks the size before memory is allocated
    frame.bind(op.name, type_, np.broadcast_to(np.zeros((), dtype), (count,)))
    wide = {"i": np.int64, "u": np.uint64}.get(dtype.kind, np.float64)
    return (wide(start) + np.arange(count, dtype=wide) * wide(step)).astype(dtype)


@implements("shape_to_tensor")
def _shape_to_tensor(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.array(frame.dims(op.attr("shape")), np.int64)
