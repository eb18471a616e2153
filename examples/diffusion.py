"""A diffusion loop inside one execution: noise becomes points of a known distribution, step by step.

The denoiser is exact, because the distribution (four round clusters in the plane) is known; an application has a network
in its place. The loop is DDIM's: the direction from the denoised point to the noisy one, times the change of the noise.
"""

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

cpu = DeviceRef.CPU()
CENTRES = np.array([[2, 2], [2, -2], [-2, 2], [-2, -2]], np.float32)
SPREAD = 0.1  # of a cluster
STEPS = 40


def denoise(x: TensorValue, sigma: TensorValue) -> TensorValue:
    """The mean of the clean point, given one with noise of deviation `sigma`: ``[n, 2]``."""
    variance = sigma * sigma + SPREAD**2
    centers = ops.constant(CENTRES, DType.float32, device=cpu)
    apart = ops.unsqueeze(x, 1) - ops.unsqueeze(centers, 0)  # [n, clusters, 2]
    distance = ops.squeeze(ops.sum(apart * apart, axis=-1), -1)
    weight = ops.softmax(distance * -0.5 / variance)  # the cluster that it came from
    return weight @ centers + (x - weight @ centers) * (SPREAD**2 / variance)


types = [
    TensorType(DType.float32, ("n", 2), cpu),
    TensorType(DType.float32, (STEPS + 1,), cpu),
]
with Graph("diffusion", input_types=types) as graph:
    noise, sigmas = (value.tensor for value in graph.inputs)

    def goes_on(x: TensorValue, step: TensorValue) -> TensorValue:
        return step < STEPS

    def next_point(x: TensorValue, step: TensorValue) -> list[TensorValue]:
        now, after = sigmas[step], sigmas[step + 1]
        direction = (x - denoise(x, now)) / now
        return [x + direction * (after - now), step + 1]

    first = ops.constant(0, DType.int64, device=cpu)
    points, _ = ops.while_loop([noise * sigmas[0], first], goes_on, next_point)
    graph.output(points)

model = InferenceSession(devices=[CPU()]).load(graph)
start = np.random.default_rng(0).standard_normal((1000, 2)).astype(np.float32)
schedule = np.append(np.geomspace(10, 0.01, STEPS), 0).astype(np.float32)
result = model.execute(start, schedule)[0].to_numpy()

distance = np.linalg.norm(result[:, None] - CENTRES, axis=-1)
counts = np.bincount(distance.argmin(1), minlength=len(CENTRES))
print("clusters with at least 150 points:", int((counts >= 150).sum()))
print(f"points near a cluster: {np.mean(distance.min(1) < 0.5):.0%}")

# prints: clusters with at least 150 points: 4
# prints: points near a cluster: 100%
