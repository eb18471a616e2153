"""Products of matrices."""

from __future__ import annotations

from typing import Any

from max.dtype import DType
from max.graph import TensorType, TensorValue, ops
from max.graph.ops.staging.stage import stage_declared
from max.importers.errors import Unsupported
from max.importers.functions.integer_products import quantized_product
from max.importers.torch.ops.arithmetic import tensor_of
from max.importers.torch.table import Call, op


@op("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def product(call: Call, x: TensorValue, y: TensorValue) -> TensorValue:
    return multiply_operands(call, 0, x, y)


def multiply_operands(call: Call, first: int, x: TensorValue, y: TensorValue) -> TensorValue:
    """The product of the operands at a position and behind it, from their codes where they were dequantized."""
    found = quantized_product(call.node.value(first), call.node.value(first + 1))
    return ops.matmul(x, y) if found is None else ops.cast(found, x.dtype)


def _scale(x: TensorValue, factor: Any) -> TensorValue:
    return x if factor == 1 else x * tensor_of(factor, x.dtype)


@op("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def add_product(
    call: Call, bias: TensorValue, x: TensorValue, y: TensorValue, beta: Any = 1, alpha: Any = 1
) -> TensorValue:
    result = _scale(multiply_operands(call, 1, x, y), alpha)
    # as torch does, what is scaled by 0 is not read
    return result if beta == 0 else result + _scale(bias, beta)


@op("aten.linear.default")
def linear(
    call: Call, x: TensorValue, weight: TensorValue, bias: TensorValue | None = None
) -> TensorValue:
    result = quantized_product(call.node.value(0), call.node.value(1), transposed=True)
    if result is None:
        result = ops.matmul(x, ops.transpose(weight, 0, 1))
    return result if bias is None else result + bias


@op("aten.mv.default", "aten.dot.default")
def vector_product(call: Call, x: TensorValue, y: TensorValue) -> TensorValue:
    return ops.squeeze(ops.sum(x * y, -1), x.rank - 1)


def _grouped_matmul(x: TensorValue, weight: TensorValue, ends: TensorValue) -> TensorValue:
    """The rows up to each end times the matrix of their group; rows behind the last end are 0."""
    if x.rank != 2 or weight.rank != 3 or ends.rank != 1:
        raise Unsupported(
            f"multiplies ranks {x.rank} and {weight.rank} by groups, expected rows and a matrix for each group"
        )
    first = ops.constant([0], ends.dtype, device=ends.device)
    starts = ops.concat([first, ends], 0)
    sizes = ends - starts[:-1]
    count = ops.reshape(ops.cast(TensorValue(weight.shape[0]), sizes.dtype), [1])
    stats = ops.concat([ops.max(sizes, axis=0), count], 0)
    experts = ops.range(
        0, weight.shape[0], 1, weight.shape[0], dtype=DType.int32, device=ends.device
    )
    # as the kernel reads them: a row of the matrix for each result
    rows = ops.permute(weight, [0, 2, 1])
    result = TensorType(x.dtype, [x.shape[0], weight.shape[2]], x.device)
    groups = [ops.cast(starts, DType.uint32), experts, ops.cast(stats, DType.uint32)]
    return stage_declared("grouped_matmul.ragged", [x, rows, *groups], None, [result])[0]


@op("transformers.grouped_mm_fallback.default")
def grouped_mm_of_rows(
    call: Call, input: TensorValue, weight: TensorValue, offs: TensorValue
) -> TensorValue:
    return _grouped_matmul(input, weight, offs)


@op("aten._grouped_mm.default")
def grouped_mm(
    call: Call,
    x: TensorValue,
    y: TensorValue,
    offs: TensorValue | None = None,
    bias: TensorValue | None = None,
    out_dtype: Any = None,
) -> TensorValue:
    product = ops.matmul(x, y) if offs is None else _grouped_matmul(x, y, offs)
    product = product if bias is None else product + bias
    return ops.cast(product, call.result_dtype())
