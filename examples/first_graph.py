"""Stages a graph with a symbolic batch, compiles it once, and runs it with several batch sizes."""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

x_type = TensorType(DType.float32, ("batch", 4), DeviceRef.CPU())
with Graph("normalize", input_types=[x_type]) as graph:
    x = graph.inputs[0].tensor
    centered = x - ops.mean(x, axis=-1)
    graph.output(centered / ops.sqrt(ops.mean(centered * centered, axis=-1) + 1e-6))

model = InferenceSession(devices=[CPU()]).load(graph)
for batch in (1, 3):
    rows = np.arange(batch * 4, dtype=np.float32).reshape(batch, 4)
    result = model.execute(rows)[0].to_numpy()
    print(result.shape, np.round(result[0].astype(float), 3).tolist())

# prints: (1, 4) [-1.342, -0.447, 0.447, 1.342]
# prints: (3, 4) [-1.342, -0.447, 0.447, 1.342]
