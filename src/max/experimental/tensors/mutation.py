"""Writes to elements of eager tensors."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from typing import Any

import numpy as np

from max import driver
from max._errors import AxisError
from max.experimental.programs.lazy_values import Cell
from max.experimental.record import recorder
from max.experimental.tensors.indexing import array_indices, is_advanced
from max.graph import BufferType, BufferValue, Graph, TensorType, TensorValue, ops

__all__ = ["store"]


def store(destination: Any, source: Any, indices: Any) -> None:
    """Replaces elements of a tensor, at once; what was recorded before is computed with the elements before.

    Args:
        destination: An eager tensor.
        source: A tensor, number or array.
        indices: Which elements, see `Tensor.__getitem__`; all of them if None.

    Raises:
        ValueError, TypeError: As for `max.graph.ops.buffer_store_slice`; or read-only memory that a model or an array
            reads.
    """
    cell: Cell = destination._cell
    source_cell: Cell | None = getattr(source, "_cell", None)
    values: Any = source
    selected: tuple[int, ...] | None = None
    if indices is not None:
        if is_advanced(indices):
            indices = tuple([_bound_index(index) for index in array_indices(indices)])
            selected = _selected_shape(cell.type.shape, indices)
        else:
            indices = tuple([_bound_index(index) for index in indices])
    _check(cell, source, source_cell, indices if selected is None else [...], selected)
    # a signal handler must not record readers between the first line of it and the last
    recorder.use_recorder(_write, cell, values, source_cell, indices)


def _write(cell: Cell, values: Any, source_cell: Cell | None, indices: Any) -> None:
    # readers that were recorded before must see the elements before
    recorder.compute([cell] if source_cell is None else [cell, source_cell])
    recorder.compute_all()
    storage = cell.storage
    assert storage is not None
    if source_cell is not None:
        assert source_cell.storage is not None
        values = source_cell.storage.to(driver.CPU()).to_numpy()
    storage._begin_write()
    array = storage.to_numpy() if storage.is_host else storage.to(driver.CPU()).to_numpy()
    where = ... if indices is None else indices
    try:
        # the source may share memory with the destination
        array[where] = np.array(values, array.dtype)
        if not storage.is_host:
            storage.inplace_copy_from(driver.Tensor.from_numpy(array))
    finally:
        cell.drop_copies()


def _bound_index(index: Any) -> Any:
    if isinstance(index, slice):
        return slice(*[_bound_index(bound) for bound in (index.start, index.stop, index.step)])
    if isinstance(index, tuple):
        raise TypeError(
            "store: a tuple of a slice and a dimension names a size; give the slice alone"
        )
    if getattr(index, "_cell", None) is None:
        return index
    if index.rank:
        raise TypeError(f"store: the index {index!r} has rank {index.rank}, expected a number")
    return index.item()


def _selected_shape(shape: tuple[int, ...], indices: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape of the selected elements."""
    try:
        return np.broadcast_to(np.False_, shape)[indices].shape
    except IndexError as error:
        raise AxisError(f"store: {error}") from None


def _check(
    cell: Cell,
    source: Any,
    source_cell: Cell | None,
    indices: Any,
    selected_shape: tuple[int, ...] | None,
) -> None:
    """Stages the write into a graph that is not run, which raises the errors of wrong operands."""
    type_ = cell.type
    shape = type_.shape if selected_shape is None else selected_shape
    types: list[Any] = [BufferType(type_.dtype, shape, type_.device)]
    if source_cell is not None:
        source_type = source_cell.type
        types.append(TensorType(source_type.dtype, source_type.shape, source_type.device))
    graph = Graph("store", input_types=types)
    with graph:
        buffer = BufferValue(graph.inputs[0])
        value = source if source_cell is None else TensorValue(graph.inputs[1])
        if indices is None:
            ops.buffer_store(buffer, value)
        else:
            ops.buffer_store_slice(buffer, value, indices)
