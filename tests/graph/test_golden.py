"""The MLIR that each family of ops stages, as text under ``tests/golden/mo``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max import mlir
from max.dtype import DType
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    TensorType,
    TensorValue,
    Weight,
    ops,
)


@k.register("attend")
def attend_kernel(out: k.Output, cache: k.InOut, x: k.Input, *, causal, window, ctx: k.Context):
    pass


@k.register("rotate")
def rotate_kernel(out: k.Output, x: k.Input, *, dtype, ctx: k.Context):
    pass


CPU = DeviceRef.CPU()


def tensor(*shape: Any, dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, shape, CPU)


def buffer(*shape: Any) -> BufferType:
    return BufferType(DType.float32, shape, CPU)


def elementwise(x: TensorValue, y: TensorValue) -> Any:
    gated = ops.silu(x) * y + 1
    return ops.where(x > y, ops.gelu(gated, "tanh"), -x), ops.cast(x, DType.bfloat16) / 3, x // y


def shape(x: TensorValue, y: TensorValue) -> Any:
    merged = ops.concat([x.reshape([-1, 2, 2]).transpose(0, 1).flatten(1), ops.tile(y, [2, 1])], 1)
    padded = ops.pad(x[1:, ::-1], [0, 0, 1, 2], value=-1)
    count = ops.range(0, x.shape[0], dtype=DType.int64, device=CPU)
    return merged, padded, ops.split(x, [1, 3], 1)[1], count, x.rebind(["k", 4], "rows")


def gather(x: TensorValue, i: TensorValue) -> Any:
    picked = ops.gather(x, i, 0)
    pairs = ops.gather_nd(x, ops.stack([i, i], -1))
    dynamic = x[(slice(i[0], None), "rest"), 1]
    return picked, pairs, dynamic, ops.scatter_nd(x, picked, ops.unsqueeze(i, -1))


def reduction(x: TensorValue) -> Any:
    return (
        *(ops.sum(x, 0), x.mean(), x.max(), ops.argmax(x), ops.cumsum(x, reverse=True)),
        *(ops.softmax(x), ops.logsoftmax(x, 0), *ops.top_k(x, 2)),
    )


def normalization(x: TensorValue, w: TensorValue) -> Any:
    return ops.rms_norm(x, w, 1e-5), ops.layer_norm(x, w, np.zeros(4), 1e-6), x.var()


def matmul(x: TensorValue, y: TensorValue) -> Any:
    batched = x.reshape(["n", 1, 2, 2]) @ np.eye(2).reshape(1, 2, 2)
    return x @ y, batched, x[0] @ y, ops.outer(x[0], x[1])


def constant(x: TensorValue) -> Any:
    weight = Weight("w", DType.float32, (4, 4), CPU, align=64)
    big = ops.constant(np.zeros((4, 100), np.float32))
    return (
        x @ weight @ big,
        ops.constant([float("nan"), -0.0, 0.1]),
        ops.constant(True),
        x.to(DeviceRef.GPU()),
    )


def buffers(x: TensorValue, b: BufferValue) -> Any:
    b[1:3] = x[:2] * 2
    scratch = ops.buffer_create(buffer("n", 4))
    scratch[...] = x
    return b[0], scratch[...]


def branches(x: TensorValue, p: TensorValue, b: BufferValue) -> Any:
    def body(i: TensorValue, s: TensorValue) -> Any:
        ops.buffer_store(b, ops.buffer_load(b) + 1)
        (chosen,) = ops.cond(p, [s.type], lambda: s + x, lambda: s)
        return [i + 1, chosen]

    zero = ops.constant(0, DType.int64, device=CPU)
    return ops.while_loop([zero, x], lambda i, _: i < 3, body)


def control(x: TensorValue, b: BufferValue) -> Any:
    def layer(x: TensorValue, cache: BufferValue) -> TensorValue:
        (y,) = ops.inplace_custom(
            "attend", CPU, [cache, x], [x.type], {"causal": True, "window": 8}
        )
        return y.tensor @ Weight("wo", DType.float32, (4, 4), CPU)

    graph = Graph.current
    block = graph.add_subgraph("block", layer, [tensor("rows", 4), buffer("pages", 4)])
    double = graph.add_subgraph("double", lambda x: x * 2, [tensor("rows", 4)])
    for i in range(2):
        (x,) = ops.call(block, x, b, prefix=f"layers.{i}.")
    (y,) = ops.call(double, x.tensor[1:])
    (z,) = ops.custom("rotate", CPU, [y], [tensor(Dim("n") * 2)], {"dtype": DType.float16})
    return y, z


FAMILIES: list[tuple[str, Callable[..., Any], list[Any]]] = [
    ("elementwise", elementwise, [tensor("n", 4), tensor(4)]),
    ("shape", shape, [tensor("n", 4), tensor(1, "m")]),
    ("gather", gather, [tensor("n", 4), tensor("m", dtype=DType.int64)]),
    ("reduction", reduction, [tensor("n", 4)]),
    ("normalization", normalization, [tensor("n", 4), tensor(4)]),
    ("matmul", matmul, [tensor("n", 4), tensor(4, "m")]),
    ("constant", constant, [tensor("n", 4)]),
    ("buffer", buffers, [tensor("n", 4), buffer("pages", 4)]),
    ("control", control, [tensor("n", 4), buffer("pages", 4)]),
    ("branches", branches, [tensor("n", 4), tensor(dtype=DType.bool), buffer("pages", 4)]),
]


@pytest.mark.parametrize(("name", "forward", "types"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_staged_text(
    name: str, forward: Callable[..., Any], types: list[Any], golden: Callable[[str, str], None]
) -> None:
    module = Graph(name, forward, types).to_mlir()
    mlir.verify_module(module)
    text = str(module)
    assert mlir.parse_module(text, mlir.resources(module)).is_structurally_equivalent(module)
    golden(text, f"mo/{name}.mlir")
