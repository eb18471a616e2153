"""Tensors of numbers that the program names."""

from __future__ import annotations

from typing import Any

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Dim, TensorValue, ops
from max.importers.errors import Unsupported
from max.importers.torch.ops.arithmetic import tensor_of
from max.importers.torch.table import Call, op


def fill(shape: list[Any], value: Any, dtype: DType) -> TensorValue:
    """A tensor of one number."""
    return ops.broadcast_to(tensor_of(value, dtype), [Dim(size) for size in shape])


@op("aten.full.default")
def full(call: Call, size: list[Any], value: Any, dtype: DType | None = None) -> TensorValue:
    return fill(size, value, call.result_dtype())


@op("aten.full_like.default")
def full_like(call: Call, x: TensorValue, value: Any, dtype: DType | None = None) -> TensorValue:
    return fill(list(x.shape), value, call.result_dtype())


@op("aten.zeros.default", "aten.empty.memory_format")
def zeros(call: Call, size: list[Any], dtype: DType | None = None) -> TensorValue:
    # the contents of an empty tensor may be any
    return fill(size, 0, call.result_dtype())


@op("aten.empty_permuted.default", "aten.empty_strided.default")
def empty_of_layout(
    call: Call, size: list[Any], layout: list[Any], dtype: DType | None = None
) -> TensorValue:
    return fill(size, 0, call.result_dtype())


@op("aten.ones.default")
def ones(call: Call, size: list[Any], dtype: DType | None = None) -> TensorValue:
    return fill(size, 1, call.result_dtype())


@op("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(call: Call, x: TensorValue, dtype: DType | None = None) -> TensorValue:
    return fill(list(x.shape), 0, call.result_dtype())


@op("aten.ones_like.default")
def ones_like(call: Call, x: TensorValue, dtype: DType | None = None) -> TensorValue:
    return fill(list(x.shape), 1, call.result_dtype())


@op("aten.scalar_tensor.default")
def scalar_tensor(call: Call, value: Any, dtype: DType | None = None) -> TensorValue:
    return tensor_of(value, call.result_dtype())


@op("aten.arange.start_step", "aten.arange.start", "aten.arange.default")
def arange(
    call: Call, first: Any, last: Any = None, step: Any = 1, dtype: DType | None = None
) -> TensorValue:
    start, stop = (0, first) if last is None else (first, last)
    wanted = call.result_dtype()
    if not any(isinstance(number, Dim) for number in (start, stop, step)):
        return ops.constant(np.arange(start, stop, step).astype(wanted.to_numpy()))
    # the length is a symbol: `range` takes no more than the two ends
    if step != 1 or not all(isinstance(number, int | Dim) for number in (start, stop)):
        raise Unsupported(f"counts from {start} to {stop} in steps of {step}")
    line = ops.range(
        Dim(start), Dim(stop), 1, Dim(stop) - start, dtype=DType.int64, device=DeviceRef.CPU()
    )
    return ops.cast(line, wanted)


@op("prims.iota.default")
def iota(
    call: Call, length: Any, start: int, step: int, dtype: DType, requires_grad: bool = False
) -> TensorValue:
    if isinstance(length, int):
        numbers = start + step * np.arange(length)
        return ops.constant(numbers.astype(dtype.to_numpy()))
    line = ops.range(0, length, 1, length, dtype=DType.int64, device=DeviceRef.CPU())
    return ops.cast(line * step + start, dtype)


@op("aten.eye.default", "aten.eye.m")
def eye(
    call: Call, rows: int, columns: int | None = None, dtype: DType | None = None
) -> TensorValue:
    n, m = call.static(rows), call.static(rows if columns is None else columns)
    return ops.constant(np.eye(n, m).astype(call.result_dtype().to_numpy()))


@op("aten.linspace.default")
def linspace(
    call: Call, start: Any, end: Any, steps: int, dtype: DType | None = None
) -> TensorValue:
    numbers = np.linspace(call.number(start), call.number(end), call.number(steps))
    return ops.constant(numbers.astype(call.result_dtype().to_numpy()))
