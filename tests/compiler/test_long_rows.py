"""Reductions of one long row are split over the workers; the result does not depend on their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.tolerance import assert_close

SESSIONS = [InferenceSession(devices=[CPU()], num_threads=n) for n in (1, 2, 3)]


def build(x: TensorValue) -> list[Any]:
    return [*build_of_any(x), ops.max(x, axis=0)]


def build_of_any(x: TensorValue) -> list[Any]:
    """Reductions that are defined for zero elements."""
    centered = x - ops.mean(x, 0)
    return [
        ops.softmax(x, 0),
        ops.sum(x, 0),
        centered * ops.rsqrt(ops.mean(centered * centered, 0) + 1.0),
    ]


SIZES = (1, 5, 4096, 4097, 40_000, 100_003)


def test_no_elements() -> None:
    type_ = TensorType(DType.float32, ("n",), DeviceRef.CPU())
    empty = np.zeros(0, np.float32)
    for session in SESSIONS:
        sums = session.load(Graph("sums", lambda x: build_of_any(x.tensor), [type_]))
        parts, total, scaled = [y.to_numpy() for y in sums.execute(empty)]
        assert parts.size == scaled.size == 0 and total.tolist() == [0.0]
        whole = session.load(Graph("whole", lambda x: build(x.tensor), [type_]))
        with pytest.raises(ValueError, match="max: axis 0 .* is empty: n is 0"):
            whole.execute(empty)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_long_row(size: int, static: bool, rng: np.random.Generator) -> None:
    with Graph(
        "row", input_types=[TensorType(DType.float32, (size if static else "n",), DeviceRef.CPU())]
    ) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    x = rng.standard_normal(size, np.float32)
    results = [[o.to_numpy() for o in s.load(graph).execute(x)] for s in SESSIONS]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    for got, want in zip(results[0], _interpreter.run(graph, [x.astype(np.float32)]), strict=True):
        assert_close(got, want, scale=4.0)


def test_a_long_chain_over_rows(rng):
    """A chain longer than a kernel allows is split."""
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 24], DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
        for _ in range(150):
            x = ops.softmax(3.0 * x)
        graph.output(x)
    x = rng.standard_normal((5, 24)).astype(np.float32)
    (found,) = InferenceSession().load(graph).execute(x)
    for _ in range(150):
        e = np.exp(3 * x - (3 * x).max(-1, keepdims=True))
        x = e / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.to_numpy(), x, rtol=1e-4, atol=1e-6)
