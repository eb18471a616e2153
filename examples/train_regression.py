"""Fits a line by gradient descent: the weights are a mutable buffer that each execution updates in place."""

import numpy as np

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

cpu = DeviceRef.CPU()
types = [
    BufferType(DType.float32, (2,), cpu),  # slope and intercept
    TensorType(DType.float32, ("n",), cpu),
    TensorType(DType.float32, ("n",), cpu),
]
with Graph("step", input_types=types) as graph:
    weights, x, y = graph.inputs[0].buffer, graph.inputs[1].tensor, graph.inputs[2].tensor
    current = ops.buffer_load(weights)
    error = current[0] * x + current[1] - y
    gradient = ops.concat([ops.mean(2 * error * x), ops.mean(2 * error)])
    ops.buffer_store(weights, current - 0.1 * gradient)
    graph.output(ops.mean(error * error))

model = InferenceSession(devices=[CPU()]).load(graph)
rng = np.random.default_rng(0)
xs = rng.uniform(-1, 1, 256).astype(np.float32)
ys = 3 * xs - 2
weights = Tensor.from_numpy(np.zeros(2, np.float32))
for _ in range(400):
    (loss,) = model.execute(weights, xs, ys)
print("slope and intercept:", weights.to_numpy().round(3).tolist())
print("converged:", bool(loss.to_numpy().item() < 1e-6))

# prints: slope and intercept: [3.0, -2.0]
# prints: converged: True
