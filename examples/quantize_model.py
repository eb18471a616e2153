"""A whole model in 4, 6 and 8 bits, without calibration data: the size of its weights, and how many answers stay equal.

Each matrix of a two-layer network is encoded by `max.graph.quantization`; products run on the blocks.
"""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding, quantize

cpu = DeviceRef.CPU()
rng = np.random.default_rng(0)
MATRICES = {
    "up": rng.standard_normal((512, 256)).astype(np.float32) / 16,
    "down": rng.standard_normal((10, 512)).astype(np.float32) / 22,
}
x = rng.standard_normal((400, 256)).astype(np.float32)


def answers(encoding: QuantizationEncoding) -> tuple[np.ndarray, int]:
    """The logits of the network with weights of an encoding, and the bytes of the weights."""
    blocks = {name: quantize(matrix, encoding) for name, matrix in MATRICES.items()}
    with Graph("network", input_types=[TensorType(DType.float32, ("n", 256), cpu)]) as graph:
        value = graph.inputs[0].tensor
        for name, matrix in MATRICES.items():
            weight = Weight(name, DType.float32, matrix.shape, cpu, encoding)
            value = ops.qmatmul(encoding, None, value, weight)
            value = ops.gelu(value) if name == "up" else value
        graph.output(value)
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=blocks)
    return model.execute(x)[0].to_numpy(), sum(b.nbytes for b in blocks.values())


def exact() -> np.ndarray:
    """The logits in float32."""
    with Graph("exact", input_types=[TensorType(DType.float32, ("n", 256), cpu)]) as graph:
        up, down = (Weight(n, DType.float32, m.shape, cpu) for n, m in MATRICES.items())
        hidden = ops.gelu(graph.inputs[0].tensor @ ops.transpose(up, 0, 1))
        graph.output(hidden @ ops.transpose(down, 0, 1))
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=MATRICES)
    return model.execute(x)[0].to_numpy()


logits = exact()
size = sum(matrix.nbytes for matrix in MATRICES.values())
bounds = {
    QuantizationEncoding.Q8_0: 0.98,
    QuantizationEncoding.Q6_K: 0.95,
    QuantizationEncoding.Q4_K: 0.85,
}
for encoding, bound in bounds.items():
    result, used = answers(encoding)
    same = np.mean(result.argmax(1) == logits.argmax(1))
    print(
        f"{encoding.name}: {size / used:.1f} times smaller, the same class in over {bound:.0%}:",
        bool(same > bound),
    )

# prints: q8_0: 3.8 times smaller, the same class in over 98%: True
# prints: q6_k: 4.9 times smaller, the same class in over 95%: True
# prints: q4_k: 7.1 times smaller, the same class in over 85%: True
