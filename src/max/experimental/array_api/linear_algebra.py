"""Products of vectors and matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

from max.experimental import functional as F
from max.experimental.array_api.arguments import shape_of
from max.experimental.array_api.manipulation import permute_dims
from max.experimental.array_api.reductions import sum
from max.experimental.tensor import Tensor

__all__ = [
    "matmul",
    "matrix_transpose",
    "tensordot",
    "vecdot",
]

matmul = F.matmul


def matrix_transpose(x: Tensor, /) -> Tensor:
    """The last two axes swapped."""
    return x.transpose(-1, -2)


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The sums of products along an axis, in the dtype of the products; the other axes broadcast.

    Args:
        x1: The first operand.
        x2: The second operand.
        axis: The axis, counted from the last, or from the first if both have one rank.

    Raises:
        ValueError: The sizes of the axis differ, or an operand has no such axis.
    """
    sizes = [shape_of(x)[axis] if -x.rank <= axis < x.rank else None for x in (x1, x2)]
    if sizes[0] is None or sizes[0] != sizes[1] or (axis >= 0 and x1.rank != x2.rank):
        raise ValueError(
            f"vecdot: axis {axis} of shapes {shape_of(x1)} and {shape_of(x2)}; expected an axis of both, of one size"
        )
    products = x1 * x2
    return sum(products, axis=axis, dtype=products.dtype)


def tensordot(
    x1: Tensor, x2: Tensor, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> Tensor:
    """The sums of products over pairs of axes."""
    if isinstance(axes, int):
        of_x1 = [*range(x1.rank - axes, x1.rank)]
        of_x2 = [*range(axes)]
    else:
        of_x1, of_x2 = ([a % x.rank for a in part] for part, x in zip(axes, (x1, x2), strict=True))
    free1 = [a for a in range(x1.rank) if a not in of_x1]
    free2 = [a for a in range(x2.rank) if a not in of_x2]
    shape1, shape2 = shape_of(x1), shape_of(x2)
    inner = math.prod(shape1[a] for a in of_x1)
    rows = math.prod(shape1[a] for a in free1)
    columns = math.prod(shape2[a] for a in free2)
    left = permute_dims(x1, (*free1, *of_x1)).reshape((rows, inner))
    right = permute_dims(x2, (*of_x2, *free2)).reshape((inner, columns))
    return (left @ right).reshape([*(shape1[a] for a in free1), *(shape2[a] for a in free2)])
