"""Ops that move elements, pick them by index, or make them from nothing."""

from __future__ import annotations

import numpy as np

from max._interpreter.registry import Array, Dims, Result, op
from max.mlir import MoOp


def slices(op: MoOp, dims: Dims) -> tuple[slice, ...]:
    """The NumPy slices of an op with the attributes ``start``, ``stop`` and ``step``."""
    bounds = zip(dims(op.attr("start")), dims(op.attr("stop")), dims(op.attr("step")), strict=True)
    # a negative stop of a negative step means "past the first element", which NumPy writes as None
    return tuple(slice(a, None if b < 0 else b, s) for a, b, s in bounds)


@op("broadcast_to")
def _broadcast_to(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.broadcast_to(args[0], results[0].shape)


@op("reshape")
def _reshape(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return args[0].reshape(results[0].shape)


@op("rebind")
def _rebind(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    if args[0].shape != results[0].shape:
        raise ValueError(
            f"rebind: the shape is {list(args[0].shape)}, expected {list(results[0].shape)}"
            + (f": {op.attr('message')}" if op.attr("message") else "")
        )
    return args[0]


@op("transpose")
def _transpose(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return args[0].transpose(op.attr("perm"))


@op("slice")
def _slice(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return args[0][slices(op, dims)]


@op("slice_dynamic")
def _slice_dynamic(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, *bounds = args
    return x[tuple(slice(*(int(v) for v in b)) for b in zip(*bounds, strict=True))]


@op("concat")
def _concat(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.concatenate(args, axis=op.attr("axis"))


@op("pad")
def _pad(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    amounts = list(zip(dims(op.attr("low")), dims(op.attr("high")), strict=True))
    out = np.full(results[0].shape, op.attr("value"), dtype=results[0].dtype)
    inner = tuple(slice(low, low + n) for (low, _), n in zip(amounts, args[0].shape, strict=True))
    out[inner] = args[0]
    return out


def checked_indices(op: str, indices: Array, size: int) -> Array:
    """Indices counted from the start; negative ones count from the end.

    Raises:
        IndexError: An index is out of range.
    """
    wrong = (indices < -size) | (indices >= size)
    if wrong.any():
        raise IndexError(f"{op}: index {indices[wrong].flat[0]} is out of range for size {size}")
    return np.where(indices < 0, indices.astype(np.int64) + size, indices.astype(np.int64))


@op("gather")
def _gather(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    axis = op.attr("axis")
    return np.take(args[0], checked_indices("gather", args[1], args[0].shape[axis]), axis=axis)


@op("gather_nd")
def _gather_nd(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, indices = args
    batch = op.attr("batch_dims")
    size = indices.shape[-1]
    axes = [checked_indices("gather_nd", indices[..., i], x.shape[batch + i]) for i in range(size)]
    lead = [
        np.arange(n).reshape([-1 if i == j else 1 for j in range(indices.ndim - 1)])
        for i, n in enumerate(x.shape[:batch])
    ]
    return x[tuple(lead + axes)]


@op("scatter")
def _scatter(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, updates, indices = args
    axis = op.attr("axis")
    out = x.copy()
    where = list(np.indices(updates.shape, sparse=True))
    where[axis] = checked_indices("scatter", indices, x.shape[axis])
    out[tuple(where)] = updates
    return out


@op("scatter_nd")
def _scatter_nd(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    x, updates, indices = args
    out = x.copy()
    size = indices.shape[-1]
    out[tuple(checked_indices("scatter_nd", indices[..., i], x.shape[i]) for i in range(size))] = (
        updates
    )
    return out


@op("range")
def _range(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    start, _, step = (a[()] for a in args)
    return start + step * np.arange(results[0].shape[0], dtype=results[0].dtype)


@op("shape_to_tensor")
def _shape_to_tensor(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.array(dims(op.attr("shape")), dtype=np.int64)


@op("transfer")
def _transfer(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return args[0]
