"""Buffers: tensors that the graph mutates."""

from __future__ import annotations

from max import mlir
from max.graph import graph as _graph
from max.graph.dim import Dim
from max.graph.ops.creation.constant import constant
from max.graph.ops.movement.shape import broadcast_to, reshape
from max.graph.ops.movement.slicing import SliceIndices, bound_tensors, dynamic_sizes, parse_indices
from max.graph.ops.staging.promotion import is_weak, promote_weak
from max.graph.ops.staging.stage import as_tensor
from max.graph.type import BufferType
from max.graph.value import (
    BufferValue,
    BufferValueLike,
    TensorValue,
    TensorValueLike,
    tensor_of,
)

__all__ = ["buffer_create", "buffer_load", "buffer_store", "buffer_store_slice"]


def buffer_create(type: BufferType, init_value: float | None = None) -> BufferValue:
    """Creates a buffer that lives for one execution of the graph.

    Args:
        type: The type of the buffer.
        init_value: The value of all elements at first; they are not set if None.

    Raises:
        ValueError: A symbol of the shape is not bound in a subgraph; in a graph a later op may bind it.
    """
    graph = _graph.Graph.current
    buffer_type = type.to_mlir()
    graph.check_symbols("buffer_create", buffer_type.shape, may_follow=True)
    buffer = BufferValue(graph.stage("mo.buffer_create", (), {}, (buffer_type,))[0])
    if init_value is not None:
        value = constant(init_value, type.dtype, type.device)
        buffer_store(buffer, broadcast_to(value, type.shape))
    return buffer


def buffer_load(x: BufferValueLike) -> TensorValue:
    """Reads a buffer: a tensor of its elements after all side effects staged so far.

    Args:
        x: The buffer.

    Returns:
        A tensor of the buffer's shape, dtype and device.
    """
    buffer = x if isinstance(x, BufferValue) else BufferValue(x)
    return tensor_of(_graph.Graph.current.stage_effect("mo.buffer_load", (buffer,))[0])


def buffer_store(destination: BufferValueLike, source: TensorValueLike) -> None:
    """Overwrites all elements of a buffer.

    Args:
        destination: The buffer.
        source: A tensor of the buffer's shape, dtype and device, or a number, which fills the buffer.

    Raises:
        ValueError: The shape or the device differs.
        TypeError: The dtype differs.
    """
    buffer = destination if isinstance(destination, BufferValue) else BufferValue(destination)
    value = _source("buffer_store", buffer, source)
    if value.rank == 0 and buffer.rank:
        value = broadcast_to(value, buffer.shape)
    _graph.Graph.current.stage_effect("mo.buffer_store", (value, buffer))


def buffer_store_slice(
    destination: BufferValueLike, source: TensorValueLike, indices: SliceIndices
) -> None:
    """Overwrites a slice of a buffer.

    Args:
        destination: The buffer.
        source: The new elements, of the buffer's dtype; broadcast to the shape of the slice.
        indices: The slice; see `max.graph.ops.slice_tensor`. Sizes that depend on tensor bounds are checked when the
            graph runs.

    Raises:
        ValueError: An index is out of range, or the source does not broadcast to the slice.
        TypeError: An index is of an unsupported type, or the dtype differs.
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
    # the op takes all axes, also those that integers select
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
