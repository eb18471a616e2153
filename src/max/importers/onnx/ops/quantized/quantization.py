"""Quantized tensors: codes, scales and zero points; products and convolutions of codes as integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.graph.ops.elementwise.binary import maximum, minimum
from max.importers.errors import HostNode
from max.importers.functions.integer_products import Codes, Quantized, codes_of_same
from max.importers.functions.scaled_sums import divide_scaled
from max.importers.node import Node
from max.importers.onnx.element_types import STORAGE, code_of, dtype_of, storage_of
from max.importers.onnx.ops.casts import convert_array
from max.importers.onnx.ops.convolution import convolve
from max.importers.onnx.table import host, op
from max.importers.values import Imported

_UINT8, _INT8 = 2, 3
"""ONNX's numbers of the types of bytes."""


def align_scale(node: Node, x: TensorValue, scale: TensorValue, index: int) -> TensorValue:
    """Scales or zero points in a shape that broadcasts with the operand: one, one a channel, or one a block."""
    if scale.rank == 0 or (scale.rank == 1 and scale.shape[0] == 1):
        return ops.reshape(scale, [])
    axis = node.axis("axis", x.rank, 1) if x.rank > 1 else 0
    if scale.rank == 1:
        return ops.reshape(scale, [scale.shape[0] if i == axis else Dim(1) for i in range(x.rank)])
    block = node.attr("block_size", 0)
    size = node.static(x.shape[axis])
    count = node.static(scale.shape[axis], index)
    # without the attribute: as many elements as the number of scales leaves
    block = block or -(-size // count)
    wide = ops.unsqueeze(scale, axis + 1)
    shape = list(scale.shape)
    # each scale as often as its block has elements
    wide = ops.broadcast_to(wide, [*shape[: axis + 1], block, *shape[axis + 1 :]])
    flat = ops.reshape(wide, [*shape[:axis], count * block, *shape[axis + 1 :]])
    cut = [slice(None)] * x.rank
    # the last block may be shorter
    cut[axis] = slice(0, size)
    return flat[tuple(cut)] if count * block != size else flat


def limits_of(code: int) -> tuple[int, int]:
    """The least and the greatest integer of an ONNX type."""
    if code in STORAGE:
        name = STORAGE[code][0]
        bits = int(name[-1])
        return (
            (0, (1 << bits) - 1)
            if name.startswith("u")
            else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        )
    info = np.iinfo(dtype_of(code).to_numpy())
    return int(info.min), int(info.max)


def saturate(x: TensorValue, code: int) -> TensorValue:
    """Rounded values as integers of a type, at its limits where they lie beyond."""
    low, high = limits_of(code)
    return ops.cast(minimum(maximum(x, float(low)), float(high)), dtype_of(code))


@op("QuantizeLinear")
def quantize_linear(node: Node) -> Any:
    x, scale = node.tensor(0), node.tensor(1)
    code = node.attr("output_dtype", 0)
    if not code:
        code = (
            code_of(node.value(2).dtype, node.value(2).stored_as) if node.has(2) else 2
        )  # 2: uint8
    # ONNX's numbers of float8 and float4
    if code in (17, 18, 19, 20, 23):
        raise HostNode("quantizes to small floats between graphs")
    if code in (_UINT8, _INT8):
        same = codes_of_same(node.value(0), node.value(1), node.value(2) if node.has(2) else None)
        if same is not None and same.dtype is dtype_of(code):
            return same
    quotient = divide_scaled(node.value(0), node.value(1)) if code in (_UINT8, _INT8) else None
    # a quotient of 16 bits would round twice
    wide = ops.cast(x, DType.float32) if x.dtype.is_integral() or x.dtype.size_in_bytes < 4 else x
    if quotient is None:
        quotient = wide / ops.cast(align_scale(node, x, scale, 1), wide.dtype)
    rounded = ops.round(quotient)
    zero = None
    if node.has(2):
        zero = ops.cast(align_scale(node, x, node.tensor(2), 2), wide.dtype)
    if code == _UINT8:
        # products take signed bytes: they are what is stored
        moved = rounded - 128.0 if zero is None else rounded + (zero - 128.0)
        lower = saturate(moved, _INT8)
        codes = ops.cast(ops.cast(lower, DType.int32) + 128, DType.uint8)
        # a product that follows takes the signed bytes
        return Imported(codes, source=Codes(lower, 128))
    rounded = rounded if zero is None else rounded + zero
    return Imported(saturate(rounded, code), stored_as=storage_of(code))


@host("QuantizeLinear")
def quantize_on_host(node: Node, x: Any, scale: Any, zero: Any = None) -> Any:
    """Small floats: the quotient, rounded once."""
    code = node.attr("output_dtype", 0) or code_of(DType.from_numpy(zero.dtype))
    wide = x.astype(np.float32)
    rows = np.asarray(scale.astype(np.float32))
    if rows.ndim == 1 and rows.size > 1:
        axis = node.axis("axis", x.ndim, 1)
        rows = rows.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    elif rows.ndim > 1:
        axis = node.axis("axis", x.ndim, 1)
        block = node.attr("block_size", 0) or -(-x.shape[axis] // rows.shape[axis])
        rows = np.take(np.repeat(rows, block, axis), np.arange(x.shape[axis]), axis)
    elif rows.size == 1:
        rows = rows.reshape(())
    return convert_array(wide / rows, code, bool(node.attr("saturate", 1)))


@op("DequantizeLinear")
def dequantize_linear(node: Node) -> Imported:
    axis = node.attr("axis", 1)
    zero = node.value(2) if node.has(2) else None
    source = Quantized(node.value(0), node.value(1), zero, axis)
    return Imported(_dequantize(node), source=source)


def _dequantize(node: Node) -> TensorValue:
    found = node.value(0).source
    x, scale = node.tensor(0), node.tensor(1)
    dtype = dtype_of(node.attr("output_dtype")) if node.attr("output_dtype", 0) else scale.dtype
    wide = DType.float64 if scale.dtype is DType.float64 else DType.float32
    if x.dtype.is_integral() and node.has(2):
        zero = align_scale(node, x, ops.cast(node.tensor(2), DType.int32), 2)
        if isinstance(found, Codes):
            # the signed bytes exist already: the zero point moves with them
            x, zero = found.tensor, zero - found.shift
        # an exact difference; the product with the scale rounds once
        values = ops.cast(ops.cast(x, DType.int32) - zero, wide)
    else:
        values = ops.cast(x, wide)
    return ops.cast(values * ops.cast(align_scale(node, x, scale, 1), wide), dtype)


def _subtract_zero_point(
    x: TensorValue, zero: TensorValue | None, axis: int | None = None
) -> TensorValue:
    """Codes without their zero point, as int32."""
    wide = ops.cast(x, DType.int32)
    if zero is None:
        return wide
    offset = ops.cast(zero, DType.int32)
    if offset.rank == 1 and offset.shape[0] != 1 and axis is not None:
        offset = ops.reshape(
            offset, [offset.shape[0] if i == axis else Dim(1) for i in range(x.rank)]
        )
    elif offset.rank == 1 and offset.shape[0] == 1:
        offset = ops.reshape(offset, [])
    return wide - offset


@op("MatMulInteger")
def matmul_integer(
    node: Node,
    a: TensorValue,
    b: TensorValue,
    a_zero: TensorValue | None = None,
    b_zero: TensorValue | None = None,
) -> TensorValue:
    return ops.matmul(
        _subtract_zero_point(a, a_zero, max(a.rank - 2, 0)),
        _subtract_zero_point(b, b_zero, b.rank - 1),
    )


@op("ConvInteger")
def conv_integer(
    node: Node,
    x: TensorValue,
    weight: TensorValue,
    x_zero: TensorValue | None = None,
    w_zero: TensorValue | None = None,
) -> TensorValue:
    return convolve(node, _subtract_zero_point(x, x_zero), _subtract_zero_point(weight, w_zero, 0))


def _row(x: TensorValue, rank: int, axis: int) -> TensorValue:
    """Scales of a channel each, along an axis of the result."""
    if x.rank == 0:
        return x
    if x.shape[0] == 1 and x.rank == 1:
        return ops.reshape(x, [])
    if x.rank > 1:
        return x
    return ops.reshape(x, [x.shape[0] if i == axis else Dim(1) for i in range(rank)])


def _requantize(
    node: Node, total: TensorValue, factor: TensorValue, zero: TensorValue | None
) -> TensorValue:
    values = ops.round(ops.cast(total, DType.float32) * factor)
    if zero is not None:
        values = values + ops.cast(
            ops.reshape(zero, []) if zero.rank == 1 and zero.shape[0] == 1 else zero, DType.float32
        )
    return saturate(values, code_of(zero.dtype) if zero is not None else 2)


@op("QLinearMatMul")
def qlinear_matmul(node: Node) -> TensorValue:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (node.tensor(i) for i in range(8))
    total = ops.matmul(
        _subtract_zero_point(a, a_zero, max(a.rank - 2, 0)),
        _subtract_zero_point(b, b_zero, b.rank - 1),
    )
    scales = [ops.cast(s, DType.float32) for s in (a_scale, b_scale, y_scale)]
    rank = total.rank
    factor = (
        _row(scales[0], rank, rank - 2)
        * _row(scales[1], rank, rank - 1)
        / _row(scales[2], rank, rank - 2)
    )
    return _requantize(node, total, factor, y_zero)


@op("QLinearConv")
def qlinear_conv(node: Node) -> TensorValue:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (node.tensor(i) for i in range(8))
    # a node of the image and the filter, as `convolve` expects its operands
    node_of_conv = Node(node.source, [node.operands[0], node.operands[3]], node.walker)
    total = convolve(
        node_of_conv, _subtract_zero_point(x, x_zero), _subtract_zero_point(w, w_zero, 0)
    )
    if node.has(8):
        bias = node.tensor(8)
        total = total + ops.reshape(bias, [bias.shape[0], *[1] * (x.rank - 2)])
    factor = ops.reshape(x_scale, []) * _row(w_scale, x.rank, 1) / ops.reshape(y_scale, [])
    return _requantize(node, total, factor, y_zero)


@op("DynamicQuantizeLinear")
def dynamic_quantize_linear(node: Node, x: TensorValue) -> Any:
    flat = ops.reshape(x, [-1])
    # the range includes 0, which must have a code of its own
    high = maximum(ops.reshape(ops.max(flat, axis=0), []), 0.0)
    low = minimum(ops.reshape(ops.min(flat, axis=0), []), 0.0)
    scale = (high - low) / 255.0
    # all elements are 0
    divisor = ops.where(ops.equal(scale, 0.0), 1.0, scale)
    zero = saturate(ops.round(minimum(maximum(-low / divisor, 0.0), 255.0)), 2)
    codes = saturate(ops.round(x / divisor) + ops.cast(zero, DType.float32), 2)
    return codes, scale, zero
