"""Products of matrices."""

from __future__ import annotations

from typing import Any

from max.graph import TensorValue, ops
from max.importers.torch.ops.arithmetic import tensor_of
from max.importers.torch.table import Call, op


@op("aten.mm.default", "aten.bmm.default", "aten.matmul.default")
def product(call: Call, x: TensorValue, y: TensorValue) -> TensorValue:
    return ops.matmul(x, y)


def _scaled(x: TensorValue, factor: Any) -> TensorValue:
    return x if factor == 1 else x * tensor_of(factor, x.dtype)


@op("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def add_product(
    call: Call, bias: TensorValue, x: TensorValue, y: TensorValue, beta: Any = 1, alpha: Any = 1
) -> TensorValue:
    result = _scaled(ops.matmul(x, y), alpha)
    # as torch does, what is scaled by 0 is not read
    return result if beta == 0 else result + _scaled(bias, beta)


@op("aten.linear.default")
def linear(
    call: Call, x: TensorValue, weight: TensorValue, bias: TensorValue | None = None
) -> TensorValue:
    result = ops.matmul(x, ops.transpose(weight, 0, 1))
    return result if bias is None else result + bias


@op("aten.mv.default", "aten.dot.default")
def vector_product(call: Call, x: TensorValue, y: TensorValue) -> TensorValue:
    return ops.squeeze(ops.sum(x * y, -1), x.rank - 1)
