"""Run with an installed wheel and only the engine's dependencies: a graph compiles and gives the right numbers."""

from importlib.resources import files

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

with Graph("wheel", input_types=[TensorType(DType.float32, ("n", 5), DeviceRef.CPU())]) as graph:
    graph.output(ops.softmax(graph.inputs[0].tensor))
model = InferenceSession(devices=[CPU()]).load(graph)
x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
expected = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
np.testing.assert_allclose(model.execute(x)[0].to_numpy(), expected, rtol=1e-5)
assert files("max").joinpath("py.typed").is_file(), (
    "type checkers ignore a package without py.typed"
)
print("wheel: a graph runs")
