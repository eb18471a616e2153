"""What a graph compiles to: its MLIR, its launches, and where an execution spends its time."""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

x_type = TensorType(DType.float32, ("n", 64), DeviceRef.CPU())
with Graph("block", input_types=[x_type]) as graph:
    x = graph.inputs[0].tensor
    graph.output(ops.softmax(ops.gelu(x) * 2.0 + 1.0))
print(graph)  # the MLIR that was staged; MAX_DUMP=passes prints it after each pass

model = InferenceSession(devices=[CPU()]).load(graph)
with model.profile() as profile:
    for _ in range(10):
        model.execute(np.ones((128, 64), np.float32))
print(profile)  # a line a kernel
data = profile.to_dict()
print("executions:", profile.runs)
print("kernels that the four ops became:", len(data["kernels"]))

# prints: executions: 10
# prints: kernels that the four ops became: 1
