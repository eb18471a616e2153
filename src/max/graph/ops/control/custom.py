"""Custom ops, written in the kernel language."""

# the documented names of chains and opaque values start with an underscore
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from max import kernel, mlir
from max._lazy import lazy_module
from max.driver import Device
from max.dtype import DType
from max.graph import graph as _graph
from max.graph.dim import Dim
from max.graph.type import DeviceRef, Type
from max.graph.value import BufferValue, TensorValue, Value, _OpaqueValue, value_of
from max.mlir.dims import DimExpr

if TYPE_CHECKING:
    from max.kernel.frontend import specialize
    from max.kernel.language import extensions
else:
    # needed for user-registered ops only, and slow to import
    specialize = lazy_module("max.kernel.frontend.specialize")
    extensions = lazy_module("max.kernel.language.extensions")

__all__ = ["custom", "inplace_custom"]


def custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Value[Any]],
    out_types: Sequence[Type[Any]],
    parameters: Mapping[str, bool | int | str | DType] | None = None,
) -> list[Value[Any]]:
    """Stages a custom op without side effects.

    The call is checked against the kernel's signature.

    Args:
        name: The registered name of the kernel.
        device: The device that executes the op.
        values: The operands: tensors, opaque values, or anything that converts to a tensor.
        out_types: The types of the results. The kernel determines the sizes of new symbols.
        parameters: Compile-time parameters of the kernel.

    Returns:
        One value per type in `out_types`.

    Raises:
        TypeError: An operand is a buffer, an argument has a wrong type, or the call does not match the kernel's
            signature; the message has the kernel's file and line.
        ValueError: The name is empty, or no kernel is registered under it, nor in a file of the graph's
            `custom_extensions`.
    """
    operands = _operands(name, values, changes=False)
    for index, operand in enumerate(operands):
        if isinstance(operand, BufferValue):
            raise TypeError(
                f"custom {name}: operand {index} is a buffer; an op that changes its operands is "
                "staged with inplace_custom"
            )
    graph = _graph.Graph.current
    types = [_result_type(name, t) for t in out_types]
    attributes = _attributes(name, device, parameters)
    _check(graph, name, operands, types, attributes["parameters"])
    results = graph.stage("mo.custom", operands, attributes, types)
    return [value_of(result) for result in results]


def inplace_custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Value[Any]],
    out_types: Sequence[Type[Any]] | None = None,
    parameters: dict[str, bool | int | str | DType] | None = None,
) -> list[Value[Any]]:
    """Stages a custom op that modifies buffers or opaque values.

    It is ordered after all side effects staged before it, and before those staged after it.

    Args:
        name: The registered name of the kernel.
        device: The device that executes the op.
        values: The operands; at least one is a buffer or an opaque value.
        out_types: The types of the results; none by default.
        parameters: Compile-time parameters of the kernel.

    Returns:
        One value per type in `out_types`.

    Raises:
        TypeError: No operand is a buffer or an opaque value, an argument has a wrong type, or the call does not match
            the kernel's signature, as in `custom`.
        ValueError: The name is empty, or no kernel is registered under it, nor in a file of the graph's
            `custom_extensions`.
    """
    operands = _operands(name, values, changes=True)
    if not any(isinstance(v, BufferValue | _OpaqueValue) for v in operands):
        raise TypeError(
            f"inplace_custom {name}: expected at least one buffer or opaque value among the "
            "operands; an op without side effects is staged with custom"
        )
    graph = _graph.Graph.current
    types = [_result_type(name, t) for t in out_types or ()]
    attributes = _attributes(name, device, parameters)
    _check(graph, name, operands, types, attributes["parameters"])
    results = graph.stage_effect("mo.custom", operands, attributes, types)
    return [value_of(result) for result in results]


def _check(
    graph: _graph.Graph,
    name: str,
    operands: Sequence[Value[Any]],
    types: Sequence[mlir.Attribute],
    parameters: Mapping[str, Any],
) -> None:
    """Checks the call against the kernel's signature if the kernel is registered or in one of the graph's files."""
    if (file := graph.file_of_kernel(name)) is not None:
        extensions.load_extensions([file])
    if name not in kernel.registered_names():
        if not name or name.startswith("mo."):  # an error of the op, or an op of the kernel library
            return
        try:
            kernel.kernel_of_op(name)
        except kernel.KernelError as error:
            raise type(error)(
                f"custom {name!r}: {error}; import its file, or give it to Graph(custom_extensions=[…])"
            ) from None

    def spec(type_: mlir.Attribute) -> kernel.TensorSpec | None:
        if isinstance(type_, mlir.OpaqueType):
            type_ = opaque_buffer(type_)
        if not isinstance(type_, mlir.TensorType | mlir.BufferType):
            return None
        shape = [dim.value if dim.is_static else None for dim in type_.shape]
        return kernel.TensorSpec(kernel.scalar_type(type_.dtype), tuple(shape))

    values = [(spec(v.to_mlir().type), not isinstance(v, TensorValue)) for v in operands]
    try:
        specialize.check_call(
            kernel.kernel_of_op(name),
            [s for s in map(spec, types) if s is not None],
            [(s, mutable) for s, mutable in values if s is not None],
            parameters,
        )
    except kernel.KernelError as error:
        raise type(error)(f"custom {name!r}: {error}") from None


def opaque_buffer(type_: mlir.OpaqueType) -> mlir.BufferType:
    """The buffer type of an opaque value's memory: rank 1, of its parameters ``size`` and ``dtype`` (default uint8).

    Raises:
        TypeError: The type has no parameter ``size``, or one of the two is of a wrong type.
    """
    values = {key: mlir.from_attr(value) for key, value in type_.parameters.items()}
    size, dtype = values.get("size"), values.get("dtype", DType.uint8)
    if not isinstance(size, int) or not isinstance(dtype, DType):
        raise TypeError(
            f"opaque type {type_.type_name!r}: its parameters are {values}; it needs size, an int, and "
            "may have dtype, a DType: the memory of its values"
        )
    shape = (DimExpr.constant(size),)
    return mlir.TensorType.get(dtype, shape, DeviceRef.CPU().to_mlir()).as_buffer()


def _operands(name: str, values: Sequence[Any], changes: bool) -> list[Value[Any]]:
    """The operands as values; where the op changes none of them, what can be both is a tensor."""
    operands: list[Value[Any]] = []
    for value in values:
        if isinstance(value, Value):
            operands.append(cast("Value[Any]", value))
        elif hasattr(value, "__buffervalue__") and (
            changes or not hasattr(value, "__tensorvalue__")
        ):
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
