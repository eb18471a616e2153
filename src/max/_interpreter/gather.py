"""Gather, scatter, nonzero."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, implements, widest
from max.mlir import MoOp


def _check(op: str, indices: Array, size: int) -> Array:
    """Converts indices to int64 in ``[0, size)``.

    Raises:
        IndexError: An index is out of range.
    """
    out_of_range = (indices < -size) | (indices >= size)
    if out_of_range.any():
        raise IndexError(
            f"{op}: index {indices[out_of_range][0]} is out of range for an axis of size {size}"
        )
    wide = indices.astype(np.int64)
    return np.where(wide < 0, wide + size, wide)


@implements("gather")
def _gather(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, indices = operands
    axis: int = op.attr("axis")
    return np.take(x, _check("gather", indices, x.shape[axis]), axis=axis)


def _vectors(op: str, indices: Array, sizes: Sequence[int]) -> list[Array]:
    return [_check(op, indices[..., i], size) for i, size in enumerate(sizes)]


@implements("gather_nd")
def _gather_nd(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, indices = operands
    batch: int = op.attr("batch_dims")
    # batch axes are indexed by themselves
    grids = np.indices(indices.shape[:-1], sparse=True)[:batch]
    depth = indices.shape[-1]
    return x[(*grids, *_vectors("gather_nd", indices, x.shape[batch : batch + depth]))]


@implements("scatter")
def _scatter(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, updates, indices = operands
    axis: int = op.attr("axis")
    # every other axis is indexed by itself
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = _check("scatter", indices, x.shape[axis])
    result = x.copy()
    result[tuple(places)] = updates
    return result


@implements("scatter_nd")
def _scatter_nd(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, updates, indices = operands
    result = x.copy()
    result[tuple(_vectors("scatter_nd", indices, x.shape[: indices.shape[-1]]))] = updates
    return result


_REDUCTIONS = {"add": np.add, "max": np.maximum, "min": np.minimum, "mul": np.multiply}


def _reduce_updates(op: MoOp, x: Array, places: Sequence[Array], updates: Array) -> Array:
    """Combines updates with elements of a copy, in float64 for floats; equal indices combine all their updates."""
    result = widest(x).copy()
    _REDUCTIONS[op.attr("reduction")].at(result, tuple(places), widest(updates))
    return result


@implements("scatter_reduce")
def _scatter_reduce(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, updates, indices = operands
    axis: int = op.attr("axis")
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = _check("scatter", indices, x.shape[axis])
    return _reduce_updates(op, x, places, updates)


@implements("scatter_nd_reduce")
def _scatter_nd_reduce(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x, updates, indices = operands
    places = _vectors("scatter_nd", indices, x.shape[: indices.shape[-1]])
    return _reduce_updates(op, x, places, updates)


@implements("nonzero")
def _nonzero(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.argwhere(operands[0])
