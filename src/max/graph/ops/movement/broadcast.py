"""Broadcasting to a shape of dims, or to the elements of a shape tensor."""

from __future__ import annotations

from max.dtype import DType
from max.graph import graph as _graph
from max.graph.dim import Dim
from max.graph.ops.creation.range import range as range_
from max.graph.ops.elementwise.binary import minimum
from max.graph.ops.movement import shape as _shape
from max.graph.ops.movement.gather import gather
from max.graph.ops.movement.slicing import slice_tensor
from max.graph.ops.staging.stage import as_tensor, stage_declared
from max.graph.shape import Shape, ShapeLike
from max.graph.type import DeviceRef
from max.graph.value import StrongTensorValueLike, TensorValue

__all__ = ["broadcast_to"]


def broadcast_to(
    x: StrongTensorValueLike,
    shape: TensorValue | ShapeLike,
    out_dims: ShapeLike | None = None,
) -> TensorValue:
    """Broadcasts a tensor by NumPy's rules.

    Args:
        x: The tensor.
        shape: The shape of the result: dims, or a tensor of integers of rank 1 that is read when the graph runs.
        out_dims: The dims of the result if `shape` is a tensor. The elements of `shape` must equal them, which is
            checked when the graph runs; a new symbol is bound to its element.

    Returns:
        A tensor of shape `shape`, or `out_dims`, and of x's dtype.

    Raises:
        ValueError: A dim of `x` is neither 1 nor equal, a symbol is not bound in the graph, or `shape` is a tensor
            and `out_dims` is None or of another length.
        TypeError: `shape` is a tensor, but not of integers, or not of rank 1.
    """
    if isinstance(shape, TensorValue):
        if out_dims is None:
            raise ValueError("broadcast_to: a shape that is a tensor needs out_dims")
        return _by_tensor(as_tensor(x), shape, Shape(out_dims))
    if out_dims is not None:
        raise ValueError("broadcast_to: out_dims is for a shape that is a tensor")
    return _shape.broadcast_to(x, shape)


def _by_tensor(x: TensorValue, shape: TensorValue, out_dims: Shape) -> TensorValue:
    if not shape.dtype.is_integral() or shape.rank != 1:
        raise TypeError(f"broadcast_to: the shape is {shape!r}, expected integers of rank 1")
    rank = len(out_dims)
    if shape.shape[0] != rank:
        raise ValueError(
            f"broadcast_to: the shape has {shape.shape[0]} elements, out_dims {rank}: {out_dims}"
        )
    if x.rank > rank:
        raise ValueError(f"broadcast_to: {x!r} has more axes than the shape, which has {rank}")
    graph = _graph.Graph.current
    sizes = shape.cast(DType.int64).to(DeviceRef.CPU())
    (sizes,) = stage_declared("check.counts", [sizes], {"what": "broadcast_to: shape"})
    out_sizes = [Dim(graph.new_symbol(f"broadcast_{axis}")) for axis in range(rank)]
    x = _shape.reshape(x, [*[1] * (rank - x.rank), *x.shape])
    single = [dim == 1 for dim in x.shape]
    # an axis that does not broadcast must have the size in the shape tensor: the rebind checks it at run time
    x = _shape.rebind(x, [1 if one else dim for one, dim in zip(single, out_sizes, strict=True)])
    for axis, (one, dim) in enumerate(zip(single, out_sizes, strict=True)):
        size = slice_tensor(sizes, [axis])
        index = range_(0, size, 1, dim, dtype=DType.int64, device=x.device)
        # element 0 of an axis of size 1, as often as the shape says
        x = gather(x, minimum(index, 0) if one else index, axis)
    return _shape.rebind(x, out_dims)
