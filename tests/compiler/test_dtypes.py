"""Regions of every element type: floats against float64, integers and booleans exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.graph.ops.staging.stage import stage
from tests.tolerance import assert_close

SESSION = InferenceSession(devices=[CPU()])
FLOATS = (
    np.dtype("float64"),
    np.dtype("float32"),
    np.dtype("float16"),
    np.dtype(ml_dtypes.bfloat16),
)
INTEGERS = tuple(
    np.dtype(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


def run(build: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    types = [
        TensorType(
            DType.from_numpy(a.dtype),
            [f"d{i}_{j}" if j == 0 else n for j, n in enumerate(a.shape)],
            DeviceRef.CPU(),
        )
        if len({a.shape[:1] for a in arrays}) > 1
        else TensorType(DType.from_numpy(a.dtype), ["n", *a.shape[1:]], DeviceRef.CPU())
        for i, a in enumerate(arrays)
    ]
    with Graph("dtypes", input_types=types) as graph:
        result = build(*(value.tensor for value in graph.inputs))
        graph.output(*(result if isinstance(result, tuple) else (result,)))
    return [o.to_numpy() for o in SESSION.load(graph).execute(*arrays)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 32, 33, 100])
def test_floats(dtype: np.dtype, columns: int, rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((5, columns)).astype(dtype) for _ in range(2))
    f, g = x.astype(np.float64), y.astype(np.float64)

    def build(x, y):
        chain = ops.tanh(x * 2 + y) * ops.sigmoid(y)
        return (
            chain,
            ops.softmax(x + y),
            ops.sum(x * y),
            ops.max(x, axis=0),
            ops.transpose(x - y, 0, 1),
            x > y,
        )

    results = run(build, x, y)
    powers = np.exp((f + g) - (f + g).max(1, keepdims=True))
    wanted = [
        np.tanh(f * 2 + g) / (1 + np.exp(-g)),
        powers / powers.sum(1, keepdims=True),
        (f * g).sum(1, keepdims=True),
        f.max(0, keepdims=True),
        (f - g).T,
        f > g,
    ]
    for got, want in zip(results, wanted, strict=True):
        assert got.dtype == (np.dtype(bool) if want.dtype == bool else dtype)
        assert_close(got, want, None if want.dtype == bool else dtype, scale=2.0)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_wrap(dtype: np.dtype, rng: np.random.Generator) -> None:
    limits = np.iinfo(dtype)
    x, y = (rng.integers(limits.min, limits.max, (6, 45), dtype, endpoint=True) for _ in range(2))
    y[:, ::7] = 0
    x[0, 0], y[0, 0] = limits.min, limits.max if limits.min == 0 else -1

    def build(x, y):
        mixed = (x + y) * (x - y)
        picked = ops.where(x > y, mixed, -x if limits.min else x)
        return (
            mixed,
            picked,
            ops.sum(x),
            ops.max(y, axis=0),
            ops.mod(x, y),
            ops.min(x, y) + ops.abs(y),
        )

    with np.errstate(all="ignore"):
        mixed = (x + y) * (x - y)
        wanted = [
            mixed,
            np.where(x > y, mixed, -x if limits.min else x),
            x.sum(1, keepdims=True, dtype=dtype),
            y.max(0, keepdims=True),
            np.mod(x, y),
            np.minimum(x, y) + np.abs(y),
        ]
    for got, want in zip(run(build, x, y), wanted, strict=True):
        assert got.dtype == want.dtype == dtype
        np.testing.assert_array_equal(got, want)


def test_booleans(rng: np.random.Generator) -> None:
    a, b = (rng.random((4, 37)) < 0.5 for _ in range(2))
    x = rng.standard_normal((4, 37)).astype(np.float32)

    def build(a, b, x):
        both = ops.logical_and(a, ops.logical_not(b))
        return (
            both,
            ops.logical_xor(a, b),
            ops.where(both, x, x * 0),
            ops.cast(a, DType.float32) + x,
            ops.transpose(a, 0, 1),
        )

    both = a & ~b
    for got, want in zip(
        run(build, a, b, x), [both, a ^ b, np.where(both, x, 0), a + x, a.T], strict=True
    ):
        np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("source", (*FLOATS, *INTEGERS), ids=str)
def test_casts(source: np.dtype, rng: np.random.Generator) -> None:
    # values out of range saturate; in NumPy they are undefined
    values = rng.integers(0, 60, (3, 50))
    x = values.astype(source)
    targets = (*FLOATS, *INTEGERS, np.dtype(bool))
    results = run(lambda x: tuple(ops.cast(x + x, DType.from_numpy(t)) for t in targets), x)
    for got, target in zip(results, targets, strict=True):
        twice = values * 2
        if target in FLOATS or source in FLOATS:
            assert_close(
                got, twice.astype(np.float64).astype(target), target if target in FLOATS else None
            )
        else:
            np.testing.assert_array_equal(got, twice.astype(target))


def test_nan_and_infinities() -> None:
    x = np.array([[np.nan, 1, -np.inf, np.inf, 0, -0.0, 2]] * 5, np.float32)
    names = ("relu", "abs", "tanh", "sigmoid", "exp", "silu", "sqrt")
    with np.errstate(all="ignore"):
        silu = x / (1 + np.exp(-x))
        wanted = [
            np.where(np.isnan(x), x, np.maximum(x, 0)), np.abs(x), np.tanh(x), 1 / (1 + np.exp(-x)), np.exp(x),
            np.where(x == -np.inf, np.nan, silu), np.sqrt(x),
        ]  # fmt: skip
    results = run(
        lambda x: (
            *(getattr(ops, n)(x) for n in names),
            ops.max(x),
            ops.sum(x),
            ops.is_nan(x),
            x * 0 == 0,
        ),
        x,
    )
    for name, got, want in zip(names, results, wanted, strict=False):
        if name == "silu":  # x * sigmoid(x) at -inf is NaN or its limit 0
            got, want = np.where(x == -np.inf, 0, got), np.where(x == -np.inf, 0, want)
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=name)
    assert np.isnan(results[7]).all() and np.isnan(results[8]).all()
    np.testing.assert_array_equal(results[9], np.isnan(x))
    np.testing.assert_array_equal(results[10], np.isfinite(x))


@pytest.mark.parametrize("dtype", [DType.from_numpy(d) for d in INTEGERS], ids=str)
def test_integer_division_by_zero_and_of_the_least(dtype: DType) -> None:
    """Division by 0 is 0 (as in max 25.7 on the CPU), the least integer by -1 wraps: compiled, folded, interpreted."""
    info = np.iinfo(dtype.to_numpy())
    wanted = (info.min, info.min + 1, -1, 0, 1, 2, 7, info.max)
    ends = [number for number in wanted if number >= info.min]
    x, y = (np.ravel(side) for side in np.meshgrid(*[np.array(ends, dtype.to_numpy())] * 2))
    with Graph("divide", input_types=[TensorType(dtype, ["n"], DeviceRef.CPU())] * 2) as graph:
        operands = [value.tensor for value in graph.inputs]
        folded = [ops.constant(side, device=DeviceRef.CPU()) for side in (x, y)]
        results = [stage(op, pair) for op in ("div", "mod") for pair in (operands, folded)]
        # the tail of a row, in a region with other ops
        results.append(operands[0] % operands[1] + 1)
        graph.output(*results)
    kernels = SESSION.load(graph)
    with np.errstate(all="ignore"):
        quotients, remainders = x // y, x % y
    quotients[y == 0] = remainders[y == 0] = 0
    for outputs in (kernels.execute(x, y), _interpreter.run(graph, [x, y])):
        arrays = [np.from_dlpack(out) if hasattr(out, "to_numpy") else out for out in outputs]
        for array, expected in zip(
            arrays, [quotients] * 2 + [remainders] * 2 + [remainders + 1], strict=True
        ):
            np.testing.assert_array_equal(array, expected.astype(dtype.to_numpy()))
