"""Convolutions and transposed convolutions."""

from __future__ import annotations

from max.graph import TensorValue, ops
from max.importers.functions.convolutions import convolution as convolved
from max.importers.functions.convolutions import transposed_convolution, with_bias
from max.importers.functions.integer_products import quantized_convolution
from max.importers.torch.table import Call, op


def full(values: list[int], n: int) -> list[int]:
    """A number for each spatial axis, where torch takes one for all."""
    return list(values) * n if len(values) == 1 else list(values)


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
    strides, dilations = full(stride, n), full(dilation, n)
    pairs = [(pad, pad) for pad in full(padding, n)]
    if transposed:
        extra = full(output_padding, n)
        y = transposed_convolution(x, weight, strides, dilations, pairs, extra, groups)
    else:
        y = None
        if n == 2 and batched:
            operands = call.node.value(0), call.node.value(1)
            y = quantized_convolution(*operands, strides, dilations, pairs, groups)
        if y is None:
            y = convolved(x, weight, strides, dilations, pairs, groups)
    y = with_bias(y, bias)
    return y if batched else ops.squeeze(y, 0)
