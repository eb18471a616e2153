"""Where a model spends its time: a profile by kernel, a trace for Perfetto, and what quantizing changes."""

import tempfile
from pathlib import Path

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

cpu = DeviceRef.CPU()
DIM, HIDDEN, LAYERS = 256, 512, 3


def mlp(x: TensorValue, layer: int) -> TensorValue:
    """A norm and a gated product, added to the input."""
    shapes = {"gate": [HIDDEN, DIM], "up": [HIDDEN, DIM], "down": [DIM, HIDDEN]}
    gate, up, down = (
        ops.transpose(Weight(f"layers.{layer}.{name}", DType.float32, shape, cpu), 0, 1)
        for name, shape in shapes.items()
    )
    h = ops.rms_norm(x, ops.constant(np.ones(DIM, np.float32), DType.float32, device=cpu), 1e-6)
    return x + (ops.silu(h @ gate) * (h @ up)) @ down


with Graph("layers", input_types=[TensorType(DType.float32, ("n", DIM), cpu)]) as graph:
    x = graph.inputs[0].tensor
    for layer in range(LAYERS):
        x = mlp(x, layer)
    graph.output(x)

rng = np.random.default_rng(0)
weights = {
    f"layers.{layer}.{name}": rng.standard_normal(shape).astype(np.float32) * 0.05
    for layer in range(LAYERS)
    for name, shape in (("gate", (HIDDEN, DIM)), ("up", (HIDDEN, DIM)), ("down", (DIM, HIDDEN)))
}
model: Model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=weights)
inputs = rng.standard_normal((4, DIM)).astype(np.float32)
model.execute(inputs)  # the first execution allocates memory

with model.profile() as profile:
    for _ in range(20):
        model.execute(inputs)
print(profile)  # a line a kernel, the one with the most time first

data = profile.to_dict()
shares = [kernel["share"] for kernel in data["kernels"]]
with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "trace.json"
    profile.write_chrome_trace(trace)  # open it at ui.perfetto.dev
    print("the trace has the launches:", "packed" in trace.read_text())
print("executions:", profile.runs)
print("the shares add up to 1:", abs(sum(shares) - 1) < 1e-6)
print("launches a layer:", len(model.kernel_summaries) // LAYERS)

# prints: the trace has the launches: True
# prints: executions: 20
# prints: the shares add up to 1: True
# prints: launches a layer: 2
