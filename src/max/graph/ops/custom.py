"""Ops of the user, written in the kernel language."""

# the documented names of chains and opaque values start with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from max.dtype import DType
from max.graph import graph as _graph
from max.graph.dim import Dim
from max.graph.type import DeviceRef, Type
from max.graph.value import BufferValue, TensorValue, Value, _OpaqueValue, value_of

if TYPE_CHECKING:
    from max.driver import Device

__all__ = ["custom", "inplace_custom"]


def custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Value[Any]],
    out_types: Sequence[Type[Any]],
    parameters: Mapping[str, bool | int | str | DType] | None = None,
) -> list[Value[Any]]:
    """A custom op without side effects.

    Args:
        name: The name with which the op's kernel was registered.
        device: The device that the op runs on.
        values: The operands.
        out_types: The types of the results. Symbols that are new to the graph stand for what the
            kernel gives.
        parameters: Compile-time parameters of the kernel.

    Returns:
        A value for each of `out_types`.

    Raises:
        TypeError: An operand is a buffer, or an argument is of a wrong type.
        ValueError: The name is empty.
    """
    operands = _operands(name, values)
    for index, operand in enumerate(operands):
        if isinstance(operand, BufferValue):
            raise TypeError(
                f"custom {name}: operand {index} is a buffer; an op that changes its operands is "
                "staged with inplace_custom"
            )
    results = _graph.Graph.current.stage(
        "mo.custom",
        operands,
        _attributes(name, device, parameters),
        [_result_type(name, t) for t in out_types],
    )
    return [value_of(result) for result in results]


def inplace_custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Value[Any]],
    out_types: Sequence[Type[Any]] | None = None,
    parameters: dict[str, bool | int | str | DType] | None = None,
) -> list[Value[Any]]:
    """A custom op that changes buffers or opaque values in place.

    It runs after all side effects staged before it, and before those staged after it.

    Args:
        name: The name with which the op's kernel was registered.
        device: The device that the op runs on.
        values: The operands; at least one is a buffer or an opaque value.
        out_types: The types of the results; none by default.
        parameters: Compile-time parameters of the kernel.

    Returns:
        A value for each of `out_types`.

    Raises:
        TypeError: No operand is a buffer or an opaque value, or an argument is of a wrong type.
        ValueError: The name is empty.
    """
    operands = _operands(name, values)
    if not any(isinstance(v, BufferValue | _OpaqueValue) for v in operands):
        raise TypeError(
            f"inplace_custom {name}: expected at least one buffer or opaque value among the "
            "operands; an op without side effects is staged with custom"
        )
    results = _graph.Graph.current.stage_effect(
        "mo.custom",
        operands,
        _attributes(name, device, parameters),
        [_result_type(name, t) for t in out_types or ()],
    )
    return [value_of(result) for result in results]


def _operands(name: str, values: Sequence[Any]) -> list[Value[Any]]:
    operands: list[Value[Any]] = []
    for value in values:
        if isinstance(value, Value):
            operands.append(cast("Value[Any]", value))
        elif hasattr(value, "__buffervalue__"):
            operands.append(BufferValue(value))
        else:
            operands.append(TensorValue(value))
    return operands


def _result_type(name: str, type_: Type[Any]) -> Any:
    if not isinstance(type_, Type):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"custom {name}: the result type is {type_!r}, expected a TensorType")
    return type_.to_mlir()


def _attributes(
    name: str, device: Device | DeviceRef, parameters: Mapping[str, Any] | None
) -> dict[str, Any]:
    values = dict(parameters or {})
    for key, value in values.items():
        if isinstance(value, Dim) and value.expr.is_static:
            values[key] = value.expr.value
        elif not isinstance(value, bool | int | float | str | DType):
            raise TypeError(
                f"custom {name}: the parameter {key} is {value!r}, expected a bool, an int, a "
                "float, a string or a DType"
            )
    return {
        "symbol": name,
        "parameters": values,
        "device": DeviceRef.from_device(device).to_mlir(),
    }
