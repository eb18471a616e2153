"""Quantized tensors, as pt2e's programs have them: codes, and their dequantized values.

Products and convolutions of such values are computed from the codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.integer_products import Codes, Quantized
from max.importers.torch.ops.arithmetic import tensor_of
from max.importers.torch.table import Call, op
from max.importers.values import Imported


def _codes(x: TensorValue, zero: Any, low: int, high: int, dtype: DType) -> Imported:
    """Rounded values as codes, at the limits where they lie beyond."""
    if dtype is DType.uint8:
        # products take signed bytes: they are what is stored
        moved = x + (zero - 128)
        lower = ops.cast(ops.min(ops.max(moved, float(low - 128)), float(high - 128)), DType.int8)
        return Imported(
            ops.cast(ops.cast(lower, DType.int32) + 128, DType.uint8), source=Codes(lower, 128)
        )
    if not dtype.is_integral() or dtype.size_in_bytes > 2:
        raise Unsupported(f"quantizes to {dtype.name}")
    return Imported(ops.cast(ops.min(ops.max(x + zero, float(low)), float(high)), dtype))


@op("quantized_decomposed.quantize_per_tensor.default")
def quantize(
    call: Call, x: TensorValue, scale: float, zero: int, low: int, high: int, dtype: DType
) -> Imported:
    wide = ops.cast(x, DType.float32)
    return _codes(ops.round(wide * (1.0 / scale)), float(zero), low, high, dtype)


@op("quantized_decomposed.quantize_per_channel.default")
def quantize_channels(
    call: Call,
    x: TensorValue,
    scales: TensorValue,
    zeros: TensorValue,
    axis: int,
    low: int,
    high: int,
    dtype: DType,
) -> Imported:
    wide = ops.cast(x, DType.float32)
    factors = tensor_of(1.0, scales.dtype) / scales
    rounded = ops.round(wide * _along(ops.cast(factors, DType.float32), axis, x.rank))
    return _codes(rounded, _along(ops.cast(zeros, DType.float32), axis, x.rank), low, high, dtype)


def _along(x: TensorValue, axis: int, rank: int) -> TensorValue:
    """A number for each place along an axis, in a shape that broadcasts."""
    return ops.reshape(x, [x.shape[0] if i == axis else Dim(1) for i in range(rank)])


def _wide(call: Call, zero: TensorValue | int, axis: int | None = None) -> TensorValue:
    """The codes less their zero point."""
    codes = call.node.value(0)
    found, x = codes.source, codes.tensor
    if isinstance(found, Codes):
        x, zero = found.tensor, zero - found.shift
    wide = ops.cast(x, DType.int32)
    if isinstance(zero, TensorValue) and axis is not None:
        zero = _along(zero, axis, x.rank)
    return wide - zero


@op("quantized_decomposed.dequantize_per_tensor.default")
def dequantize(
    call: Call,
    x: TensorValue,
    scale: float,
    zero: int,
    low: int,
    high: int,
    dtype: DType,
    out_dtype: DType | None = None,
) -> Imported:
    value = ops.cast(_wide(call, zero), DType.float32) * scale
    source = Quantized(
        call.node.value(0), Imported(contents=np.array(scale, np.float32)), Imported(contents=np.array(zero)), 0
    )  # fmt: skip
    return Imported(ops.cast(value, call.result_dtype()), source=source)


@op("quantized_decomposed.dequantize_per_channel.default")
def dequantize_channels(
    call: Call,
    x: TensorValue,
    scales: TensorValue,
    zeros: TensorValue | None,
    axis: int,
    low: int,
    high: int,
    dtype: DType,
    out_dtype: DType | None = None,
) -> Imported:
    axis = call.axis(axis, x.rank)
    offset = 0 if zeros is None else ops.cast(zeros, DType.int32)
    wide = ops.cast(_wide(call, offset, axis), DType.float32)
    value = wide * _along(ops.cast(scales, DType.float32), axis, x.rank)
    given = call.node.value(1)
    numbers = given.numbers
    if numbers is not None:
        # kernels take scales of float32; observers compute them in float64
        given = Imported(contents=numbers.astype(np.float32))
    zero = None if zeros is None else call.node.value(2)
    source = Quantized(call.node.value(0), given, zero, axis)
    return Imported(ops.cast(value, call.result_dtype()), source=source)
