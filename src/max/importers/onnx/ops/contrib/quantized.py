"""Quantized ops of `com.microsoft`: products with packed weights, and ops on codes."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue, ops
from max.graph.ops.elementwise.bits import bit_and, shift_right
from max.importers.errors import Unsupported
from max.importers.functions.reductions import over
from max.importers.node import Node
from max.importers.onnx.element_types import code_of
from max.importers.onnx.ops.quantized.quantization import (
    dequantize_linear,
    dynamic_quantize_linear,
    quantize_linear,
    saturate,
)
from max.importers.onnx.table import op

_MS = "com.microsoft"

op(f"{_MS}:QuantizeLinear")(quantize_linear)
op(f"{_MS}:DequantizeLinear")(dequantize_linear)


def _values(x: TensorValue, scale: TensorValue, zero: TensorValue | None) -> TensorValue:
    """The numbers that codes stand for."""
    wide = ops.cast(x, DType.float32)
    if zero is not None:
        wide = wide - ops.cast(zero, DType.float32)
    return wide * scale


def _codes(y: TensorValue, scale: TensorValue, zero: TensorValue | None) -> TensorValue:
    """Numbers as codes."""
    rounded = ops.round(y / scale)
    if zero is None:
        return saturate(rounded, 2)
    return saturate(rounded + ops.cast(zero, DType.float32), code_of(zero.dtype))


def _operand(node: Node, index: int) -> TensorValue | None:
    return node.tensor(index) if node.has(index) else None


@op(f"{_MS}:QLinearAdd", f"{_MS}:QLinearMul")
def qlinear_binary(node: Node) -> TensorValue:
    x = _values(node.tensor(0), node.tensor(1), _operand(node, 2))
    y = _values(node.tensor(3), node.tensor(4), _operand(node, 5))
    return _codes(x + y if node.op == "QLinearAdd" else x * y, node.tensor(6), _operand(node, 7))


@op(f"{_MS}:QLinearSigmoid", f"{_MS}:QLinearLeakyRelu", f"{_MS}:QLinearSoftmax")
def qlinear_unary(node: Node) -> TensorValue:
    x = _values(node.tensor(0), node.tensor(1), _operand(node, 2))
    if node.op == "QLinearSigmoid":
        y = ops.sigmoid(x)
    elif node.op == "QLinearLeakyRelu":
        y = ops.where(x < 0, x * node.attr("alpha", 0.01), x)
    else:
        y = ops.softmax(x, node.axis("axis", x.rank, -1))
    return _codes(y, node.tensor(3), _operand(node, 4))


@op(f"{_MS}:QLinearGlobalAveragePool")
def qlinear_global_average_pool(node: Node) -> TensorValue:
    x = _values(node.tensor(0), node.tensor(1), _operand(node, 2))
    axes = list(range(1, x.rank - 1)) if node.attr("channels_last", 0) else list(range(2, x.rank))
    return _codes(over(x, axes, ops.mean), node.tensor(3), _operand(node, 4))


@op(f"{_MS}:QLinearConcat")
def qlinear_concat(node: Node) -> TensorValue:
    parts = [
        _values(node.tensor(index), node.tensor(index + 1), node.tensor(index + 2))
        for index in range(2, len(node.operands), 3)
    ]
    joined = ops.concat(parts, node.axis("axis", parts[0].rank))
    return _codes(joined, node.tensor(0), node.tensor(1))


@op(f"{_MS}:QGemm")
def qgemm(node: Node) -> TensorValue:
    a, b = (ops.cast(node.tensor(index), DType.int32) for index in (0, 3))
    a = a - ops.cast(node.tensor(2), DType.int32)
    b = b - ops.cast(node.tensor(5), DType.int32)
    a = ops.transpose(a, 0, 1) if node.attr("transA", 0) else a
    b = ops.transpose(b, 0, 1) if node.attr("transB", 0) else b
    total = ops.matmul(a, b)
    if node.has(6):
        total = total + node.tensor(6)
    y = ops.cast(total, DType.float32) * (node.tensor(1) * node.tensor(4) * node.attr("alpha", 1.0))
    return _codes(y, node.tensor(7), _operand(node, 8)) if node.has(7) else y


@op(f"{_MS}:MatMulIntegerToFloat")
def matmul_integer_to_float(node: Node) -> TensorValue:
    a, b = (ops.cast(node.tensor(index), DType.int32) for index in (0, 1))
    a = a - ops.cast(node.tensor(4), DType.int32) if node.has(4) else a
    b = b - ops.cast(node.tensor(5), DType.int32) if node.has(5) else b
    y = ops.cast(ops.matmul(a, b), DType.float32) * (node.tensor(2) * node.tensor(3))
    return y + node.tensor(6) if node.has(6) else y


@op(f"{_MS}:DynamicQuantizeMatMul")
def dynamic_quantize_matmul(node: Node) -> TensorValue:
    codes, scale, zero = dynamic_quantize_linear(node, node.tensor(0))
    a = ops.cast(codes, DType.int32) - ops.cast(zero, DType.int32)
    b = ops.cast(node.tensor(1), DType.int32)
    b = b - ops.cast(node.tensor(3), DType.int32) if node.has(3) else b
    y = ops.cast(ops.matmul(a, b), DType.float32) * (scale * node.tensor(2))
    return y + node.tensor(4) if node.has(4) else y


def unpack_codes(packed: TensorValue, bits: int, count: int) -> TensorValue:
    """The codes of the last axis, whose bytes hold several each, the first in the lowest bits: int32."""
    per_byte = 8 // bits
    if per_byte == 1:
        return ops.cast(packed, DType.int32)
    parts = [
        bit_and(
            shift_right(packed, ops.constant(index * bits, DType.uint8)),
            ops.constant((1 << bits) - 1, DType.uint8),
        )
        for index in range(per_byte)
    ]
    codes = ops.reshape(
        ops.stack(parts, packed.rank), [*packed.shape[:-1], packed.shape[-1] * per_byte]
    )
    return ops.cast(codes[..., :count], DType.int32)


@op(f"{_MS}:MatMulNBits")
def matmul_n_bits(node: Node) -> TensorValue:
    """A product with a weight in blocks of codes along its inner axis, each with a scale and a zero point."""
    a, packed, scales = node.tensor(0), node.tensor(1), node.tensor(2)
    inner, columns = node.attr("K"), node.attr("N")
    bits, block = node.attr("bits", 4), node.attr("block_size")
    if bits not in (2, 4, 8):
        raise Unsupported(f"has {bits} bits; 2, 4 and 8 are supported")
    blocks = -(-inner // block)
    codes = unpack_codes(
        ops.reshape(packed, [columns, blocks, block * bits // 8]), bits, block
    )  # [N, blocks, block]
    values = ops.cast(codes, scales.dtype)
    if node.has(3):
        zero = node.tensor(3)
        if zero.dtype is DType.uint8:
            # zero points are packed as codes are, each column from a whole byte on
            width = -(-blocks * bits // 8)
            zero = unpack_codes(ops.reshape(zero, [columns, width]), bits, blocks)
        values = values - ops.cast(ops.reshape(zero, [columns, blocks, 1]), scales.dtype)
    else:
        # without zero points codes are symmetric around half their range
        values = values - float(1 << (bits - 1))
    weight = values * ops.reshape(scales, [columns, blocks, 1])
    # the last block may be longer than the axis
    weight = ops.reshape(weight, [columns, blocks * block])[:, :inner]
    if node.has(4):
        raise Unsupported("has groups in another order (g_idx)")
    y = ops.matmul(a, ops.cast(ops.transpose(weight, 0, 1), a.dtype))
    return y + node.tensor(5) if node.has(5) else y
