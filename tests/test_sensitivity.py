"""The bounds of `tests.sensitivity` admit rounding and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.sensitivity import assert_within, interpret

CPU = DeviceRef.CPU()


def bounds(build, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with Graph("g", input_types=[TensorType(DType.float32, x.shape, CPU)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    return interpret(graph, [x])[0]


def test_they_follow_the_conditioning_of_the_graph() -> None:
    x = np.random.default_rng(0).uniform(1, 2, (8, 64)).astype(np.float32)
    value, bound = bounds(lambda x: x * 2.0 + 1.0, x)
    assert (bound < 2e-5 * np.abs(value)).all() and (bound > 1e-7 * np.abs(value)).all()
    # a difference of nearly equal numbers consists of rounding errors, which are as large as those of the numbers
    _, cancelled = bounds(lambda x: ops.exp(x) - ops.exp(x + 1e-6), x)
    assert (cancelled > 1e-6).all() and (cancelled < 1e-3).all()
    _, exact = bounds(lambda x: ops.transpose(ops.abs(x), 0, 1), x)
    assert (exact < 1e-5).all()


def test_what_they_refuse() -> None:
    x = np.random.default_rng(1).uniform(-1, 1, (3, 5)).astype(np.float32)
    value, bound = bounds(lambda x: ops.tanh(x) * 3.0, x)
    assert_within(value, value, bound)
    assert_within(value * np.float32(1 + 2e-7), value, bound)
    wrong = value.copy()
    wrong[1, 2] *= 1.0001
    with pytest.raises(AssertionError, match=r"1 of 15 elements are wrong, the first at \[1, 2\]"):
        assert_within(wrong, value, bound)
    wrong[1, 2] = np.nan
    with pytest.raises(AssertionError):
        assert_within(wrong, value, bound)
    with pytest.raises(AssertionError, match="shape"):
        assert_within(value[:2], value, bound)


def test_infinities_stand_where_they_stand() -> None:
    x = np.array([0.0, 1.0, -1.0], np.float32)
    value, bound = bounds(lambda x: 1.0 / x + ops.log(x), x)
    assert np.isnan(value[2]) and not np.isfinite(value[0])
    assert_within(value, value, bound)
    with pytest.raises(AssertionError):
        assert_within(np.array([1.0, value[1], np.nan], np.float32), value, bound)
