"""The common shape of operands, under NumPy's broadcasting rules."""

from __future__ import annotations

from collections.abc import Sequence

from max import mlir
from max.graph.ops.staging.stage import stage
from max.graph.value import TensorValue
from max.mlir.dims import DimExpr

__all__ = ["broadcast_all", "broadcast_shapes"]


def broadcast_shapes(op: str, shapes: Sequence[tuple[DimExpr, ...]]) -> tuple[DimExpr, ...]:
    """The common shape of `shapes` under NumPy's broadcasting rules.

    Raises:
        ValueError: Two dimensions differ and neither is 1.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(len(shape) for shape in shapes)
    result: list[DimExpr] = []
    # shapes are aligned at their last axes
    for axis in range(-rank, 0):
        size = DimExpr.constant(1)
        for shape in shapes:
            if -axis > len(shape):
                continue
            dim = shape[axis]
            if size == 1:
                size = dim
            elif dim not in (size, 1):
                texts = " and ".join(mlir.dims_text(s) for s in shapes)
                symbolic = not (dim.is_static and size.is_static)
                raise ValueError(
                    f"{op}: the shapes {texts} do not broadcast: axis {axis} is {size} and {dim}; "
                    "dimensions must be equal or 1"
                    + (" (state what is equal with rebind)" if symbolic else "")
                )
        result.append(size)
    return tuple(result)


def broadcast_all(op: str, tensors: Sequence[TensorValue]) -> list[TensorValue]:
    """Broadcasts tensors to their common shape.

    Raises:
        ValueError: The shapes do not broadcast.
    """
    types = [t.mlir_type for t in tensors]
    shape = broadcast_shapes(op, [t.shape for t in types])
    return [
        x if t.shape == shape else stage("broadcast_to", (x,), None, t.with_shape(shape))
        for x, t in zip(tensors, types, strict=True)
    ]
