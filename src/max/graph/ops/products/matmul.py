"""Matrix products."""

from __future__ import annotations

from max.graph.dim import Dim
from max.graph.ops.movement.shape import flatten, reshape
from max.graph.ops.staging.broadcasting import broadcast_shapes
from max.graph.ops.staging.promotion import promote_operands
from max.graph.ops.staging.stage import stage
from max.graph.shape import Shape
from max.graph.value import TensorValue, TensorValueLike

__all__ = ["matmul", "outer"]


def matmul(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs @ rhs`` over the last two axes; the leading axes broadcast.

    Args:
        lhs: ``[…, M, K]``, or ``[K]``, which stands for ``[1, K]``.
        rhs: ``[…, K, N]``, or ``[K]``, which stands for ``[K, 1]``.

    Returns:
        ``[…, M, N]``, without M or N if an operand is a vector, of the promoted dtype. Floats narrower than 32 bits
        are accumulated in float32.

    Raises:
        ValueError: The sizes K differ, an operand has rank 0, or the leading axes do not broadcast.
        TypeError: The operands are bool, or no dtype fits both.
    """
    x, y = promote_operands("matmul", lhs, rhs)
    x_type, y_type = x.mlir_type, y.mlir_type
    if not x_type.rank or not y_type.rank:
        raise ValueError(f"matmul: {x_type.short} @ {y_type.short}: an operand has rank 0")
    if x_type.shape[-1] != y_type.shape[max(y_type.rank - 2, 0)]:  # of a vector its only axis
        raise ValueError(
            f"matmul: {x_type.short} @ {y_type.short}: the last dimension of the left operand, "
            f"{x_type.shape[-1]}, must equal the right one's "
            + ("second to last, " if y_type.rank > 1 else "only one, ")
            + f"{y_type.shape[max(y_type.rank - 2, 0)]}"
        )
    vectors = x_type.rank == 1, y_type.rank == 1
    if vectors[0]:
        x = reshape(x, [1, *x.shape])
    if vectors[1]:
        y = reshape(y, [*y.shape, 1])
    x, y = _broadcast_leading(x, y)
    product = stage("matmul", (x, y))
    if not any(vectors):
        return product
    shape = product.shape
    rows, columns = shape[-2:]
    return reshape(
        product,
        [*shape[:-2], *([] if vectors[0] else [rows]), *([] if vectors[1] else [columns])],
    )


def _broadcast_leading(x: TensorValue, y: TensorValue) -> tuple[TensorValue, TensorValue]:
    x_type, y_type = x.mlir_type, y.mlir_type
    # one matrix for all leading axes of x, without copies
    if y_type.rank == 2:
        return x, y
    leading = broadcast_shapes("matmul", [x_type.shape[:-2], y_type.shape[:-2]])
    operands: list[TensorValue] = []
    for operand, type_ in ((x, x_type), (y, y_type)):
        shape = (*leading, *type_.shape[-2:])
        if shape != type_.shape:
            operand = stage("broadcast_to", (operand,), None, type_.with_shape(shape))
        operands.append(operand)
    return operands[0], operands[1]


def outer(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The outer product of two vectors.

    Args:
        lhs: The left vector ``[M]``; a tensor of another rank is flattened.
        rhs: The right vector ``[N]``; a tensor of another rank is flattened.

    Returns:
        ``[M, N]``, of the promoted dtype.
    """
    x, y = promote_operands("outer", lhs, rhs)
    column = flatten(x)
    row = flatten(y)
    return reshape(column, Shape([*column.shape, Dim(1)])) * row
