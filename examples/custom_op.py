"""A softmax over rows as a kernel in Python: vectors of the target's width, rows split over all cores."""

import numpy as np

from max import kernel as k
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops


@k.register("example.row_softmax")
def row_softmax(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context):
    """``out[i] = softmax(x[i])``, in three passes over a row: the maximum, the exponentials' sum, the quotient."""
    for i in ctx.parallel(x.shape[0]):
        top = x[i, 0]
        for j in range(1, x.shape[1]):
            top = k.max(top, x[i, j])
        total = k.f32(0)
        for j in range(x.shape[1]):
            e = k.exp(x[i, j] - top)
            out[i, j] = e
            total += e
        for j in range(x.shape[1]):
            out[i, j] = out[i, j] / total


cpu = DeviceRef.CPU()
x_type = TensorType(DType.float32, ("rows", "columns"), cpu)
with Graph("softmax", input_types=[x_type]) as graph:
    x = graph.inputs[0].tensor
    ours = ops.custom("example.row_softmax", cpu, [x], [x_type])[0].tensor
    graph.output(ours, ops.softmax(x))

model = InferenceSession(devices=[CPU()]).load(graph)
x = np.random.default_rng(0).standard_normal((5, 100), np.float32)
custom, builtin = (output.to_numpy() for output in model.execute(x))
print("as ops.softmax:", np.allclose(custom, builtin, atol=1e-6))
print("rows add up to 1:", np.allclose(custom.sum(-1), 1, atol=1e-5))

# prints: as ops.softmax: True
# prints: rows add up to 1: True
