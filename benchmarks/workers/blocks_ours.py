"""Fused blocks as graphs, compiled and executed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.blocks import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.nn.kernels import topk_fused_sampling

DEVICE = DeviceRef.CPU()
state: dict[str, Any] = {}


def rope(x: TensorValue, cos: TensorValue, sin: TensorValue) -> TensorValue:
    half = int(x.shape[-1]) // 2
    left, right = x[..., :half], x[..., half:]
    return x * cos + ops.concat([-right, left], -1) * sin


def top_k(logits: TensorValue) -> list[TensorValue]:
    values, indices = ops.top_k(logits, 50)
    return [ops.softmax(values), indices]


def attention(q: TensorValue, k: TensorValue, v: TensorValue) -> TensorValue:
    scores = (q @ ops.transpose(k, 2, 3)) * (1 / math.sqrt(int(q.shape[-1])))
    return ops.softmax(scores) @ v


def causal_attention(q: TensorValue, k: TensorValue, v: TensorValue) -> TensorValue:
    later = np.triu(np.full((int(q.shape[-2]), int(k.shape[-2])), -np.inf, np.float32), 1)
    mask = ops.constant(later, DType.float32, DEVICE).cast(q.dtype)
    scores = (q @ ops.transpose(k, 2, 3)) * (1 / math.sqrt(int(q.shape[-1]))) + mask
    return ops.softmax(scores) @ v


def conv(stride: int, padding: int) -> Callable[..., TensorValue]:
    def build(x: TensorValue, w: TensorValue, b: TensorValue) -> TensorValue:
        return ops.relu(ops.conv2d(x, w, (stride, stride), (1, 1), (padding,) * 4) + b)

    return build


BLOCKS: dict[str, Callable[..., Any]] = {
    "rms_norm": lambda x, w: ops.rms_norm(x, w, 1e-6),
    "layer_norm": lambda x, w, b: ops.layer_norm(x, w, b, 1e-5),
    "softmax": ops.softmax,
    "gelu": ops.gelu,
    "gelu chain": lambda x, y: ops.gelu(x * 1.5 + y, "tanh") * ops.sigmoid(y) - x,
    "swiglu": lambda x, y: ops.silu(x) * y,
    "rope": rope,
    "gather": lambda table, ids: ops.gather(table, ids, 0),
    "top 50 of logits": top_k,
    "sampling of the top 50": lambda x: topk_fused_sampling(x, 50, temperature=0.8),
    "sum of axis 0": lambda x: ops.sum(x, 0),
    "sum of axis 1": lambda x: ops.sum(x, 1),
    "sum of axis 2": lambda x: ops.sum(x, 2),
    "max of axis 0": lambda x: ops.max(x, axis=0),
    "max of axis 1": lambda x: ops.max(x, axis=1),
    "max of axis 2": lambda x: ops.max(x, axis=2),
    "mean of axis 2": lambda x: ops.mean(x, 2),
    "transpose": lambda x: ops.transpose(x, 0, 1),
    "transpose of the last axes": lambda x: ops.transpose(x, 1, 2),
    "transpose of the first axes": lambda x: ops.transpose(x, 0, 1),
    "cast": lambda x: x.cast(DType.float32) * 2.0,
    "attention": attention,
    "causal attention": causal_attention,
    "conv 3x3": conv(1, 1),
    "conv 3x3, stride 2": conv(2, 1),
    "conv 1x1": conv(1, 0),
    "conv 1x1, stride 2": conv(2, 0),
    "conv 7x7, stride 2": conv(2, 3),
}


def make(block: str, shape: Sequence[int], dtype: str) -> dict[str, float]:
    arrays, weights = inputs_of(block, shape)
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float32)
    cast = [a if a.dtype.kind == "i" else a.astype(kind) for a in arrays]
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, DEVICE) for a in cast]
    registry = {f"w{i}": w.astype(kind) for i, w in enumerate(weights)}
    with Graph("block", input_types=types) as graph:
        parameters = [
            Weight(name, DType.from_numpy(w.dtype), w.shape, DEVICE) for name, w in registry.items()
        ]
        made = BLOCKS[block](*[v.tensor for v in graph.inputs], *parameters)
        graph.output(*(made if isinstance(made, list) else [made]))
    start = time.perf_counter()
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=registry)
    state["model"], state["inputs"] = model, [Tensor.from_numpy(a) for a in cast]
    (first, *_) = model.execute(*state["inputs"])
    total = float(np.abs(first.to_numpy().astype(np.float64)).sum())
    return {"compile_s": time.perf_counter() - start, "sum": total}


def run(seconds: float) -> dict[str, float]:
    return {"seconds": median_time(lambda: state["model"].execute(*state["inputs"]), seconds, 5)}


if __name__ == "__main__":
    serve({"setup": lambda: {}, "make": make, "run": run})
