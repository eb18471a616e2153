"""Compile graphs, and run them.

::

    import numpy as np
    from max.driver import CPU
    from max.dtype import DType
    from max.engine import InferenceSession
    from max.graph import DeviceRef, Graph, TensorType, ops

    types = [TensorType(DType.float32, ("n",), DeviceRef.CPU())]
    with Graph("twice", input_types=types) as graph:
        graph.output(graph.inputs[0].tensor * 2)

    model = InferenceSession(devices=[CPU()]).load(graph)
    (y,) = model.execute(np.array([1.0, 2.0], np.float32))
    assert y.to_numpy().tolist() == [2.0, 4.0]
"""

from max._host.interrupts import ExecutionInterrupted, interrupt_on
from max._names import lazy_names
from max.engine._model import Model
from max.engine._options import (
    AssertLevel,
    CustomExtensionsType,
    GPUProfilingMode,
    LogLevel,
    SplitKReductionPrecision,
)
from max.engine._session import InferenceSession
from max.engine._tensor_spec import InputSpec, MojoValue, TensorSpec, TorchInputSpec

__all__ = [
    "AssertLevel",
    "CustomExtensionsType",
    "ExecutionInterrupted",
    "GPUProfilingMode",
    "InferenceSession",
    "InputSpec",
    "LogLevel",
    "Model",
    "MojoValue",
    "SplitKReductionPrecision",
    "TensorSpec",
    "TorchInputSpec",
    "interrupt_on",
]

__getattr__ = lazy_names(__name__)
