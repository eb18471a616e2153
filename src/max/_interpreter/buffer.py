"""Buffers. Ops are evaluated in program order, so chains are ignored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from max._interpreter.core import Array, Frame, InterpreterError, implements
from max._interpreter.shape import slices
from max.mlir import MoOp
from max.mlir.types import ShapedType


@implements("buffer_create")
def _create(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    type_ = op.results[0].type
    assert isinstance(type_, ShapedType)
    fresh = np.empty(frame.shape(type_), type_.dtype.to_numpy())
    # poison: a read of uninitialized elements shows in results
    fresh.reshape(-1).view(np.uint8)[:] = 0x7F
    return fresh


@implements("buffer_load")
def _load(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return operands[0].copy()


@implements("buffer_store")
def _store_all(frame: Frame, op: MoOp, operands: Sequence[Array]) -> None:
    source, buffer = operands
    buffer[...] = source


def _store(destination: Array, source: Array) -> None:
    if destination.shape != source.shape:
        raise InterpreterError(
            f"buffer_store_slice: a source of shape {list(source.shape)} for a part of shape "
            f"{list(destination.shape)}"
        )
    destination[...] = source


@implements("buffer_store_slice_dynamic")
def _store_slice_dynamic(frame: Frame, op: MoOp, operands: Sequence[Array]) -> None:
    source, buffer, *bounds = operands
    _store(buffer[tuple(slice(*map(int, b)) for b in zip(*bounds, strict=True))], source)


@implements("buffer_store_slice")
def _store_slice(frame: Frame, op: MoOp, operands: Sequence[Array]) -> None:
    source, buffer = operands
    _store(buffer[slices(frame, op, buffer.shape)], source)
