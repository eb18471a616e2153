"""Sizes and counts that only a run knows: negative and absurd ones are refused, by engine and interpreter alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max._interpreter.core import InterpreterError
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

ERRORS = (ValueError, IndexError, InterpreterError)
SESSION = InferenceSession(devices=[CPU()])


def both(
    build: Callable[..., Any], shapes: list[tuple[Any, ...]], *arrays: np.ndarray
) -> list[Any]:
    """The results of engine and interpreter, or the errors that they raise."""
    types = [
        TensorType(DType.from_numpy(array.dtype), shape, DeviceRef.CPU())
        for shape, array in zip(shapes, arrays, strict=True)
    ]
    graph = Graph("sizes", lambda *values: build(*[v.tensor for v in values]), types)
    runs: list[Callable[[], Any]] = [
        lambda: SESSION.load(graph).execute(*arrays)[0].to_numpy(),
        lambda: np.asarray(_interpreter.run(graph, list(arrays))[0]),
    ]
    found = []
    for run in runs:
        try:
            found.append(run())
        except ERRORS as error:
            found.append(error)
    return found


def test_broadcast_by_drawn_shapes(rng):
    """Drawn sizes, dims and ranks: NumPy's result, or an error of both."""
    for _ in range(12):
        rank = int(rng.integers(1, 4))
        sizes = rng.integers(-3, 4, rank)
        keep = int(rng.integers(0, rank + 1))
        dims = [1 if rng.random() < 0.6 else int(rng.integers(1, 4)) for _ in range(keep)]
        x = rng.standard_normal(dims).astype(np.float32)
        names = [f"out{axis}" for axis in range(rank)]
        found = both(
            lambda a, s, names=names: ops.broadcast_to(a, s, out_dims=names),
            [tuple(dims), (rank,)],
            x,
            sizes,
        )
        try:
            want = np.broadcast_to(x, sizes)
        except ValueError:
            assert all(isinstance(f, Exception) for f in found), (dims, sizes, found)
            continue
        for result in found:
            np.testing.assert_array_equal(result, want)


@pytest.mark.parametrize("sizes", [[-2], [-1], [-(2**63)]])
def test_negative_sizes(sizes):
    x, shape = np.ones(1, np.float32), np.array(sizes, np.int64)
    for error in both(lambda a, s: ops.broadcast_to(a, s, out_dims=["k"]), [(1,), (1,)], x, shape):
        assert isinstance(error, ValueError) and "broadcast_to: shape" in str(error)
        assert str(sizes[0]) in str(error) and "expected 0 or more" in str(error)


@pytest.mark.parametrize("counts", [[-1], [2**62], [3, -1, 2], [2**61, 2**61, 2**61]])
def test_repeats_that_no_axis_has(counts):
    """One count stands for all elements; their sum is checked, too."""
    x = np.ones(3, np.float32)
    numbers = np.array(counts, np.int64)
    for error in both(
        lambda a, n: ops.repeat_interleave(a, n, axis=0, out_dim="k"),
        [(3,), numbers.shape],
        x,
        numbers,
    ):
        assert isinstance(error, ValueError) and "repeat_interleave: repeats" in str(error)


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", range(4))
def test_empty_images(mode, antialias):
    """An empty axis has no elements to interpolate; empty results have none to compute."""
    empty = np.ones((1, 1, 0, 3), np.float32)

    def resized(size: list[Any]) -> Callable[..., Any]:
        return lambda x: ops.resize_linear(x, size, mode, antialias)

    shape = (1, 1, "h", "w")
    for size in ([1, 1, 4, 4], [1, 1, "w", 4]):
        for error in both(resized(size), [shape], empty):
            assert isinstance(error, ERRORS), error
    for result in both(resized([1, 1, 0, 4]), [shape], empty):
        assert result.shape == (1, 1, 0, 4)
    with pytest.raises(ValueError, match="empty"):
        both(resized([1, 1, 4, 4]), [(1, 1, 0, 3)], empty)
    for other in (ops.resize_nearest, ops.resize_bicubic):
        for error in both(lambda x, f=other: f(x, [1, 1, 4, 4]), [shape], empty):
            assert isinstance(error, ERRORS), error
