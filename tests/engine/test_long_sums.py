"""Sums of up to 10⁸ elements, and normalizations of rows that are nearly constant, against float64."""

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
from max.experimental import array_api as xp
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

SESSION = InferenceSession(devices=[CPU()])
BOUND = {DType.float32: 4e-6, DType.float64: 3e-14}
"""The tolerated error of a sum relative to the sum of magnitudes: the worst case is 136 or 520 roundings."""


def run(
    build: Callable[[TensorValue], Any], x: np.ndarray, shape: tuple[int | str, ...]
) -> np.ndarray:
    type_ = TensorType(DType.from_numpy(x.dtype), shape, DeviceRef.CPU())
    graph = Graph("sums", lambda value: build(value.tensor), [type_])
    (result,) = SESSION.load(graph).execute(x)
    return result.to_numpy()


def check_sums(x: np.ndarray, axis: int, shape: tuple[int | str, ...]) -> None:
    wide = x.astype(np.float64)
    dtype = DType.from_numpy(x.dtype)
    limit = BOUND[dtype if dtype is DType.float64 else DType.float32]

    def sums(value: TensorValue) -> Any:
        return ops.sum(value.cast(DType.float32) if dtype.size_in_bytes < 4 else value, axis)

    want = np.moveaxis(wide, axis, -1).copy().sum(-1)
    got = run(sums, x, shape).reshape(want.shape)
    weight = np.moveaxis(np.abs(wide), axis, -1).copy().sum(-1)
    assert np.all(np.abs(got - want) <= limit * weight), (np.abs(got - want) / weight).max()


def drawn(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Equal elements, whose roundings do not cancel; positive elements; elements of both signs."""
    if kind == "equal":
        return np.full(shape, rng.uniform(0.05, 0.2), np.float32)
    x = rng.random(shape, np.float32)
    return x if kind == "positive" else x - np.float32(0.4)


@pytest.mark.parametrize("kind", ["equal", "positive", "both signs"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((10**7,), 0), ((5, 10**6), 1), ((10**5, 40), 0), ((3, 50_000, 24), 1)]
)
@pytest.mark.parametrize("static", [True, False])
def test_sums_of_many(kind, shape, axis, static, rng):
    x = drawn(rng, kind, shape)
    check_sums(x, axis, shape if static else tuple(f"d{i}" for i in range(len(shape))))


@pytest.mark.parametrize("kind", ["equal", "positive", "both signs"])
@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_about_a_piece(kind, axis, rng):
    """Sizes around whole pieces of rows and columns, also of a shape that is compiled once for all sizes."""
    for size in (1, 15, 16, 127, 128, 129, 1000, 2047, 2048, 2049, 8191, 8192, 8193):
        x = drawn(rng, kind, (3, size) if axis else (size, 3))
        check_sums(x, axis, ("m", "n"))
        if size in (127, 128, 129, 8192, 8193):
            check_sums(x, axis, x.shape)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("shape", "axis"), [((2 * 10**6,), 0), ((60_000, 33), 0), ((3, 10**5), 1)])
def test_sums_of_other_dtypes(dtype, shape, axis, rng):
    check_sums(rng.random(shape).astype(dtype), axis, ("n", *shape[1:]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_that_overflows(dtype):
    """Infinities and NaN stay as in plain sums, also of many pieces."""
    most = np.finfo(dtype).max
    for parts, want in [
        ([1, np.inf, 2], np.inf),
        ([1, -np.inf, 2], -np.inf),
        ([np.inf, 1, -np.inf], np.nan),
        ([np.nan, 1, 2], np.nan),
        ([most, most, 0], np.inf),
    ]:
        row = np.repeat(np.array(parts, dtype), 20_000)
        row[row == most] /= 30_000
        if want == np.inf and most in parts:
            row *= 4
        for x, axis, shape in [
            (row, 0, ("n",)),
            (np.stack([row, row]), 1, (2, "n")),
            (np.stack([row] * 32, 1), 0, ("n", 32)),
        ]:
            got = run(lambda v, axis=axis: ops.sum(v, axis), x, shape)
            np.testing.assert_array_equal(got, np.full(got.shape, want, dtype))
        sums = run(lambda v: ops.cumsum(v, 0), row, ("n",))
        np.testing.assert_array_equal(sums[-1], np.asarray(want, dtype))


@pytest.mark.parametrize("kind", ["equal", "positive", "both signs"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((4 * 10**6,), 0), ((10**5, 21), 0), ((2, 10**5, 17), 1)]
)
def test_cumulative_sums_of_many(kind, shape, axis, rng):
    x = drawn(rng, kind, shape)
    want = np.cumsum(x, axis, dtype=np.float64)
    weight = np.cumsum(np.abs(x), axis, dtype=np.float64)
    for exclusive, reverse in [(False, False), (True, True)]:
        got = run(
            lambda v, e=exclusive, r=reverse: ops.cumsum(v, axis, exclusive=e, reverse=r),
            np.flip(x, axis).copy() if reverse else x,
            ("n", *shape[1:]),
        )
        if reverse:
            got = np.flip(got, axis)
        expected = want
        if exclusive:
            cut = np.moveaxis(want, axis, 0)
            expected = np.moveaxis(np.concatenate([np.zeros_like(cut[:1]), cut[:-1]]), 0, axis)
        assert np.all(np.abs(got - expected) <= 2.5e-7 * weight)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["equal", "positive"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((10**8,), 0), ((2, 5 * 10**7), 1), ((3 * 10**6, 32), 0)]
)
def test_sums_of_very_many(kind, shape, axis, rng):
    check_sums(drawn(rng, kind, shape), axis, ("n", *shape[1:]))


def constant(value: float, size: int) -> TensorValue:
    return ops.constant(np.full(size, value, np.float32), DType.float32, DeviceRef.CPU())


def layer_norm(x: TensorValue, axis: int, epsilon: float) -> TensorValue:
    size = int(x.shape[-1])
    return ops.layer_norm(x, constant(1, size), constant(0, size), epsilon)


def spelled_out(x: TensorValue, axis: int, epsilon: float) -> TensorValue:
    centered = x - ops.mean(x, axis)
    return centered * ops.rsqrt(ops.mean(centered * centered, axis) + epsilon)


def with_sums(x: TensorValue, axis: int, epsilon: float) -> TensorValue:
    size = int(x.shape[axis])
    centered = x - ops.sum(x, axis) / size
    return centered / ops.sqrt(ops.sum(centered**2, axis) * (1 / size) + epsilon)


def after_a_residual(x: TensorValue, axis: int, epsilon: float) -> TensorValue:
    return layer_norm(x + ops.relu(x * 0.0), axis, epsilon)


FORMS = [layer_norm, spelled_out, with_sums, after_a_residual]


def near_constant_rows(rng: np.random.Generator, size: int, level: float) -> np.ndarray:
    """Equal elements; two neighboring floats; deviations far below the level; at the level's size; one far off."""
    level = np.float32(level)
    rows = np.full((5, size), level, np.float32)
    rows[1, rng.random(size) < 0.5] = np.nextafter(level, np.float32(np.inf))
    rows[2] += rng.standard_normal(size, np.float32) * level * np.float32(1e-4)
    rows[3] = rng.standard_normal(size, np.float32) * level
    rows[4, size // 2] = 3 * level
    return rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [2, 16, 127, 128, 129, 768, 40_001])
@pytest.mark.parametrize(("level", "epsilon"), [(12345.678, 1e-5), (31.7, 1e-12), (0.1, 1e-6)])
def test_norms_of_nearly_constant_rows(form, size, level, epsilon, rng):
    x = near_constant_rows(rng, size, level)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    want = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon)
    got = run(lambda v: form(v, -1, epsilon), x, ("rows", size))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-6)
    if form is spelled_out:
        columns = run(lambda v: form(v, 0, epsilon), x.T.copy(), ("n", 5))
        np.testing.assert_allclose(columns.T, want, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("size", [16, 129, 3000])
def test_norms_of_rows_with_any_deviation(size, rng):
    """Rows on both sides of the ratio of deviation and mean below which the mean is corrected, side by side."""
    level = rng.uniform(1, 1000, (64, 1))
    ratios = 2.0 ** rng.uniform(-20, 4, (64, 1))
    x = (level + level * ratios * rng.standard_normal((64, size))).astype(np.float32)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    want = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
    for form in FORMS:
        got = run(lambda v, f=form: f(v, -1, 1e-6), x, ("rows", size))
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=5e-6)


def test_a_center_that_is_a_result(rng):
    """A program's deviations, and normalized rows from the same deviations; a sum of the deviations."""
    x = near_constant_rows(rng, 300, 12345.678)
    type_ = TensorType(DType.float32, ("n", 300), DeviceRef.CPU())

    def build(v: Any) -> Any:
        centered = v.tensor - ops.mean(v.tensor, -1)
        variance = ops.mean(centered * centered, -1)
        return centered, centered * ops.rsqrt(variance + 1e-5), variance, ops.mean(centered, -1)

    results = SESSION.load(Graph("norm", build, [type_])).execute(x)
    deviations, normalized, variance, _ = [r.to_numpy() for r in results]
    wide = x.astype(np.float64)
    want = wide - wide.mean(-1, keepdims=True)
    # of the mean in float32, which is a few roundings off with eight lanes
    np.testing.assert_allclose(deviations, want, rtol=1e-5, atol=12346 * 2**-21)
    np.testing.assert_allclose(variance, (want**2).mean(-1, keepdims=True), rtol=3e-5, atol=1e-9)
    want = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normalized, want, rtol=2e-5, atol=5e-6)


def test_large_deviations_stay_as_they_were(rng):
    """Squares that overflow give zeros, rows with an infinity NaN, in the interpreter too."""
    x = rng.standard_normal((3, 256), np.float32)
    x[0] *= np.float32(1e30)
    x[1, 7] = np.inf
    type_ = TensorType(DType.float32, ("n", 256), DeviceRef.CPU())
    graph = Graph("norm", lambda v: layer_norm(v.tensor, -1, 1e-5), [type_])
    (got,) = SESSION.load(graph).execute(x)
    with np.errstate(all="ignore"):
        (want,) = _interpreter.run(graph, [x])
    np.testing.assert_array_equal(got.to_numpy()[:2], np.asarray(want)[:2])
    np.testing.assert_allclose(got.to_numpy()[2], np.asarray(want)[2], rtol=1e-5, atol=1e-6)


def test_deviations_from_something_else(rng):
    """Sums of squares around a value that is not the mean keep it."""
    x = (rng.standard_normal((4, 300)) * 1e-3 + 50).astype(np.float32)

    def around(v: TensorValue, divisor: float) -> TensorValue:
        other = v - ops.sum(v, -1) / divisor
        return ops.sum(other * other, -1)

    wide = x.astype(np.float64)
    for divisor in (299, 301, 150):
        want = ((wide - wide.sum(-1, keepdims=True) / divisor) ** 2).sum(-1, keepdims=True)
        np.testing.assert_allclose(
            run(lambda v, d=divisor: around(v, d), x, ("n", 300)), want, rtol=1e-4
        )


def test_groups_and_variances_of_nearly_constant_values(rng):
    """Group norms, and variances of eager tensors: also where mean and squares are in different kernels."""
    x = np.full((3, 8, 12, 11), 12345.678, np.float32)
    x[1] += rng.standard_normal(x.shape[1:], np.float32) * np.float32(0.01)
    x[2] = rng.standard_normal(x.shape[1:], np.float32)
    wide = x.astype(np.float64)
    groups = wide.reshape(3, 4, -1)
    centered = groups - groups.mean(-1, keepdims=True)
    want = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)

    def grouped(v: TensorValue) -> TensorValue:
        return ops.group_norm(v, constant(1, 8), constant(0, 8), num_groups=4, epsilon=1e-5)

    for shape in (x.shape, ("b", 8, "h", "w")):
        got = run(grouped, x, shape)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=2e-5, atol=5e-6)
    for axis in (None, 0, 3, (1, 2, 3)):
        got = xp.var(xp.asarray(x), axis=axis).to_numpy()
        np.testing.assert_allclose(got, wide.var(axis), rtol=3e-5, atol=1e-9)
    eager = xp.asarray(x[:, 0, 0].copy())
    np.testing.assert_allclose(
        eager.var(-1).to_numpy()[:, 0], wide[:, 0, 0].var(-1), rtol=3e-5, atol=1e-9
    )
    odd = np.array([[np.inf, 1, 2], [np.nan, 1, 2], [1e30, -1e30, 1e30]], np.float32)
    np.testing.assert_array_equal(
        xp.var(xp.asarray(odd), axis=1).to_numpy(), np.array([np.nan, np.nan, np.inf], np.float32)
    )
