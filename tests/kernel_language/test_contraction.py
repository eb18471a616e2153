"""Products fused into sums: the same whatever LLVM optimizes and whatever is checked; and casts that round once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from tests.kernel_language.harness import both, compiled
from tests.rounding import near_ties, nearest

HOST = k.host_target()
fused = pytest.mark.skipif(not HOST.has_fma, reason="this machine has no fused multiply-add")


@k.kernel
def sums(
    out: k.Output[k.f32, 2],
    x: k.Input[k.f32, 1],
    y: k.Input[k.f32, 1],
    z: k.Input[k.f32, 1],
    *,
    W: int,
):
    for i, m in k.vectors(0, x.shape[0], W):
        a, b, c = (
            x.load(i, width=W, mask=m),
            y.load(i, width=W, mask=m),
            z.load(i, width=W, mask=m),
        )
        out.store(0, i, value=a * b + c, mask=m)
        out.store(1, i, value=c - a * (b + 1), mask=m)
        out.store(2, i, value=a * (b - 1) - c, mask=m)
        # two uses: both see the rounded product
        both_ = (a + 1) * b
        out.store(3, i, value=both_, mask=m)
        out.store(4, i, value=both_ + c, mask=m)
        # of two products the second is rounded
        out.store(5, i, value=(a - 1) * b + (c + 1) * b, mask=m)


def _expected(x: Any, y: Any, z: Any) -> np.ndarray:
    def wide(value: Any) -> Any:
        return value.astype(np.float64)

    one = np.float32(1)
    two_uses = (x + one) * y
    second = (z + one) * y
    return np.stack(
        [
            (wide(x) * wide(y) + wide(z)).astype(np.float32),
            (wide(z) - wide(x) * wide(y + one)).astype(np.float32),
            (wide(x) * wide(y - one) - wide(z)).astype(np.float32),
            two_uses,
            two_uses + z,
            (wide(x - one) * wide(y) + wide(second)).astype(np.float32),
        ]
    )


@fused
@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("check", [0, 1, 2])
def test_products_are_fused_at_every_level(
    width: int, check: int, rng: np.random.Generator
) -> None:
    x, y, z = (rng.standard_normal(203).astype(np.float32) for _ in range(3))
    out = np.zeros((6, 203), np.float32)
    with flags.override(MAX_KERNEL_CHECK=check):
        compiled(sums, [out, x, y, z], {"W": width})
    np.testing.assert_array_equal(out, _expected(x, y, z))
    assert (out[0] != x * y + z).any()


@k.kernel
def running(out: k.Output[k.f64, 1], x: k.Input[k.f64, 1], y: k.Input[k.f64, 1]):
    total = k.f64(0)
    scale = x[0] * y[0]  # of another body than the sums: rounded
    for i in range(x.shape[0]):
        total = total + x[i] * y[i]
        if x[i] > 0:
            total = total - scale
        else:
            total = scale * y[i] - total
    out[0] = total


@fused
def test_sums_in_loops_and_branches(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(500) for _ in range(2))
    results = set()
    for check in (0, 1, 2):
        out = np.zeros(1)
        with flags.override(MAX_KERNEL_CHECK=check):
            compiled(running, [out, x, y])
        results.add(float(out[0]))
    assert len(results) == 1


def test_a_processor_without_the_instruction_rounds_each_product() -> None:
    target = k.CPUTarget(frozenset(["sse2"]), HOST.triple, "x86-64")
    if HOST.is_arm64:
        pytest.skip("arm64 always has it")
    x = np.linspace(0.1, 3, 37, dtype=np.float32)
    out = np.zeros((6, 37), np.float32)
    compiled(sums, [out, x, x + 1, x / 3], {"W": 4}, target=target)
    np.testing.assert_array_equal(out[0], x * (x + 1) + x / 3)
    np.testing.assert_array_equal(out[2], x * (x + 1 - np.float32(1)) - x / 3)


# ***** casts *****
@k.kernel
def narrowed(out: k.Output, x: k.Input[k.f64, 1], *, W: int):
    if W == 0:
        for i in range(x.shape[0]):
            out[i] = k.cast(x[i], out.dtype)
    else:
        for i, m in k.vectors(0, x.shape[0], W):
            out.store(i, value=k.cast(x.load(i, width=W, mask=m), out.dtype), mask=m)


FEATURES = [[], ["sse2"]] if not HOST.is_arm64 else [[]]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("width", [0, 3, 8])
@pytest.mark.parametrize(
    "dtype",
    [
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2fnuz,
    ],
    ids=lambda d: np.dtype(d).name,
)
def test_doubles_are_rounded_once(
    dtype: Any, width: int, features: list[str], rng: np.random.Generator
) -> None:
    x = near_ties(dtype, rng, 300)
    out = np.zeros(x.size, dtype)
    target = k.CPUTarget(frozenset(features), HOST.triple, "x86-64") if features else HOST
    with np.errstate(all="ignore"):
        result = both(narrowed, [out, x], {"W": width}, target=target)[0].astype(np.float64)
    result[np.isinf(result)] = np.nan
    np.testing.assert_array_equal(result, nearest(x, dtype))


@k.kernel
def literals(out: k.Output, *, value: float):
    out[0] = k.cast(value, out.dtype)


@pytest.mark.parametrize("value", [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40])
def test_literals_are_rounded_once(value: float) -> None:
    out = np.zeros(1, ml_dtypes.bfloat16)
    result = both(literals, [out], {"value": value})[0]
    assert float(result[0]) == 1 + 2.0**-7
