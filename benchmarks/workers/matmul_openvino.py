"""Products of float32 rows with int8 weights and scales in OpenVINO, which rounds the rows to int8 where that is faster.

Runs in its own environment (see `benchmarks.peers`).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops

from benchmarks.runner import serve
from benchmarks.timing import median_time

_made: dict[tuple[int, ...], Any] = {}
GROUP = 32
"""Neighbors of a row that share a scale when it is rounded: what it does by default with compressed weights."""


def setup() -> dict[str, object]:
    return {}


def _request(m: int, n: int, k: int, copies: int) -> Any:
    rng = np.random.default_rng(0)
    weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    x = ops.parameter([m, k], np.float32)
    results: list[Any] = []
    for i in range(copies):
        # no two weights are equal, which might make them one
        weight[0, 0], weight[0, 1] = i % 256 - 128, i // 256 % 256 - 128
        wide = ops.convert(ops.constant(weight, openvino.Type.i8), np.float32)
        scaled = ops.multiply(wide, ops.constant(np.full((n, 1), 0.01, np.float32)))
        product = ops.matmul(x, scaled, False, True)
        results.append(ops.slice(product, *(np.array(v) for v in ([0, 0], [1, 1], [1, 1]))))
    options = {
        "INFERENCE_PRECISION_HINT": openvino.Type.f32,
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        "PERFORMANCE_HINT": "LATENCY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
    }
    compiled = openvino.Core().compile_model(openvino.Model(results, [x]), "CPU", options)
    request = compiled.create_infer_request()
    array = rng.standard_normal((m, k), np.float32)
    request.set_input_tensor(openvino.Tensor(array, shared_memory=True))
    # the tensor does not keep the array, nor the request the model
    return request, compiled, array


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    """Seconds for a product."""
    if dtype != "int8, scaled" or epilogue:
        raise NotImplementedError(f"{dtype}, epilogue {epilogue}")
    key = (m, n, k, copies)
    if key not in _made:
        _made.clear()
        _made[key] = _request(m, n, k, copies)
    return {"seconds": median_time(_made[key][0].infer, seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "run": run})
