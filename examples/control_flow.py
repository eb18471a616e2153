"""A square root by Newton's method: the loop runs inside one execution and ends when the data says so."""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

cpu = DeviceRef.CPU()
scalar = TensorType(DType.float64, (), cpu)
with Graph("newton", input_types=[scalar]) as graph:
    target = graph.inputs[0].tensor

    def goes_on(guess: TensorValue, steps: TensorValue) -> TensorValue:
        return ops.abs(guess * guess - target) > 1e-12

    def step(guess: TensorValue, steps: TensorValue) -> list[TensorValue]:
        return [(guess + target / guess) * 0.5, steps + 1]

    start = ops.constant(1.0, DType.float64, device=cpu)
    count = ops.constant(0, DType.int32, device=cpu)
    root, steps = ops.while_loop([start, count], goes_on, step)
    graph.output(root, steps)

model = InferenceSession(devices=[CPU()]).load(graph)
for value in (2.0, 144.0):
    root, steps = (output.to_numpy() for output in model.execute(np.float64(value)))
    print(f"sqrt({value:g}) = {root:.6f} after {steps} steps")

# prints: sqrt(2) = 1.414214 after 5 steps
# prints: sqrt(144) = 12.000000 after 8 steps
