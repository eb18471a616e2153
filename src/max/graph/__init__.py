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
"""

from max._names import lazy_names
from max.graph.dim import AlgebraicDim, Dim, DimLike, StaticDim, SymbolicDim
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

from max.graph import ops, quantization  # isort: skip
from max.graph.graph import Graph
from max.graph.graph_module import Module
from max.graph.kernel_library import KernelLibrary
from max.graph.weight import Weight

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

__getattr__ = lazy_names(__name__)
