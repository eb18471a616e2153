"""Eager tensors: a call from Python to the value, against torch eager and `torch.compile`, in turns.

GPT-2 is the model of `tests/experimental/models.py` of 12 layers and 768 channels, one token with a cache of 128:
recorded op by op, and the same module compiled (`Module.compile`). A million ops shows whether programs and memory grow.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from max.dtype import DType
from max.experimental import Tensor
from max.experimental import functional as F
from max.experimental.programs.programs import compiled_programs
from max.graph import DeviceRef, TensorType
from max.nn.module_v3 import Module
from tests.experimental.models import GPT2

HEAD = [
    "| what | ours, µs | torch eager | torch.compile | eager / ours | compiled / ours |",
    "|---|---|---|---|---|---|",
]
TURNS = 5


def twenty(x: Any, tanh: Callable[[Any], Any]) -> Any:
    """20 element-wise ops."""
    for _ in range(4):
        x = tanh(x * 1.01 + 0.5) * x - 0.25
    return x


def _turns(calls: dict[str, Callable[[], object]], seconds: float = 0.4) -> dict[str, float]:
    """The median µs of each call, of turns in which each is repeated for a time."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(TURNS + 1):
        for name, call in calls.items():
            times: list[float] = []
            begin = time.perf_counter()
            while not times or time.perf_counter() - begin < seconds:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            if turn:
                medians[name].append(statistics.median(times))
    return {name: statistics.median(values) * 1e6 for name, values in medians.items()}


def measure() -> Iterator[str]:
    """The table."""
    import torch

    yield from HEAD
    torch.set_num_threads(2)
    compiled = torch.compile(lambda t: twenty(t, torch.tanh))
    one = torch.compile(lambda t: t + 1.0)
    for name, size, ours, eager, peer in (
        ("20 element-wise ops on 1M elements", 1 << 20, lambda x: twenty(x, F.tanh), lambda t: twenty(t, torch.tanh), compiled),
        ("one op on 16 elements", 16, lambda x: x + 1.0, lambda t: t + 1.0, one),
    ):  # fmt: skip
        array = np.linspace(-1, 1, size, dtype=np.float32)
        x, t = Tensor.from_dlpack(array), torch.from_numpy(array)
        with torch.inference_mode():
            got = _turns({
                "ours": lambda: ours(x).realize,  # noqa: B023
                "eager": lambda: eager(t),  # noqa: B023
                "compiled": lambda: peer(t),  # noqa: B023
            })  # fmt: skip
        yield (
            f"| {name} | {got['ours']:.1f} | {got['eager']:.1f} | {got['compiled']:.1f} "
            f"| {got['eager'] / got['ours']:.2f} | {got['compiled'] / got['ours']:.2f} |"
        )
    yield _gpt2()
    yield _million()


class _Step(Module):
    """A step of GPT-2 with its cache as inputs and outputs in a row."""

    def __init__(self, model: GPT2) -> None:
        self.model = model

    def __call__(self, tokens: Tensor, positions: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        past = list(zip(caches[::2], caches[1::2], strict=True))
        logits, present = self.model(tokens, positions, past)
        return (logits, *[part for layer in present for part in layer])


def _gpt2(layers: int = 12, heads: int = 12, dim: int = 768, context: int = 128) -> str:
    model = _Step(GPT2(50257, 1024, dim, heads, layers))
    device = DeviceRef.CPU()
    cache_type = TensorType(DType.float32, [heads, "past", dim // heads], device)
    tokens = TensorType(DType.int64, ["t"], device)
    compiled = model.compile(tokens, tokens, *[cache_type] * (2 * layers))
    token, position = (
        Tensor.constant([5], dtype=DType.int64),
        Tensor.constant([context], dtype=DType.int64),
    )
    caches = [
        Tensor.from_dlpack(np.zeros((heads, context, dim // heads), np.float32))
        for _ in range(2 * layers)
    ]

    def eager() -> None:
        logits = model(token, position, *caches)[0]
        _ = logits.realize

    got = _turns({"ours": eager, "compiled": lambda: compiled(token, position, *caches)}, 2.0)
    return (
        f"| a token of GPT-2 124M, eager; compiled by `Module.compile` | {got['ours']:.0f} | | {got['compiled']:.0f} (ours) "
        f"| | {got['compiled'] / got['ours']:.2f} |"
    )


def _million() -> str:
    x = Tensor.from_dlpack(np.float32([1.0, 2.0]))
    y = x
    for _ in range(5000):
        y = y * 0.5 + 1.0
    programs, memory = compiled_programs(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    for _ in range(500_000):
        y = y * 0.5 + 1.0
    _ = y.realize
    each = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    return (
        f"| a million ops, µs for each; {compiled_programs() - programs} programs compiled, {grown:.0f} MB grown "
        f"| {each:.2f} | | | | |"
    )


if __name__ == "__main__":
    for line in measure():
        print(line, flush=True)
