"""Convolutions and transposed convolutions."""

from __future__ import annotations

from typing import Any

from max.graph import TensorValue, ops
from max.importers.node import Node
from max.importers.onnx.ops.convolution import conv_transpose
from max.importers.onnx.ops.convolution import convolution as convolved
from max.importers.source import SourceNode
from max.importers.torch.table import Call, op


def full(values: list[int], n: int) -> list[int]:
    """A number for each spatial axis, where torch takes one for all."""
    return list(values) * n if len(values) == 1 else list(values)


def with_attributes(call: Call, attributes: dict[str, Any], wanted: int = 1) -> Node:
    """A node of ONNX with attributes, for the functions that both importers share."""
    source = call.node.source
    outputs = tuple(name if i < wanted else "" for i, name in enumerate(source.outputs))
    like = SourceNode(source.op, "", 21, source.inputs, outputs, attributes, source.label)
    return Node(like, call.node.operands, call.node.walker)


@op("aten.convolution.default")
def convolution(
    call: Call,
    x: TensorValue,
    weight: TensorValue,
    bias: TensorValue | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> TensorValue:
    n = weight.rank - 2
    batched = x.rank == n + 2
    x = x if batched else ops.unsqueeze(x, 0)
    strides, pads, dilations = full(stride, n), full(padding, n), full(dilation, n)
    if transposed:
        attributes = {
            "strides": strides, "dilations": dilations, "pads": pads * 2, "group": groups,
            "output_padding": full(output_padding, n),
        }  # fmt: skip
        y = conv_transpose(with_attributes(call, attributes), x, weight, bias)
    else:
        y = convolved(x, weight, strides, dilations, [(pad, pad) for pad in pads], groups)
        if bias is not None:
            y = y + ops.reshape(bias, [bias.shape[0], *[1] * n])
    return y if batched else ops.squeeze(y, 0)
