"""Ops on the positions where a mask is true; their number is known only when the graph runs."""

from __future__ import annotations

from max import mlir
from max.dtype import DType
from max.graph import graph
from max.graph.dim import Dim, DimLike
from max.graph.ops.elementwise.binary import not_equal
from max.graph.ops.movement.gather import scatter_nd
from max.graph.ops.movement.shape import broadcast_to, flatten, rebind, reshape
from max.graph.ops.reductions.reduction import sum
from max.graph.ops.staging.promotion import cast_to, is_weak, promote_weak
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.type import DeviceRef
from max.graph.value import TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = ["masked_scatter", "nonzero"]


def nonzero(x: TensorValueLike, out_dim: DimLike) -> TensorValue:
    """The indices of all non-zero elements, in row-major order.

    Args:
        x: The operand.
        out_dim: The number of non-zero elements: a new symbol, or a size, which is checked when the graph runs.

    Returns:
        int64 ``[out_dim, rank]``: one index vector per non-zero element.
    """
    tensor = as_tensor(x)
    rank = tensor.rank
    mask = tensor if tensor.dtype is DType.bool else not_equal(tensor, 0)
    places = _places(mask if rank else reshape(mask, [1]), out_dim)
    # an element of rank 0 has no coordinates
    return places if rank else places[:, :0]


def _places(mask: TensorValue, out_dim: DimLike) -> TensorValue:
    flat = cast_to(flatten(mask) if mask.rank > 1 else mask, DType.int64)
    # the host allocates the result, so it reads the number of its rows
    count = reshape(sum(flat, 0), []).to(DeviceRef.CPU())
    shape = (Dim(out_dim).expr, DimExpr.constant(mask.rank))
    result = mlir.TensorType.get(DType.int64, shape, mask.mlir_type.device)
    return stage("nonzero", (mask, count), None, result)


def masked_scatter(
    input: TensorValueLike, mask: TensorValueLike, updates: TensorValueLike, out_dim: DimLike
) -> TensorValue:
    """Replaces the elements selected by a mask, in row-major order, in a copy of a tensor.

    Args:
        input: The tensor.
        mask: Selects the elements: bool, broadcast to the shape of `input`.
        updates: The new elements in row-major order, of the input's dtype: `out_dim` or more, of which the first
            `out_dim` are used.
        out_dim: The number of selected elements: a new symbol, or a size, which is checked when the graph runs.

    Returns:
        A tensor of the shape and dtype of `input`.

    Raises:
        ValueError: The mask does not broadcast to the shape of `input`, or there are fewer than `out_dim` updates.
        TypeError: The mask is not bool, or the dtype of the updates differs.
    """
    tensor = as_tensor(input)
    where = as_tensor(mask)
    if where.dtype is not DType.bool:
        raise TypeError(f"masked_scatter: the mask is {where.mlir_type.short}, expected bool")
    where = broadcast_to(where.to(tensor.device), tensor.shape)
    if is_weak(updates):
        new = promote_weak("masked_scatter", updates, tensor.dtype, tensor.device)
    else:
        new = as_tensor(updates)
    if new.dtype is not tensor.dtype:
        raise TypeError(
            f"masked_scatter: the updates are {new.mlir_type.short}, the input is "
            f"{tensor.mlir_type.short}; cast one"
        )
    size = Dim(out_dim)
    new = reshape(new, [-1])
    missing = size.expr - new.shape[0].expr
    if missing.is_static and missing.value > 0:
        raise ValueError(
            f"masked_scatter: {new.shape[0]} updates for {size} elements of {tensor.mlir_type.short}"
        )
    places = _places(reshape(where, [-1]), size)
    if missing != 0:
        new = _first(new, size)
    return reshape(scatter_nd(reshape(tensor, [-1]), new, places), tensor.shape)


def _first(updates: TensorValue, count: Dim) -> TensorValue:
    """The first `count` updates; raises at the run if there are fewer."""
    present = Dim(graph.Graph.current.new_symbol("updates"))
    updates = updates[(slice(None, TensorValue(count)), present),]
    return rebind(
        updates, [count], "masked_scatter: fewer updates than elements that the mask selects"
    )
