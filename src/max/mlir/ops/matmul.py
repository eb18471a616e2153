"""Matrix multiplication."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.dims import DimExpr
from max.mlir.operation import Attrs, OpSpec, Types, define, same_device, tensor


def _infer_matmul(types: Types, attrs: Attrs) -> Types:
    """The result: `[*x.shape[:-1], y.shape[-1]]`; the leading dims are equal, or y has rank 2."""
    x, y = tensor("matmul", types, 0), tensor("matmul", types, 1)
    if x.dtype is not y.dtype:
        raise TypeError(f"matmul: the operands are {x.short} and {y.short}, expected one dtype")
    if x.dtype is DType.bool:
        raise TypeError(f"matmul: the operands are {x.short} and {y.short}, expected numbers")
    if x.rank < 2 or y.rank < 2:
        raise ValueError(f"matmul: {x.short} @ {y.short}: both must have rank 2 or more")
    if x.shape[-1] != y.shape[-2]:
        raise ValueError(
            f"matmul: {x.short} @ {y.short}: the last dimension of the left operand is "
            f"{x.shape[-1]}, the second to last of the right one {y.shape[-2]}; they must be equal"
        )
    if y.rank != 2 and x.shape[:-2] != y.shape[:-2]:
        raise ValueError(
            f"matmul: {x.short} @ {y.short}: the leading dimensions must be equal (broadcast_to)"
        )
    same_device("matmul", [x, y])
    return (x.with_shape([*x.shape[:-1], y.shape[-1]]),)


def product_flops(operands: Types, results: Types) -> DimExpr:
    """A multiplication and an addition for each element of the result and of the axis that is summed."""
    return tensor("matmul", results, 0).num_elements * 2 * tensor("matmul", operands, 0).shape[-1]


MatmulOp = define(
    OpSpec(
        "mo.matmul",
        (2, 2),
        1,
        infer=_infer_matmul,
        flops=product_flops,
        matmul=True,
        packable=True,
        takes_epilogue=True,
        separates=True,
        takes="x, y",
        doc="batched `[…, M, K] @ […, K, N]`, equal leading dims, or rank-2 y",
    )
)
