"""Buffers: tensors that the graph changes in place."""

from __future__ import annotations

from max import mlir
from max.graph import graph as _graph
from max.graph.dim import Dim
from max.graph.ops._stage import as_tensor
from max.graph.ops.promotion import is_weak, promote_weak
from max.graph.ops.shape import broadcast_to, reshape
from max.graph.ops.slicing import SliceIndices, bound_tensors, dynamic_sizes, parse_indices
from max.graph.type import BufferType
from max.graph.value import (
    BufferValue,
    BufferValueLike,
    TensorValue,
    TensorValueLike,
    tensor_of,
)

__all__ = ["buffer_create", "buffer_load", "buffer_store", "buffer_store_slice"]


def buffer_create(type: BufferType) -> BufferValue:
    """A new buffer, whose elements are not set. It lives as long as one run of the graph.

    Args:
        type: The type of the buffer.

    Raises:
        ValueError: A symbolic dimension is not one of the graph.
    """
    graph = _graph.Graph.current
    buffer_type = type.to_mlir()
    graph.check_symbols("buffer_create", buffer_type.shape)
    return BufferValue(graph.stage("mo.buffer_create", (), {}, (buffer_type,))[0])


def buffer_load(x: BufferValueLike) -> TensorValue:
    """The elements of a buffer at this point, as a tensor.

    Args:
        x: The buffer.
    """
    buffer = x if isinstance(x, BufferValue) else BufferValue(x)
    return tensor_of(_graph.Graph.current.stage_effect("mo.buffer_load", (buffer,))[0])


def buffer_store(destination: BufferValueLike, source: TensorValueLike) -> None:
    """Replaces all elements of a buffer.

    Args:
        destination: The buffer.
        source: The new elements, of the buffer's shape; a number fills the buffer.

    Raises:
        ValueError: The shape or the device does not fit.
        TypeError: The dtype does not fit.
    """
    buffer = destination if isinstance(destination, BufferValue) else BufferValue(destination)
    value = _source("buffer_store", buffer, source)
    if value.rank == 0 and buffer.rank:
        value = broadcast_to(value, buffer.shape)
    _graph.Graph.current.stage_effect("mo.buffer_store", (value, buffer))


def buffer_store_slice(
    destination: BufferValueLike, source: TensorValueLike, indices: SliceIndices
) -> None:
    """Replaces part of the elements of a buffer.

    Args:
        destination: The buffer.
        source: The new elements; broadcast to the shape of the part.
        indices: Which part; see `max.graph.ops.slice_tensor`. With tensors as bounds the sizes are checked when the
            graph runs.

    Raises:
        ValueError: An index is out of range, or the shape does not fit.
        TypeError: An index or the dtype does not fit.
    """
    buffer = destination if isinstance(destination, BufferValue) else BufferValue(destination)
    shape = buffer.mlir_type.shape
    index = parse_indices("buffer_store_slice", shape, indices)
    static = index.is_static
    sizes = index.sizes("buffer_store_slice", shape) if static else dynamic_sizes(shape, index)
    expected = [Dim.from_mlir(dim) for dim in index.result_shape(sizes)]
    value = _source("buffer_store_slice", buffer, source)
    try:
        value = broadcast_to(value, expected)
    except ValueError as error:
        raise ValueError(
            f"buffer_store_slice: the source is {value!r}, the part has shape {mlir.dims_text(sizes)}"
        ) from error
    value = reshape(value, [Dim.from_mlir(dim) for dim in sizes])
    graph = _graph.Graph.current
    if static:
        graph.stage_effect("mo.buffer_store_slice", (value, buffer), index.attrs)
    else:
        operands = (value, buffer, *bound_tensors(index))
        graph.stage_effect("mo.buffer_store_slice_dynamic", operands)


def _source(op: str, buffer: BufferValue, source: TensorValueLike) -> TensorValue:
    if is_weak(source):
        return promote_weak(op, source, buffer.dtype, buffer.device)
    value = as_tensor(source)
    if value.dtype is not buffer.dtype:
        raise TypeError(
            f"{op}: the source is {value.dtype.name}, the buffer is {buffer.dtype.name}; cast the "
            "source"
        )
    return value
