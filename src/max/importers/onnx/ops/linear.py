"""Matrix products and sums of products."""

from __future__ import annotations

from max.graph import TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.functions.products import contracted
from max.importers.node import Node
from max.importers.onnx.table import op


@op("MatMul")
def matrix_product(node: Node, x: TensorValue, y: TensorValue) -> TensorValue:
    return ops.matmul(x, y)


@op("Gemm")
def gemm(node: Node, a: TensorValue, b: TensorValue, c: TensorValue | None = None) -> TensorValue:
    alpha, beta = node.attr("alpha", 1.0), node.attr("beta", 1.0)
    a = ops.transpose(a, 0, 1) if node.attr("transA", 0) else a
    b = ops.transpose(b, 0, 1) if node.attr("transB", 0) else b
    product = ops.matmul(a, b)
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
    return contracted(node.attr("equation"), tensors)
