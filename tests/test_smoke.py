"""The smallest path through the whole engine: stage, compile, run, compare with NumPy."""

from __future__ import annotations

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.tolerance import assert_close


def test_a_graph_runs(rng: np.random.Generator) -> None:
    device = DeviceRef.CPU()
    types = [
        TensorType(DType.float32, ("batch", 12), device),
        TensorType(DType.float32, (12, 7), device),
    ]
    with Graph("smoke", input_types=types) as graph:
        x, w = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(ops.gelu(x @ w, approximate="tanh") + 1.0))
    model = InferenceSession(devices=[CPU()]).load(graph)
    for batch in (1, 3, 40):
        a, b = (
            rng.standard_normal((batch, 12), np.float32),
            rng.standard_normal((12, 7), np.float32),
        )
        (out,) = model.execute(a, b)
        y = a.astype(np.float64) @ b
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))) + 1
        y = np.exp(y - y.max(-1, keepdims=True))
        assert_close(out.to_numpy(), y / y.sum(-1, keepdims=True))
