"""Helpers of all op families: staging of one op, normalised axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import mlir
from max._errors import ArgumentError, AxisError
from max.graph import graph as _graph
from max.graph.value import TensorValue, TensorValueLike, Value, tensor_of


def as_tensor(value: TensorValueLike) -> TensorValue:
    """Converts an operand to a tensor."""
    return value if isinstance(value, TensorValue) else TensorValue(value)


def stage(
    name: str,
    operands: Sequence[Value[Any]],
    attrs: Mapping[str, Any] | None = None,
    result_type: mlir.Attribute | None = None,
) -> TensorValue:
    """Stages an op with one tensor result into the current graph.

    Raises:
        ArgumentError: A static dimension of `result_type` is negative.
    """
    if isinstance(result_type, mlir.TensorType):
        for axis, dim in enumerate(result_type.shape):
            if dim.is_static and dim.value < 0:
                raise ArgumentError(f"{name}: axis {axis} of the result has size {dim}")
    types = None if result_type is None else (result_type,)
    return tensor_of(_graph.Graph.current.stage(f"mo.{name}", operands, attrs, types)[0])


def normalize_axis(op: str, axis: int, rank: int, name: str = "axis") -> int:
    """Maps a possibly negative axis to ``[0, rank)``.

    Raises:
        AxisError: The axis is not an int, or out of range.
    """
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise AxisError(f"{op}: {name} is {axis!r}, expected an int")
    index = axis.__index__()
    if not -rank <= index < rank:
        expected = f"{-rank} to {rank - 1}" if rank else "a tensor of rank 1 or more"
        raise AxisError(
            f"{op}: {name} {index} is out of range for a tensor of rank {rank}; expected {expected}"
        )
    return index + rank if index < 0 else index
