"""Ops on the bits of integers and floats: kernels of the kernel language, as no op of the graph API has them."""

from __future__ import annotations

from max import kernel as k
from max._errors import ArgumentError
from max.dtype import DType
from max.graph import TensorType, TensorValue, TensorValueLike, ops
from max.graph.ops.staging.broadcasting import broadcast_all
from max.graph.ops.staging.promotion import promote_operands

__all__ = [
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "float_of",
    "word_of",
]

_KERNEL = "max.array_api.bits"
_OF_BOOLS = {"and": ops.logical_and, "or": ops.logical_or, "xor": ops.logical_xor}


@k.register(_KERNEL)
def _bits(
    out: k.Output,
    x: k.Input,
    y: k.Input,
    ctx: k.Context,
    *,
    operation: str,
    size: int,
    signed: bool,
) -> None:
    for i in ctx.parallel(out.shape[0]):
        if operation == "and":
            out[i] = x[i] & y[i]
        elif operation == "or":
            out[i] = x[i] | y[i]
        elif operation == "xor":
            out[i] = x[i] ^ y[i]
        else:
            # the kernel language counts places modulo the size
            inside = y[i] < size
            if signed:
                inside = inside & (y[i] >= 0)
            if operation == "left":
                out[i] = k.select(inside, x[i] << y[i], 0)
            elif signed:
                # by size - 1: all bits become the sign
                out[i] = x[i] >> k.select(inside, y[i], size - 1)
            else:
                out[i] = k.select(inside, x[i] >> y[i], 0)


@k.register(_KERNEL + ".cast")
def _cast(out: k.Output, x: k.Input, ctx: k.Context) -> None:
    for i in ctx.parallel(out.shape[0]):
        out[i] = k.bitcast(x[i], out.dtype)


def _stage(operation: str, name: str, lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    x, y = broadcast_all(name, promote_operands(name, lhs, rhs))
    dtype = x.dtype
    if dtype is DType.bool and operation in _OF_BOOLS:
        return _OF_BOOLS[operation](x, y)
    if not dtype.is_integral():
        expected = "bool or an integer type" if operation in _OF_BOOLS else "an integer type"
        raise ArgumentError(f"{name}: the operands are {dtype.name}, expected {expected}")
    flat, other = ops.reshape(x, (-1,)), ops.reshape(y, (-1,))
    result = TensorType(dtype, flat.shape, x.device)
    how = {"operation": operation, "size": dtype.size_in_bits, "signed": dtype.is_signed_integral()}
    bits = ops.custom(_KERNEL, x.device, [flat, other], [result], how)[0].tensor
    return ops.reshape(bits, x.shape)


def bitwise_and(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits that two integers share; of bools `max.graph.ops.logical_and`. Operands are promoted and broadcast."""
    return _stage("and", "bitwise_and", lhs, rhs)


def bitwise_or(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits of either of two integers; of bools `max.graph.ops.logical_or`."""
    return _stage("or", "bitwise_or", lhs, rhs)


def bitwise_xor(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The bits in which two integers differ; of bools `max.graph.ops.logical_xor`."""
    return _stage("xor", "bitwise_xor", lhs, rhs)


def bitwise_invert(x: TensorValueLike) -> TensorValue:
    """All bits of integers inverted; of bools `max.graph.ops.logical_not`."""
    x = TensorValue(x)
    if x.dtype is DType.bool:
        return ops.logical_not(x)
    if not x.dtype.is_integral():
        raise ArgumentError(
            f"bitwise_invert: the operand is {x.dtype.name}, expected bool or an integer type"
        )
    ones = -1 if x.dtype.is_signed_integral() else (1 << x.dtype.size_in_bits) - 1
    return _stage("xor", "bitwise_invert", x, ones)


def bitwise_left_shift(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs << rhs``; 0 where `rhs` is the number of bits or more, or negative."""
    return _stage("left", "bitwise_left_shift", lhs, rhs)


def bitwise_right_shift(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs >> rhs``, which keeps the sign; all bits are the sign where `rhs` is their number or more, or negative."""
    return _stage("right", "bitwise_right_shift", lhs, rhs)


def _reinterpret(x: TensorValue, dtype: DType) -> TensorValue:
    flat = ops.reshape(x, (-1,))
    result = TensorType(dtype, flat.shape, x.device)
    bits = ops.custom(_KERNEL + ".cast", x.device, [flat], [result])[0].tensor
    return ops.reshape(bits, x.shape)


_WORDS = {DType.float32: DType.int32, DType.float64: DType.int64}


def word_of(name: str, x: TensorValue) -> TensorValue:
    """The bits of float32 or float64 as int32 or int64."""
    if x.dtype not in _WORDS:
        raise TypeError(f"{name}: the operand is {x.dtype.name}, expected float32 or float64")
    return _reinterpret(x, _WORDS[x.dtype])


def float_of(x: TensorValue, dtype: DType) -> TensorValue:
    """The float of `dtype` that has the bits of an integer of its size."""
    return _reinterpret(x, dtype)
