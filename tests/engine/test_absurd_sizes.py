"""Sizes and amounts beyond what can be computed are refused when an op is staged, or when its sizes are known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from max._config import flags
from max._interpreter.core import InterpreterError
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir.conditions import MOST_ELEMENTS

DEVICE = DeviceRef.CPU()


def graph_of(call, *shapes):
    types = [TensorType(DType.float32, shape, DEVICE) for shape in shapes]
    with Graph("absurd", input_types=types) as graph:
        graph.output(call(*[value.tensor for value in graph.inputs]))
    return graph


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("factor", [MOST_ELEMENTS // 2, 10**14, 2**44, 2**62, 2**63 - 1])
def test_elements_that_are_never_in_memory_count(factor, interpret):
    """Engine and interpreter refuse the same sizes; an empty tensor fits."""
    graph = graph_of(lambda x: ops.sum(ops.broadcast_to(x, ["n", factor])), ["n", 1])
    with flags.override(MAX_INTERPRET=interpret):
        model = InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises(
        (ValueError, InterpreterError),
        match=rf"n \* {factor} is {3 * factor}, expected at most {MOST_ELEMENTS}",
    ):
        model.execute(np.ones((3, 1), np.float32))


def test_products_of_symbols_count():
    graph = graph_of(lambda x: ops.sum(ops.broadcast_to(x, ["n"] * 4)), ["n"])
    model = InferenceSession(devices=[CPU()]).load(graph)
    assert model.execute(np.ones(3, np.float32))[0].to_numpy().sum() == 81
    # 2**64 elements are 0 in 64 bits
    with pytest.raises(ValueError, match=f"is {2**64}, expected at most {MOST_ELEMENTS}"):
        model.execute(np.ones(1 << 16, np.float32))


REFUSED = {
    "broadcast_to": lambda x: ops.broadcast_to(x[:, :1], [4, MOST_ELEMENTS]),
    "tile": lambda x: ops.tile(x, [1, MOST_ELEMENTS]),
    "repeat": lambda x: ops.repeat_interleave(x, MOST_ELEMENTS, 0),
    "pad": lambda x: ops.pad(x, [0, 0, 0, MOST_ELEMENTS]),
    "pad beyond 64 bits": lambda x: ops.pad(x[:0], [0, 0, 2**62, 2**62]),
    "range": lambda x: ops.range(0, 2**62, 1, dtype=DType.int64, device=DEVICE),
    "resize": lambda x: ops.resize_linear(ops.reshape(x, [1, 1, 4, 4]), (1, 1, 2**31, 2**31)),
    "stride": lambda x: ops.max_pool2d(ops.reshape(x, [1, 4, 4, 1]), (2, 2), 2**62),
    "dilation": lambda x: ops.max_pool2d(ops.reshape(x, [1, 4, 4, 1]), (1, 1), 1, 2**62),
    "sampling_ratio": lambda x: ops.roi_align(
        ops.reshape(x, [1, 4, 4, 1]), ops.constant(np.ones((1, 5), np.float32), device=DEVICE), 2, 2,
        sampling_ratio=4097,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_static_sizes_and_amounts_are_refused_when_staged(name):
    with pytest.raises(ValueError, match=r"expected (numbers of )?at most|expected 0 to 4096"):
        graph_of(REFUSED[name], [4, 4])


def test_the_greatest_sizes_are_staged():
    graph_of(lambda x: ops.broadcast_to(x, [4, MOST_ELEMENTS // 4]), [4, 1])
    graph_of(lambda x: ops.broadcast_to(x, [0, MOST_ELEMENTS]), [0, 1])


def draws(count, seed, runs, timeout):
    root = Path(__file__).parents[2]
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.absurd_sizes", str(count), str(seed), str(runs)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert process.stdout.startswith("done"), process.stdout + process.stderr[-2000:]


def test_drawn_calls_end():
    draws(300, 1, 12, 300)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 18))
def test_many_drawn_calls_end(seed):
    draws(600, seed, 250, 840)
