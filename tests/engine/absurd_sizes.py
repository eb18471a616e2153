"""Stages and runs ops with extreme sizes and amounts: a script for `test_absurd_sizes.py`, as failures would hang.

``python -m tests.engine.absurd_sizes COUNT SEED RUNS``: draws COUNT calls, and runs those that could be staged, up to
RUNS of them. It prints each call that took too long or raised an unexpected error.
"""

from __future__ import annotations

import math
import random
import resource
import signal
import sys
import warnings
from typing import Any

import numpy as np

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import ShapedType, walk
from max.mlir.conditions import MOST_ELEMENTS

DEVICE = DeviceRef.CPU()
SECONDS = 30
EXTREMES = [
    0, 1, 2, 3, 5, 1000, 2**20, 10**9, 2**31, 2**40, 10**12, 2**47, 2**62, 2**63 - 1, 2**63, 2**64 + 3, 10**30, -1, -2,
    -(2**40), -(2**63),
]  # fmt: skip
EXPECTED = (ValueError, TypeError, IndexError, MemoryError, RuntimeError)


class Draw:
    """Draws the numbers of one call."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self) -> int:
        return self.rng.choice(EXTREMES) if self.rng.random() < 0.6 else self.rng.randrange(1, 5)

    def some(self, count: int) -> list[int]:
        return [self() for _ in range(count)]


IMAGE, LINE, GRID = (1, 5, 6, 2), (7,), (3, 1)
CALLS: dict[str, tuple[list[tuple[int, ...]], Any]] = {
    "broadcast_to": ([GRID], lambda d, x: ops.sum(ops.broadcast_to(x, ["a", d()]))),
    "broadcast_to more": ([GRID], lambda d, x: ops.sum(ops.broadcast_to(x, [d(), d(), "a", d()]))),
    "tile": ([GRID], lambda d, x: ops.sum(ops.tile(x, d.some(2)))),
    "repeat_interleave": ([LINE], lambda d, x: ops.sum(ops.repeat_interleave(x, d()))),
    "pad": ([GRID], lambda d, x: ops.sum(ops.pad(x, d.some(4)))),
    "range": ([LINE], lambda d, x: ops.sum(ops.range(d(), d(), d(), dtype=DType.int64, device=DEVICE))),
    "max_pool2d": ([IMAGE], lambda d, x: ops.max_pool2d(x, d.some(2), d(), d(), d())),
    "avg_pool2d": ([IMAGE], lambda d, x: ops.avg_pool2d(x, d.some(2), d(), d(), d())),
    "conv2d": (
        [IMAGE, (3, 3, 2, 4)],
        lambda d, x, w: ops.conv2d(x, w, stride=tuple(d.some(2)), dilation=tuple(d.some(2)), padding=tuple(d.some(4))),
    ),
    "conv2d_transpose": (
        [IMAGE, (3, 3, 4, 2)],
        lambda d, x, w: ops.conv2d_transpose(x, w, stride=tuple(d.some(2)), padding=tuple(d.some(4))),
    ),
    "resize_linear": ([IMAGE], lambda d, x: ops.resize_linear(x, d.some(4))),
    "resize_nearest": ([IMAGE], lambda d, x: ops.resize_nearest(x, d.some(4))),
    "roi_align": (
        [IMAGE, (2, 5)],
        lambda d, x, r: ops.roi_align(x, r, d(), d(), sampling_ratio=d()),
    ),
    "top_k": ([LINE], lambda d, x: ops.top_k(x, d())[0]),
    "fold": ([(1, 9, 4)], lambda d, x: ops.fold(x, tuple(d.some(2)), (3, 3), stride=d(), padding=d())),
    "irfft": ([LINE], lambda d, x: ops.irfft(x, n=d())),
    "hann_window": ([LINE], lambda d, x: ops.hann_window(d(), device=DEVICE)),
    "reshape": ([LINE], lambda d, x: ops.reshape(x, d.some(3))),
    "split": ([LINE], lambda d, x: ops.split(x, d.some(2), 0)[0]),
    "slice": ([LINE], lambda d, x: x[d() : d() : d()]),
    "gather": ([LINE], lambda d, x: ops.gather(x, ops.constant([max(d(), 0) % 2**63], DType.int64, DEVICE), 0)),
    "cumsum": ([GRID], lambda d, x: ops.sum(ops.cumsum(ops.broadcast_to(x, ["a", d()]), 0))),
    "product": ([GRID], lambda d, x: ops.sum(ops.broadcast_to(x, ["a", d()]) @ ops.broadcast_to(x[0:1], [d(), 2]))),
}  # fmt: skip


class TooLong(BaseException):
    pass


def stop(number: int, frame: object) -> None:
    raise TooLong


def stage(name: str, rng: random.Random) -> Graph | None:
    """A drawn call as a graph with symbolic sizes; None if it is refused."""
    shapes, call = CALLS[name]
    # an axis whose size an op needs is static, and so are axes of size 1
    symbolic = name in (
        "broadcast_to",
        "broadcast_to more",
        "tile",
        "repeat_interleave",
        "pad",
        "cumsum",
        "product",
    )
    types = [
        TensorType(
            DType.float32, ["a" if symbolic and not axis else n for axis, n in enumerate(s)], DEVICE
        )
        for s in shapes
    ]
    try:
        with Graph(name.replace(" ", "_"), input_types=types) as graph:
            graph.output(call(Draw(rng), *[value.tensor for value in graph.inputs]))
    except EXPECTED:
        return None
    return graph


LONG = 1 << 32


def most_elements(graph: Graph) -> int:
    """The elements of the largest result."""
    counts = [0]
    for op in walk(graph.mlir_op):
        for result in op.results:
            if isinstance(result.type, ShapedType):
                sizes = [dim.evaluate(dict.fromkeys(dim.symbols, 3)) for dim in result.type.shape]
                counts.append(math.prod(sizes))
    return max(counts)


def main(count: int, seed: int, runs: int) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    signal.signal(signal.SIGALRM, stop)
    session, rng = InferenceSession(devices=[CPU()]), random.Random(seed)
    staged = ran = 0
    for number in range(count):
        name = rng.choice(list(CALLS))
        state = rng.getstate()
        signal.alarm(SECONDS)
        try:
            graph = stage(name, rng)
            if graph is not None:
                staged += 1
                # what would run for minutes or hours is allowed
                if ran < runs and not LONG < most_elements(graph) <= MOST_ELEMENTS:
                    ran += 1
                    session.load(graph).execute(*[np.ones(s, np.float32) for s in CALLS[name][0]])
        except EXPECTED:
            pass
        except BaseException as error:
            rng.setstate(state)
            print(f"call {number} of {name}, {Draw(rng).some(10)}: {error!r}", flush=True)
        finally:
            signal.alarm(0)
    print("done", staged, ran, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
