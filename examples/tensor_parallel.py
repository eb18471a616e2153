"""A product split along its inner dimension over two virtual CPU devices, and summed by `allreduce`."""

import numpy as np

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.nn import Signals

devices = [DeviceRef.CPU(0), DeviceRef.CPU(1)]
signals = Signals(devices)
types = [
    *(TensorType(DType.float32, ("n", 32), device) for device in devices),
    *(TensorType(DType.float32, (32, 16), device) for device in devices),
    *signals.input_types(),
]
with Graph("parallel", input_types=types) as graph:
    xs, weights = graph.inputs[:2], graph.inputs[2:4]
    buffers = [value.buffer for value in graph.inputs[4:]]
    partial = [x.tensor @ w.tensor for x, w in zip(xs, weights, strict=True)]
    graph.output(*ops.allreduce.sum(partial, buffers))

cpus = [CPU(0), CPU(1)]
model = InferenceSession(devices=cpus).load(graph)
rng = np.random.default_rng(0)
x, weight = rng.standard_normal((3, 64), np.float32), rng.standard_normal((64, 16), np.float32)
operands = [
    Tensor.from_numpy(np.ascontiguousarray(half)).to(device)
    for whole, axis in ((x, 1), (weight, 0))
    for half, device in zip(np.split(whole, 2, axis), cpus, strict=True)
]
for result in model.execute(*operands, *signals.buffers()):
    print(result.device, np.allclose(result.to(CPU()).to_numpy(), x @ weight, atol=1e-4))

# prints: Device(type=cpu,id=0) True
# prints: Device(type=cpu,id=1) True
