"""Constants and buffers. Calls and custom ops, which need the whole module, are in `evaluate`."""

from __future__ import annotations

import numpy as np

from max._interpreter.movement import slices
from max._interpreter.registry import Array, Dims, Result, op
from max.mlir import MoOp


@op("constant")
def _constant(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    value = op.attr("value")
    return value if isinstance(value, np.ndarray) else value.array


@op("chain_create")
def _chain_create(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> list[Array]:
    return []


@op("buffer_create")
def _buffer_create(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return np.zeros(results[0].shape, results[0].dtype)


@op("buffer_load")
def _buffer_load(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> Array:
    return args[0].copy()


@op("buffer_store")
def _buffer_store(op: MoOp, args: list[Array], results: list[Result], dims: Dims) -> list[Array]:
    args[1][...] = args[0]
    return []


@op("buffer_store_slice")
def _buffer_store_slice(
    op: MoOp, args: list[Array], results: list[Result], dims: Dims
) -> list[Array]:
    args[1][slices(op, dims)] = args[0]
    return []
