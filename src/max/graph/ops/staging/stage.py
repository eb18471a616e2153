"""Helpers of all op families: staging of one op, normalized axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import mlir
from max._errors import ArgumentError, AxisError
from max.dtype import DType
from max.graph import graph as _graph
from max.graph.type import Type
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


def check_operand(op: str, name: str, value: TensorValue, dtype: DType, rank: int) -> None:
    """Checks an operand of a function that stages several ops, as the declaration of an op does.

    Args:
        op: The name of the function, for messages.
        name: The name of the operand.
        value: The operand.
        dtype: The dtype that fits.
        rank: The rank that fits.

    Raises:
        TypeError: The dtype differs.
        ValueError: The rank differs.
    """
    mlir.Operand(name, (dtype,), rank).check(op, value.type.to_mlir())


def stage_declared(
    name: str,
    operands: Sequence[Value[Any]],
    attrs: Mapping[str, Any] | None = None,
    result_types: Sequence[Type[Any]] | None = None,
) -> list[TensorValue]:
    """Stages an op with declared operands into the current graph, ordered by the graph's chain if it has side effects.

    Args:
        name: The name without dialect, such as ``sample.token``.
        operands: The operands, without the chain.
        attrs: The attributes, as Python values.
        result_types: The types of the results, for an op whose result types are free.

    Raises:
        ValueError: An operand or an attribute does not fit the op's signature.
        TypeError: The kind or the dtype of an operand does not fit.
    """
    graph = _graph.Graph.current
    full_name = f"mo.{name}"
    staged = graph.stage_effect if mlir.OPS[full_name].spec.chained else graph.stage
    types = None if result_types is None else [type_.to_mlir() for type_ in result_types]
    return [tensor_of(result) for result in staged(full_name, operands, attrs, types)]


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
