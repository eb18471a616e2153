"""Graphs over several virtual CPU devices, by the interpreter and by the compiled engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max import _interpreter
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

Array = npt.NDArray[Any]
BACKENDS = ("interpreter", "engine")
SIGNAL = 16
"""The size of signal buffers, which CPU devices do not read."""

_sessions: list[InferenceSession] = []


def session() -> InferenceSession:
    """Returns the one session of the test process, with four devices."""
    if not _sessions:
        _sessions.append(InferenceSession(devices=[CPU(i) for i in range(4)]))
    return _sessions[0]


def refs(count: int) -> list[DeviceRef]:
    """Returns the first devices."""
    return [DeviceRef.CPU(i) for i in range(count)]


def run(
    forward: Callable[[list[Any], list[Any]], Any],
    inputs: Sequence[Array],
    backend: str,
    dims: Sequence[Sequence[Any]] | None = None,
    weights: Mapping[str, Any] | None = None,
    devices: Sequence[DeviceRef] | None = None,
    signals: int = 0,
) -> list[Array]:
    """Returns the outputs of a function of tensors and signal buffers; input i is on device i unless `devices` is
    given.
    """
    where = list(devices) if devices is not None else refs(len(inputs))
    types: list[Any] = [
        TensorType(DType.from_numpy(x.dtype), x.shape if dims is None else dims[i], where[i])
        for i, x in enumerate(inputs)
    ]
    types += [BufferType(DType.uint8, [SIGNAL], device) for device in refs(signals)]
    count = len(inputs)
    with Graph("devices", input_types=types) as graph:
        values = graph.inputs
        made = forward([v.tensor for v in values[:count]], [v.buffer for v in values[count:]])
        graph.output(*made)
    buffers = [np.zeros(SIGNAL, np.uint8) for _ in range(signals)]
    if backend == "interpreter":
        found = _interpreter.run(graph, [*inputs, *buffers], weights or {})
        return [np.array(y) for y in found]
    model = session().load(graph, weights_registry=dict(weights or {}))
    tensors = [
        Tensor.from_numpy(np.ascontiguousarray(x)).to(d.to_device())
        for x, d in zip([*inputs, *buffers], [*where, *refs(signals)], strict=True)
    ]
    outputs = model.execute(*tensors)
    for output, type_ in zip(outputs, graph.output_types, strict=True):
        assert output.device == type_.device.to_device()  # type: ignore[attr-defined]
    return [np.array(y.to_numpy()) for y in outputs]
