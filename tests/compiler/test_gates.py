"""Speed gates without a clock: launches, barriers, bytes moved, arena size and compilations of the graphs of model
layers.

A change that increases one of these numbers needs a reason; one that decreases it updates the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import compile_module
from max._compiler.program.code import Compiled
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

pytestmark = pytest.mark.any_target

DEVICE = DeviceRef.CPU()
H, FFN, HEADS, N = 64, 192, 4, 16
F32 = 4


def tensor(*shape: int | str, dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, shape, DEVICE)


def weight(name: str, *shape: int, dtype: DType = DType.float32) -> TensorValue:
    return ops.cast(Weight(name, dtype, shape, DEVICE), DType.float32)


def linear(x: TensorValue, name: str, size: int, dtype: DType = DType.float32) -> TensorValue:
    w = Weight(name, dtype, (size, int(x.shape[-1])), DEVICE)
    return x @ ops.transpose(ops.cast(w, x.dtype), 0, 1)


def mlp(x: TensorValue) -> TensorValue:
    return linear(ops.silu(linear(x, "gate", FFN)) * linear(x, "up", FFN), "down", H) + x


def attention(x: TensorValue) -> TensorValue:
    """Attention over one sequence, without a cache."""
    q, key, v = (
        ops.transpose(linear(x, name, H).reshape(("n", HEADS, H // HEADS)), 0, 1)
        for name in ("q", "k", "v")
    )
    scores = (q @ ops.transpose(key, 1, 2)) * 0.25
    mixed = ops.softmax(scores) @ v
    return linear(ops.transpose(mixed, 0, 1).reshape(("n", H)), "o", H)


def norm(x: TensorValue, name: str) -> TensorValue:
    return ops.rms_norm(x, Weight(name, DType.float32, (H,), DEVICE), 1e-5)


def layer(x: TensorValue) -> TensorValue:
    h = x + attention(norm(x, "norm1"))
    return mlp(norm(h, "norm2")) + h


def rotate(x: TensorValue) -> TensorValue:
    a, b = x[:, : H // 2], x[:, H // 2 :]
    return ops.concat([a * 0.8 - b * 0.6, b * 0.8 + a * 0.6], 1)


def variance(x: TensorValue) -> TensorValue:
    centered = x - ops.mean(x)
    return centered * ops.rsqrt(ops.mean(centered * centered) + 1e-5)


@dataclass(frozen=True)
class Gate:
    build: Callable[[TensorValue], Any]
    launches: int
    barriers: int
    kernels: int
    bytes: int | None = None
    """Bytes moved with n = 16, for graphs of regions only."""
    arena: int | None = None
    """Bytes of the arena with n = 16."""


X = N * H * F32  # one activation

GATES: dict[str, Gate] = {
    "chain of ten": Gate(lambda x: ops.tanh(ops.exp(-ops.abs(x) * 2 + 1) - x) * ops.sigmoid(x) + x / 3, 1, 0, 1,
        2 * X, 0),
    "softmax": Gate(ops.softmax, 1, 0, 1, 2 * X, 0),
    "logsoftmax of a shifted": Gate(lambda x: ops.logsoftmax(x * 2 + 1), 1, 0, 1, 2 * X, 0),
    "rms_norm": Gate(lambda x: norm(x, "w"), 1, 0, 1, 2 * X + H * F32, 0),
    "residual and rms_norm": Gate(lambda x: norm(x + ops.exp(x), "w"), 1, 0, 1, 2 * X + H * F32, 0),
    "normalization spelt out": Gate(variance, 1, 0, 1, 2 * X, 0),
    "views cost nothing": Gate(
        lambda x: ops.transpose(x.reshape(("n", 4, 16))[:, 1:3, ::2], 0, 1) * 2, 1, 0, 1,
    ),
    "linear with bias and activation": Gate(
        lambda x: ops.gelu(linear(x, "w", FFN) + weight("b", FFN), approximate="tanh"), 1, 0, 1,
    ),
    "mlp": Gate(mlp, 2, 1, 2),
    "rotated halves": Gate(rotate, 1, 0, 1, 2 * X, 0),
    "parts side by side": Gate(
        lambda x: ops.concat([ops.exp(x), ops.softmax(linear(x, "w", H)), x], 1), 4, 1, 4
    ),
    "attention": Gate(attention, 3, 2, 3),
    "layer": Gate(layer, 7, 6, 7),
    "gathered rows": Gate(lambda x: ops.cast(ops.gather(ops.cast(Weight("e", DType.bfloat16, (100, H), DEVICE),
                    DType.float32),
        ops.argmax(x), 0), DType.float32), 3, 2, 3),
}  # fmt: skip


def compiled(build: Callable[[TensorValue], Any]) -> Compiled:
    with Graph("gate", input_types=[tensor("n", H)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    return compile_module(graph.to_mlir(), ["x"], cpu_backends(k.host_target()))[0]


def size(value: Any) -> int:
    return value if isinstance(value, int) else value.evaluate({"n": N})


def arena_bytes(program: Compiled) -> int:
    main = program.main
    return sum(main.static_bytes) + sum(max(size(s) for s in block) for _, block in main.blocks)


@pytest.mark.parametrize("name", GATES)
def test_gate(name: str) -> None:
    gate = GATES[name]
    program = compiled(gate.build)
    main = program.main
    names = [launch.name for launch in main.launches]
    assert len(main.launches) <= gate.launches, names
    assert sum(launch.barrier for launch in main.launches) <= gate.barriers, names
    assert len({launch.kernel for launch in main.launches}) <= gate.kernels, names
    if gate.bytes is not None:
        assert sum(size(b) for b in main.bytes_moved) <= gate.bytes
    if gate.arena is not None:
        assert arena_bytes(program) <= gate.arena


def test_deep_chains_share_memory() -> None:
    """An arena of a few buffers serves any depth."""

    def deep(x: TensorValue) -> TensorValue:
        for i in range(20):
            x = x + linear(ops.tanh(linear(x, f"a{i}", FFN)), f"b{i}", H)
        return x

    # each sum reuses the memory of the previous one
    assert arena_bytes(compiled(deep)) <= N * (FFN + H) * F32


def test_weights_are_laid_out_once() -> None:
    program = compiled(lambda x: mlp(norm(x, "n")))
    assert [launch.name for launch in program.once[0].launches] == ["pack"] * 3
    bf16 = compiled(lambda x: linear(x, "w", FFN, DType.bfloat16))
    assert [launch.name for launch in bf16.once[0].launches] == ["cast", "pack"]
    assert len(bf16.main.launches) == 1
