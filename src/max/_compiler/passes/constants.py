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

__all__ = ["FOLD_LIMIT", "fold_constants"]

FOLD_LIMIT = 64
"""The most elements of a folded result; `mok.once` computes larger ones when the model is loaded."""

Array = npt.NDArray[Any]


def _divide(x: Array, y: Array) -> Array:
    return x / y if x.dtype.kind not in "iu" else np.floor_divide(x, y)


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "mo.add": np.add, "mo.sub": np.subtract, "mo.mul": np.multiply, "mo.div": _divide, "mo.neg": np.negative,
    "mo.abs": np.abs, "mo.max": np.maximum, "mo.min": np.minimum, "mo.sqrt": np.sqrt, "mo.not": np.logical_not,
    "mo.and": np.logical_and, "mo.or": np.logical_or, "mo.equal": np.equal, "mo.not_equal": np.not_equal,
    "mo.greater": np.greater, "mo.greater_equal": np.greater_equal, "mo.select": np.where,
}  # fmt: skip


def _evaluate(op: MoOp, args: list[Array], dtype: DType, shape: tuple[int, ...]) -> Array | None:
    """The value of an op on constants; None if the op is not folded, or its value is undefined."""
    match op.name:
        case "mo.cast":
            if dtype is DType.bool or args[0].dtype.kind == "b":
                return args[0].astype(dtype.to_numpy())
            if dtype.is_integral() and not np.isfinite(args[0].astype(np.float64)).all():
                return None  # undefined: left to the kernel
            return convert_rounding_once(args[0], dtype.to_numpy())
        case "mo.reshape" | "mo.rebind":
            return args[0].reshape(shape)
        case "mo.transpose":
            return args[0].transpose(op.attr("perm"))
        case "mo.concat":
            return np.concatenate(args, op.attr("axis"))
        case "mo.shape_to_tensor":
            return np.array(
                [dim if isinstance(dim, int) else dim.value for dim in op.attr("shape")], np.int64
            )
        case _:
            function = _ARITHMETIC.get(op.name)
            return None if function is None else np.asarray(function(*args), dtype=dtype.to_numpy())


def fold_constants(block: Block) -> None:
    """Replaces ops whose operands are constants by a constant, if the result has at most `FOLD_LIMIT` elements."""
    for op in ops_of(block):
        if len(op.results) != 1 or not isinstance(result := op.results[0].type, TensorType):
            continue
        shape = result.static_shape
        if shape is None or int(np.prod(shape)) > FOLD_LIMIT:
            continue
        if op.name == "mo.shape_to_tensor":
            if not all(isinstance(dim, int) or dim.is_static for dim in op.attr("shape")):
                continue
        elif not op.operands:
            continue
        args = [constant_of(value.owner) for value in op.operands]
        if any(arg is None for arg in args):
            continue
        with np.errstate(all="ignore"):
            value = _evaluate(op, [arg for arg in args if arg is not None], result.dtype, shape)
        if value is None or value.shape != shape:
            continue
        attr = DenseAttr.of(np.ascontiguousarray(value).reshape(shape))
        folded = build("mo.constant", (), {"value": attr}, (result,), op.location)
        op.results[0].replace_all_uses_with(insert_before(op, folded))
        op.detach()
        op.erase()
