"""Matrix products and sums of products."""

from __future__ import annotations

from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.integer_products import quantized_product
from max.importers.functions.products import contract
from max.importers.node import Node
from max.importers.onnx.table import op


@op("MatMul")
def matrix_product(node: Node) -> TensorValue:
    product = quantized_product(node.value(0), node.value(1))
    return ops.matmul(node.tensor(0), node.tensor(1)) if product is None else product


@op("Gemm")
def gemm(node: Node) -> TensorValue:
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    turned, transposed = bool(node.attr("transA", 0)), bool(node.attr("transB", 0))
    c = node.tensor(2) if node.has(2) else None
    product = None
    if not turned:
        product = quantized_product(node.value(0), node.value(1), transposed)
    if product is None:
        a, b = node.tensor(0), node.tensor(1)
        a = ops.transpose(a, 0, 1) if turned else a
        product = ops.matmul(a, ops.transpose(b, 0, 1) if transposed else b)
    if alpha != 1.0:
        product = product * _number(alpha, product)
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else c * _number(beta, c))


def _number(value: float, like: TensorValue) -> float | int:
    if like.dtype.is_float():
        return value
    if value != int(value):
        raise Unsupported(f"multiplies integers by {value}")
    return int(value)


@op("Einsum")
def einsum(node: Node) -> TensorValue:
    tensors = [node.tensor(index) for index in range(len(node.operands))]
    return contract(node.attr("equation"), tensors)
