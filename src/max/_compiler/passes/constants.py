"""Folds ops on small constants at compile time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.ir import Block

from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.canonicalize import insert_before
from max.dtype import DType
from max.dtype.rounding import convert_rounding_once
from max.mlir import DenseAttr, MoOp, TensorType, build
from max.mlir.dims import DimExpr
from max.mlir.ops import elementwise as elementwise_ops
from max.mlir.ops import shape as shape_ops
from max.mlir.ops.constant import ConstantOp
from max.mlir.ops.elementwise import (
    AbsOp,
    AddOp,
    AndOp,
    DivOp,
    EqualOp,
    GreaterEqualOp,
    GreaterOp,
    MaxOp,
    MinOp,
    MulOp,
    NegOp,
    NotEqualOp,
    NotOp,
    OrOp,
    SelectOp,
    SqrtOp,
    SubOp,
)

__all__ = ["FOLD_LIMIT", "fold_constants"]

FOLD_LIMIT = 64
"""The most elements of a folded result; `mok.once` computes larger ones when the model is loaded."""

Array = npt.NDArray[Any]


def _divide(x: Array, y: Array) -> Array:
    # integers as the kernels have them: rounded down
    return x / y if x.dtype.kind not in "iu" else np.floor_divide(x, y)


_ARITHMETIC: dict[type[MoOp], Callable[..., Array]] = {
    AddOp: np.add, SubOp: np.subtract, MulOp: np.multiply, DivOp: _divide, NegOp: np.negative,
    AbsOp: np.abs, MaxOp: np.maximum, MinOp: np.minimum, SqrtOp: np.sqrt, NotOp: np.logical_not,
    AndOp: np.logical_and, OrOp: np.logical_or, EqualOp: np.equal, NotEqualOp: np.not_equal,
    GreaterOp: np.greater, GreaterEqualOp: np.greater_equal, SelectOp: np.where,
}  # fmt: skip


def _evaluate(op: MoOp, args: list[Array], dtype: DType, shape: tuple[int, ...]) -> Array | None:
    """The value of an op on constants; None if the op is not folded, or its value is undefined."""
    match type(op):
        case elementwise_ops.CastOp:
            if dtype.is_integral() and not np.isfinite(args[0].astype(np.float64)).all():
                return None  # undefined: left to the kernel
            return convert_rounding_once(args[0], dtype.to_numpy())
        case shape_ops.ReshapeOp | shape_ops.RebindOp:
            return args[0].reshape(shape)
        case shape_ops.TransposeOp:
            return args[0].transpose(op.attr("perm"))
        case shape_ops.ConcatOp:
            return np.concatenate(args, op.attr("axis"))
        case shape_ops.ShapeToTensorOp:
            return np.array([dim.value for dim in _dims(op)], np.int64)
        case _:
            function = _ARITHMETIC.get(type(op))
            return None if function is None else np.asarray(function(*args), dtype=dtype.to_numpy())


def _dims(op: MoOp) -> list[DimExpr]:
    """The dims that `mo.shape_to_tensor` returns."""
    return [DimExpr.of(dim) for dim in op.attr("shape")]


def fold_constants(block: Block) -> None:
    """Replaces ops whose operands are constants by a constant, if the result has at most `FOLD_LIMIT` elements."""
    for op in ops_of(block):
        if len(op.results) != 1 or not isinstance(result := op.results[0].type, TensorType):
            continue
        shape = result.static_shape
        if shape is None or int(np.prod(shape)) > FOLD_LIMIT:
            continue
        if type(op) is shape_ops.ShapeToTensorOp:
            if not all(dim.is_static for dim in _dims(op)):
                continue
        args = [constant_of(value.owner) for value in op.operands]
        if any(arg is None for arg in args):
            continue
        # overflow is infinite and 0/0 is NaN, as in kernels
        with np.errstate(all="ignore"):
            value = _evaluate(op, [arg for arg in args if arg is not None], result.dtype, shape)
        if value is None:
            continue
        attr = DenseAttr.of(np.ascontiguousarray(value).reshape(shape))
        folded = build(ConstantOp, (), {"value": attr}, (result,), op.location)
        op.results[0].replace_all_uses_with(insert_before(op, folded))
        op.detach()
        op.erase()
