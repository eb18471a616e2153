"""What an execution costs beside its kernels, and how compile time grows with the graph.

Chains do not fuse (cumulative sums, products of 8 by 8), so that each op is a launch. "Staged" is the time to build the graph, "compiled" from
there to the first result with empty caches, "again" to load it another time in the same process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.runner import exit_on_sigterm, machine
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops

DEVICE = DeviceRef.CPU()
CHAIN = 1000
SIZES = (100, 1_000, 5_000, 20_000)
HEAD = ["| what | ours, µs | torch eager, µs |", "|---|---|---|"]
COMPILE_HEAD = ["| graph | ops | staged, s | compiled, s | again, s |", "|---|---|---|---|---|"]


def _median(call: Callable[[], object], seconds: float = 0.5) -> float:
    call()
    times: list[float] = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _repeat(step: Callable[[Any], Any], count: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(count):
            x = step(x)
        return x

    return run


def measure() -> Iterator[str]:
    """The table of executions, in µs; of a chain for one of its ops."""
    import torch

    torch.set_num_threads(1)
    cases: list[tuple[str, Any, Any, tuple[int, ...], int]] = [
        ("an empty graph", lambda x: x, lambda x: x, (16,), 1),
        ("one add", lambda x: x + 1.0, lambda x: x + 1.0, (16,), 1),
        ("an op of 1,000 that fuse", _repeat(lambda x: x * 1.0001 + 0.5, CHAIN // 2), _repeat(lambda x: x * 1.0001 + 0.5, CHAIN // 2), (16,), CHAIN),
        ("a cumulative sum of 1,000", _repeat(lambda x: ops.cumsum(x), CHAIN), _repeat(lambda x: x.cumsum(-1), CHAIN), (8, 8), CHAIN),
        ("a product of 1,000", _repeat(lambda x: x @ x, CHAIN), _repeat(lambda x: x @ x, CHAIN), (8, 8), CHAIN),
    ]  # fmt: skip
    yield from HEAD
    session = InferenceSession(devices=[CPU()])
    for name, build, eager, shape, count in cases:
        with Graph("chain", input_types=[TensorType(DType.float32, shape, DEVICE)]) as graph:
            graph.output(build(graph.inputs[0].tensor))
        model = session.load(graph)
        array = np.eye(8, dtype=np.float32) if len(shape) == 2 else np.ones(shape, np.float32)
        x, t = Tensor.from_numpy(array), torch.from_numpy(array)
        with torch.inference_mode():
            peer = _median(lambda: eager(t)) / count  # noqa: B023
        ours = _median(lambda: model.execute(x)) / count  # noqa: B023
        yield f"| {name} | {ours:.2f} | {peer:.2f} |"


def _chain(x: TensorValue, count: int, _: dict[str, Any]) -> TensorValue:
    for i in range(count):
        x = x * 1.0001 if i % 2 else ops.tanh(x)
    return x


def _layers(x: TensorValue, count: int, registry: dict[str, Any]) -> TensorValue:
    """Layers of a product with a weight of its own, a bias, gelu, the residual and a softmax."""
    for i in range(0, count, 8):
        registry[f"w{i}"], registry[f"b{i}"] = (
            np.eye(64, dtype=np.float32),
            np.zeros(64, np.float32),
        )
        weight = Weight(f"w{i}", DType.float32, (64, 64), DEVICE)
        bias = Weight(f"b{i}", DType.float32, (64,), DEVICE)
        hidden = ops.gelu(x @ ops.transpose(weight, 0, 1) + bias, "tanh")
        x = ops.softmax(x + hidden)
    return x


def measure_compiling(sizes: tuple[int, ...] = SIZES) -> Iterator[str]:
    """The table of compile times."""
    yield from COMPILE_HEAD
    for name, build in (("a chain", _chain), ("layers", _layers)):
        for count in sizes:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["MAX_CACHE_DIR"] = cache
                registry: dict[str, Any] = {}
                start = time.perf_counter()
                types = [TensorType(DType.float32, ("n", 64), DEVICE)]
                with Graph("graph", input_types=types) as graph:
                    graph.output(build(graph.inputs[0].tensor, count, registry))
                staged = time.perf_counter()
                for _ in range(2):
                    session = InferenceSession(devices=[CPU()])
                    model = session.load(graph, weights_registry=registry)
                    model.execute(np.ones((2, 64), np.float32))
                    if _ == 0:
                        compiled = time.perf_counter()
                end = time.perf_counter()
                yield (
                    f"| {name} | {count} | {staged - start:.2f} | {compiled - staged:.2f} "
                    f"| {end - compiled:.2f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    exit_on_sigterm()
    print(machine())
    for lines in (measure(), measure_compiling()):
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
