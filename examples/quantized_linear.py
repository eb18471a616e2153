"""A product with a weight in 4 bits: a seventh of the bytes, and an error of a few per cent."""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.graph.quantization import QuantizationEncoding

cpu = DeviceRef.CPU()
rng = np.random.default_rng(0)
weight = rng.standard_normal((256, 512), np.float32)


def quantize(values: np.ndarray) -> np.ndarray:
    """Rows of Q4_0 blocks, uint8 `[rows, bytes]`: `mo.quantize` as a graph of its own."""
    with Graph("quantize", input_types=[TensorType(DType.float32, values.shape, cpu)]) as graph:
        graph.output(ops.quantize(QuantizationEncoding.Q4_0, graph.inputs[0].tensor))
    return InferenceSession(devices=[CPU()]).load(graph).execute(values)[0].to_numpy()


packed = quantize(weight)
types = [TensorType(DType.float32, ("n", 512), cpu)]
with Graph("linear", input_types=types) as graph:
    blocks = ops.constant(packed, DType.uint8, device=cpu)
    graph.output(ops.qmatmul(QuantizationEncoding.Q4_0, None, graph.inputs[0].tensor, blocks))
model = InferenceSession(devices=[CPU()]).load(graph)

x = rng.standard_normal((8, 512), np.float32)
exact, answer = x @ weight.T, model.execute(x)[0].to_numpy()
error = np.linalg.norm(answer - exact) / np.linalg.norm(exact)
print(f"{weight.nbytes} bytes became {packed.nbytes}")
print("relative error under 12 %:", bool(error < 0.12))

# prints: 524288 bytes became 73728
# prints: relative error under 12 %: True
