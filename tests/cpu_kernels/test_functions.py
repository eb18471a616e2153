"""The functions that generated kernels call, compiled and on NumPy's scalars, against NumPy and the math module."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max._compiler.codegen import functions as fn
from tests.kernel_language.harness import compiled

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
Array = np.ndarray[Any, Any]
INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 32, 64)]
WIDTH = 8


@k.kernel
def one(y: k.Output, x: k.Input, *, function: Any):
    for i, m in k.vectors(x.shape[0], WIDTH):
        y.store(i, value=function(x.load(i, width=WIDTH, mask=m)), mask=m)


@k.kernel
def two(z: k.Output, x: k.Input, y: k.Input, *, function: Any):
    for i, m in k.vectors(x.shape[0], WIDTH):
        value = function(x.load(i, width=WIDTH, mask=m), y.load(i, width=WIDTH, mask=m))
        z.store(i, value=value, mask=m)


def of_one(function: Any, x: Array) -> Array:
    y = np.empty_like(x)
    compiled(one, [y, x], {"function": function})
    return y


def of_two(function: Any, x: Array, y: Array) -> Array:
    z = np.empty_like(x)
    compiled(two, [z, x, y], {"function": function})
    return z


def pairs(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """All pairs of interesting numbers, and random ones."""
    rng = np.random.default_rng(1)
    if dtype.kind == "f":
        some = [0.0, -0.0, 1.0, -1.0, 0.1, -0.3, 2.5, -7.0, 3.0, 1e-3, 1e6, -1e7, 3e9, 1e20, -1e30]
        some += [np.inf, -np.inf, np.nan]
        random = rng.standard_normal((2, 300)) * 10.0 ** rng.integers(-3, 6, (2, 300))
        whole = rng.integers(-40, 40, (2, 300)).astype(np.float64)
        x, y = np.concatenate([random, whole], axis=1).astype(dtype)
    else:
        limits = np.iinfo(dtype)
        some = [
            limits.min,
            limits.min + 1,
            0,
            1,
            2,
            3,
            5,
            7,
            8,
            31,
            63,
            64,
            limits.max - 1,
            limits.max,
        ]
        some += [-1, -2, -7] if dtype.kind == "i" else []
        x, y = rng.integers(max(limits.min, -99), 99, (2, 300)).astype(dtype)
    a, b = np.meshgrid(np.array(some, dtype), np.array(some, dtype))
    return np.concatenate([a.ravel(), x]), np.concatenate([b.ravel(), y])


def same(found: Array, expected: Array) -> None:
    """Equal, NaN and the sign of zeros included."""
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_remainders_of_floats(dtype: np.dtype[Any]) -> None:
    """As NumPy's, for any quotient: the remainder is exact."""
    x, y = pairs(dtype)
    with np.errstate(all="ignore"):
        same(of_two(fn.floor_mod, x, y), np.mod(x, y))
        same(of_two(fn.floor_divide, x, y), np.floor_divide(x, y))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_division_of_integers(dtype: np.dtype[Any]) -> None:
    """As Python's; 0 by 0. The least number by -1 is not defined."""
    x, y = pairs(dtype)
    defined = ~((x == np.iinfo(dtype).min) & (y.astype(object) == -1))
    x, y = x[defined], y[defined]
    quotients = [int(a) // int(b) if b else 0 for a, b in zip(x, y, strict=True)]
    rests = [int(a) % int(b) if b else 0 for a, b in zip(x, y, strict=True)]
    same(of_two(fn.floor_div, x, y), np.array(quotients, dtype))
    same(of_two(fn.integer_mod, x, y), np.array(rests, dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_shifts(dtype: np.dtype[Any]) -> None:
    """All bits are gone after the width, or the sign's; so for negative counts."""
    x, y = pairs(dtype)
    bits = 8 * dtype.itemsize
    left = [(int(a) << int(b)) if 0 <= b < bits else 0 for a, b in zip(x, y, strict=True)]
    right = [int(a) >> int(b) if 0 <= b < bits else -int(a < 0) for a, b in zip(x, y, strict=True)]
    unsigned = np.dtype(f"uint{bits}")
    expected = np.array([value % (1 << bits) for value in left], unsigned).view(dtype)
    same(of_two(fn.shift_left, x, y), expected)
    expected = np.array([int(value) % (1 << bits) for value in right], unsigned).view(dtype)
    same(of_two(fn.shift_right, x, y), expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_powers(dtype: np.dtype[Any]) -> None:
    """Wrapped to the type; a negative power is 0, but for bases 1 and -1."""
    x, y = pairs(dtype)
    bits = 8 * dtype.itemsize

    def power(a: int, b: int) -> int:
        if b < 0:
            return {1: 1, -1: -1 if b % 2 else 1}.get(a, 0)
        return pow(a, b, 1 << bits)

    values = [power(int(a), int(b)) % (1 << bits) for a, b in zip(x, y, strict=True)]
    function = fn.signed_pow if dtype.kind == "i" else fn.unsigned_pow
    same(of_two(function, x, y), np.array(values, f"uint{bits}").view(dtype))


def exact(function: Callable[[float], float], x: Array) -> Array:
    return np.array([function(float(value)) for value in x])


def gelu(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


def test_gelu() -> None:
    """Four units in the last place above 0, a relative error of 4e-7 down to -2, and of 3e-6 down to -5."""
    x = np.linspace(-16, 16, 20_001).astype(np.float32)
    found, expected = of_one(fn.gelu, x).astype(np.float64), exact(gelu, x)
    above, near, far = x > 0, (x < 0) & (x > -2), (x <= -2) & (x > -5)
    assert (
        abs(found - expected)[above] <= 4 * np.spacing(expected[above].astype(np.float32))
    ).all()
    for part, bound in ((near, 4e-7), (far, 3e-6)):
        assert abs(found[part] / expected[part] - 1).max() < bound
    below = x <= -5
    assert abs(found - expected)[below].max() < 1e-10 and (found[below] <= 0).all()
    wide = x.astype(np.float64)
    np.testing.assert_allclose(of_one(fn.gelu, wide), exact(gelu, wide), rtol=1e-13, atol=1e-15)
    ends = np.array([np.inf, -np.inf, np.nan, 0, 1e30, -1e30], np.float32)
    # -infinity times 0 is NaN, as of the other forms and of torch
    np.testing.assert_array_equal(
        of_one(fn.gelu, ends), [np.inf, np.nan, np.nan, 0, np.float32(1e30), 0]
    )


@pytest.mark.parametrize(
    ("function", "reference"),
    [
        (fn.gelu_tanh, lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        (fn.gelu_quick, lambda x: x / (1 + math.exp(-1.702 * x))),
        (fn.acos, lambda x: math.acos(max(-1.0, min(1.0, x)))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_other_functions(function: Any, reference: Any, dtype: np.dtype[Any]) -> None:
    x = np.concatenate([np.linspace(-1.5, 1.5, 401), np.linspace(-9, 9, 301)]).astype(dtype)
    precision = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(
        of_one(function, x), exact(reference, x), rtol=8 * precision, atol=8 * precision
    )


@k.kernel
def summed(y: k.Output, x: k.Input):
    # whatever the part is, its sum begins with nothing
    part = k.splat(k.cast(3, y.dtype), WIDTH)
    total, lost = fn.no_sum(part)
    for i, m in k.vectors(x.shape[0], WIDTH):
        total, lost = fn.add_part(total, lost, x.load(i, width=WIDTH, mask=m))
    y.store(0, value=fn.rounded_sum(total, lost, y.dtype))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_wide_sums(dtype: np.dtype[Any]) -> None:
    """Of each lane, as if each were added exactly and rounded once, where large terms cancel; infinite if a term is."""
    rng = np.random.default_rng(2)
    large = 2.0 ** (40 if dtype == F64 else 24)
    parts = rng.standard_normal((3000, WIDTH)) * 10.0 ** rng.integers(-6, 2, (3000, WIDTH))
    parts[1::7] += large * 1000
    parts[2::7] -= large * 1000
    parts[:, 3] = 0.1
    parts[5, 4], parts[6, 5], parts[7, 6] = np.inf, -np.inf, np.nan
    x = parts.astype(dtype)
    y = np.zeros(WIDTH, dtype)
    compiled(summed, [y, x.reshape(-1)])
    with np.errstate(invalid="ignore"):
        expected = [math.fsum(map(float, column)) for column in x.T[:4]] + [np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(y[4:7], expected[4:])
    np.testing.assert_allclose(y[:4], expected[:4], rtol=2 * float(np.finfo(dtype).eps))
