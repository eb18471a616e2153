"""Runs layers through the NumPy interpreter and through the compiled engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.nn import Module

Array = npt.NDArray[Any]

CPU_REF = DeviceRef.CPU()
BACKENDS = ("interpreter", "engine")
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {"float32": DType.float32, "bfloat16": DType.bfloat16, "float16": DType.float16}

_sessions: list[InferenceSession] = []


def session() -> InferenceSession:
    """Returns the one session of the test process."""
    if not _sessions:
        _sessions.append(InferenceSession(devices=[CPU()]))
    return _sessions[0]


def run_graph(
    graph: Graph, inputs: Sequence[Array], weights: Mapping[str, Any] | None, backend: str
) -> list[Array]:
    """Returns the outputs of a graph. Arrays of buffers are modified in place."""
    if backend == "interpreter":
        return [np.array(out) for out in _interpreter.run(graph, inputs, weights or {})]
    model = session().load(graph, weights_registry=dict(weights or {}))
    return [np.array(out.to_numpy()) for out in model.execute(*inputs)]


def evaluate(
    layer: Callable[..., Any],
    inputs: Sequence[Array],
    backend: str,
    weights: Mapping[str, Array] | None = None,
    dims: Sequence[Sequence[Any] | None] | None = None,
    buffers: Sequence[int] = (),
) -> list[Array]:
    """Returns the outputs of a graph that consists of a layer or a function of tensors.

    ``dims`` names symbolic dimensions of an input; ``buffers`` says which inputs are buffers.
    """
    types: list[Any] = []
    for index, array in enumerate(inputs):
        shape = array.shape if dims is None or dims[index] is None else dims[index]
        kind = BufferType if index in buffers else TensorType
        types.append(kind(DType.from_numpy(array.dtype), shape, CPU_REF))
    values: Mapping[str, Any] = {}
    if isinstance(layer, Module):
        if weights is not None:
            layer.load_state_dict(dict(weights))
        values = layer.state_dict()

    def forward(*args: Any) -> Any:
        return layer(*(a.buffer if i in buffers else a.tensor for i, a in enumerate(args)))

    return run_graph(Graph("layer", forward, input_types=types), inputs, values, backend)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float32") -> Array:
    """Normal numbers, rounded to a dtype."""
    return rng.standard_normal(tuple(shape)).astype(FLOATS[dtype].to_numpy())


def f32(array: Array) -> Array:
    """Converts an array to float32."""
    return np.asarray(array).astype(np.float32)
