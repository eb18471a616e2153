# the documented names of chains and opaque values start with an underscore
# pyright: reportPrivateUsage=false
"""Graphs of tensor operations: build them here, compile and run them with `max.engine`.

::

    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    vector = TensorType(DType.float32, ("n",), DeviceRef.CPU())
    with Graph("silu_and_mul", input_types=[vector, vector]) as graph:
        x, gate = (value.tensor for value in graph.inputs)
        graph.output(ops.silu(gate) * x)

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from max._names import lazy_names
from max.graph._operators import bind_operations
from max.graph.kernel_library import KernelLibrary

if TYPE_CHECKING:
    from max.graph import ops, quantization
    from max.graph.dim import AlgebraicDim, Dim, DimLike, StaticDim, SymbolicDim
    from max.graph.graph import Graph
    from max.graph.graph_module import Module
    from max.graph.shape import Shape, ShapeLike
    from max.graph.sharding import ShardingStrategy
    from max.graph.type import (
        BufferType,
        ConvInputLayout,
        DeviceKind,
        DeviceRef,
        FilterLayout,
        TensorType,
        Type,
        _ChainType,
        _OpaqueType,
    )
    from max.graph.value import (
        BufferValue,
        BufferValueLike,
        HasBufferValue,
        HasTensorValue,
        StrongTensorValueLike,
        TensorValue,
        TensorValueLike,
        Value,
        _ChainValue,
        _OpaqueValue,
    )
    from max.graph.weight import Weight

_MODULES = {
    "max.graph.dim": "AlgebraicDim Dim DimLike StaticDim SymbolicDim",
    "max.graph.graph": "Graph",
    "max.graph.graph_module": "Module",
    "max.graph.shape": "Shape ShapeLike",
    "max.graph.sharding": "ShardingStrategy",
    "max.graph.type": "BufferType ConvInputLayout DeviceKind DeviceRef FilterLayout TensorType Type "
    "_ChainType _OpaqueType",
    "max.graph.value": "BufferValue BufferValueLike HasBufferValue HasTensorValue StrongTensorValueLike "
    "TensorValue TensorValueLike Value _ChainValue _OpaqueValue",
    "max.graph.weight": "Weight",
}
"""The names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AlgebraicDim",
    "BufferType",
    "BufferValue",
    "BufferValueLike",
    "ConvInputLayout",
    "DeviceKind",
    "DeviceRef",
    "Dim",
    "DimLike",
    "FilterLayout",
    "Graph",
    "HasBufferValue",
    "HasTensorValue",
    "KernelLibrary",
    "Module",
    "Shape",
    "ShapeLike",
    "ShardingStrategy",
    "StaticDim",
    "StrongTensorValueLike",
    "SymbolicDim",
    "TensorType",
    "TensorValue",
    "TensorValueLike",
    "Type",
    "Value",
    "Weight",
    "_ChainType",
    "_ChainValue",
    "_OpaqueType",
    "_OpaqueValue",
    "ops",
    "quantization",
]


def _op(name: str) -> Any:
    return getattr(import_module("max.graph.ops"), name)


bind_operations(_op)

__getattr__ = lazy_names(__name__, _WHERE, submodules=True)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
