"""Products with weights in a graph, as models have them: packed when the graph is loaded."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.runner import serve
from benchmarks.timing import median_time
from benchmarks.workers import limits
from max._backends.cpu.runtime.pool import shared_pool
from max.driver import CPU, Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.graph.quantization import QuantizationEncoding

DEVICE = DeviceRef.CPU()
SCALED = "int8, scaled"
_made: dict[tuple[int, int, str, int, bool], Model] = {}


def setup() -> dict[str, object]:
    return {"threads": shared_pool(None).num_threads}


def measure_limits() -> dict[str, float]:
    return limits.measure(shared_pool(None))


def _weight(rng: np.random.Generator, n: int, k: int, dtype: str) -> np.ndarray:
    if dtype in ("int8", SCALED):
        return rng.integers(-127, 128, (n, k)).astype(np.int8)
    if dtype not in BLOCK_FORMATS:
        return (rng.standard_normal((n, k), np.float32) / math.sqrt(k)).astype(_kind(dtype))
    form = BLOCK_FORMATS[dtype]
    # small bytes keep the scales, which are halves, finite
    return rng.integers(0, 60, (n, k // form.elements * form.bytes), np.uint8)


def _kind(dtype: str) -> np.dtype[Any]:
    """The element type of the rows."""
    if dtype in BLOCK_FORMATS or dtype == SCALED:
        return np.dtype(np.float32)
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _product(x: TensorValue, weight: Weight, scales: Weight, dtype: str) -> TensorValue:
    """`x @ weightᵀ`, as a model has it."""
    if dtype in BLOCK_FORMATS:
        return ops.qmatmul(QuantizationEncoding(dtype), None, x, weight)
    if dtype not in ("int8", SCALED):
        return x @ ops.transpose(weight, 0, 1)
    wide = ops.transpose(weight, 0, 1).cast(DType.int32)
    if dtype == "int8":
        return x.cast(DType.int32) @ wide
    largest = ops.max(ops.abs(x), axis=-1)
    rounded = ops.round(x * (127.0 / largest)).cast(DType.int8)
    return (rounded.cast(DType.int32) @ wide).cast(DType.float32) * (largest / 127.0) * scales


def _model(n: int, k: int, dtype: str, copies: int, epilogue: bool) -> Model:
    """Multiplies by each of some weights, and keeps one element of each product; or, with an epilogue, the sum of SiLU of the products."""
    kind = DType.from_numpy(_kind(dtype))
    encoding = QuantizationEncoding(dtype) if dtype in BLOCK_FORMATS else None
    rng = np.random.default_rng(0)
    one = _weight(rng, n, k, dtype)
    stored = kind if encoding is not None else DType.from_numpy(one.dtype)
    # each product rounds rows of its own, as in the peers
    inputs = [TensorType(kind, ["m", k], DEVICE)] * (copies if dtype == SCALED else 1)
    with Graph("products", input_types=inputs) as graph:
        results: list[Any] = []
        total: TensorValue | None = None
        scales = Weight("scales", DType.float32, (n,), DEVICE)
        for i in range(copies):
            x = graph.inputs[i % len(inputs)].tensor
            weight = Weight(f"w{i}", stored, (n, k), DEVICE, encoding)
            made = _product(x, weight, scales, dtype)
            if epilogue:
                total = ops.silu(made) if total is None else ops.silu(made) + total
            else:
                results.append(made[:1, :1])
        graph.output(*results if total is None else [total])
    registry = {f"w{i}": one for i in range(copies)}
    if dtype == SCALED:
        registry["scales"] = np.full(n, 0.01, np.float32)
    return InferenceSession(devices=[CPU()]).load(graph, weights_registry=registry)


def run(
    m: int, n: int, k: int, dtype: str, copies: int, seconds: float, epilogue: bool = False
) -> dict[str, float]:
    key = (n, k, dtype, copies, epilogue)
    if key not in _made:
        _made.clear()
        _made[key] = _model(n, k, dtype, copies, epilogue)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k), np.float32)
    if dtype == "int8":
        x = rng.integers(-127, 128, (m, k))
    tensors = [Tensor.from_numpy(x.astype(_kind(dtype)))] * (copies if dtype == SCALED else 1)
    return {"seconds": median_time(lambda: _made[key].execute(*tensors), seconds, 3) / copies}


if __name__ == "__main__":
    serve({"setup": setup, "limits": measure_limits, "run": run})
