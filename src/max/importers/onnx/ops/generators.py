"""Random tensors."""

from __future__ import annotations

import struct

from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from max.graph.ops import random
from max.importers.errors import Unsupported
from max.importers.node import Node
from max.importers.onnx.element_types import dtype_of
from max.importers.onnx.table import op


def _set_seed(node: Node) -> None:
    """Sets the seed that the model gives, or one that depends on the node."""
    seed = node.attr("seed")
    if seed is not None:
        # the seed is a float; its bits make an integer
        random.set_seed(struct.unpack("<i", struct.pack("<f", float(seed)))[0])
    elif Graph.current.random_seed() is None:
        random.set_seed(0)


def _type(node: Node) -> TensorType:
    """The type of the result."""
    device = DeviceRef.CPU()
    code = node.attr("dtype")
    if node.op.endswith("Like"):
        like = node.value(0)
        dtype = dtype_of(code) if code else like.dtype
        assert dtype is not None
        return TensorType(dtype, like.shape, device)
    dtype = dtype_of(code) if code else DType.float32
    return TensorType(dtype, [Dim(size) for size in node.attr("shape")], device)


@op("RandomNormal", "RandomNormalLike")
def random_normal(node: Node) -> TensorValue:
    _set_seed(node)
    return random.gaussian(_type(node), node.attr("mean", 0.0), node.attr("scale", 1.0))


@op("RandomUniform", "RandomUniformLike")
def random_uniform(node: Node) -> TensorValue:
    _set_seed(node)
    return random.uniform(_type(node), (node.attr("low", 0.0), node.attr("high", 1.0)))


@op("Bernoulli")
def bernoulli(node: Node, x: TensorValue) -> TensorValue:
    _set_seed(node)
    dtype = dtype_of(node.attr("dtype")) if node.attr("dtype") else x.dtype
    draws = random.uniform(TensorType(DType.float32, x.shape, x.device))
    return ops.cast(draws < ops.cast(x, DType.float32), dtype)


@op("Multinomial")
def multinomial(node: Node, x: TensorValue) -> TensorValue:
    """Classes by unnormalized log-probabilities: of Gumbel variates the greatest."""
    _set_seed(node)
    count = node.attr("sample_size", 1)
    rows, classes = x.shape
    if count < 1:
        raise Unsupported(f"draws {count} samples")
    # the least number is not 0, whose logarithm is infinite
    draws = random.uniform(
        TensorType(DType.float32, [rows, count, classes], x.device), (2.0**-24, 1.0)
    )
    scores = ops.unsqueeze(ops.cast(x, DType.float32), 1) - ops.log(-ops.log(draws))
    picked = ops.reshape(ops.argmax(scores, 2), [rows, count])
    return ops.cast(picked, dtype_of(node.attr("dtype", 6)))
