"""Products with weights in a graph, as models have them: packed when the graph is loaded."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.runner import serve
from benchmarks.timing import median_time
from benchmarks.workers import limits
from max._runtime.pool import shared_pool
from max.driver import CPU, Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding

DEVICE = DeviceRef.CPU()
_made: dict[tuple[int, int, str, int, bool], Model] = {}


def setup() -> dict[str, object]:
    return {"threads": InferenceSession(devices=[CPU()])._pool.num_threads}


def measure_limits() -> dict[str, float]:
    return limits.measure(shared_pool(None))


def _weight(rng: np.random.Generator, n: int, k: int, dtype: str) -> np.ndarray:
    if dtype not in BLOCK_FORMATS:
        return (rng.standard_normal((n, k), np.float32) / math.sqrt(k)).astype(_kind(dtype))
    form = BLOCK_FORMATS[dtype]
    # small bytes keep the scales, which are halves, finite
    return rng.integers(0, 60, (n, k // form.elements * form.bytes), np.uint8)


def _kind(dtype: str) -> np.dtype[Any]:
    if dtype in BLOCK_FORMATS:
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _model(n: int, k: int, dtype: str, copies: int, epilogue: bool) -> Model:
    """Multiplies by each of some weights, and keeps one element of each product; or, with an epilogue, the sum of SiLU of the products."""
    kind = DType.from_numpy(_kind(dtype))
    encoding = QuantizationEncoding(dtype) if dtype in BLOCK_FORMATS else None
    rng = np.random.default_rng(0)
    one = _weight(rng, n, k, dtype)
    with Graph("products", input_types=[TensorType(kind, ["m", k], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        results: list[Any] = []
        total: TensorValue | None = None
        for i in range(copies):
            weight = Weight(f"w{i}", kind, (n, k), DEVICE, encoding)
            if encoding is None:
                made = x @ ops.transpose(weight, 0, 1)
            else:
                made = ops.qmatmul(encoding, None, x, weight)
            if epilogue:
                total = ops.silu(made) if total is None else ops.silu(made) + total
            else:
                results.append(made[:1, :1])
        graph.output(*results if total is None else [total])
    registry = {f"w{i}": one for i in range(copies)}
    return InferenceSession(devices=[CPU()]).load(graph, weights_registry=registry)


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    key = (n, k, dtype, copies, epilogue)
    if key not in _made:
        _made.clear()
        _made[key] = _model(n, k, dtype, copies, epilogue)
    rng = np.random.default_rng(0)
    x = Tensor.from_numpy(rng.standard_normal((m, k), np.float32).astype(_kind(dtype)))
    return {"seconds": median_time(lambda: _made[key].execute(x), seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "limits": measure_limits, "run": run})
