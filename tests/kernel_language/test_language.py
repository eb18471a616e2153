"""Each construct of the language: compiled, interpreted and NumPy agree."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from max import kernel as k
from tests.kernel_language.harness import both, compiled, interpreted

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 97]
DTYPES = [
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
]
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


# ***** loads, stores, loops *****
@k.kernel
def saxpy(out: k.Output, x: k.Input, y: k.Input, a: k.f32, ctx: k.Context, *, W: int):
    for lo, hi in ctx.chunks(out.shape[0], 0, W):
        for j, m in k.vectors(lo, hi, W):
            out.store(j, value=a * x.load(j, width=W, mask=m) + y.load(j, width=W, mask=m), mask=m)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("workers", [1, 2])
def test_vectors_at_all_sizes(n, width, workers):
    x, y = rng().normal(size=(2, n)).astype(np.float32)
    out = np.zeros(n, np.float32)
    out, *_ = both(saxpy, [out, x, y, np.float32(2.5)], {"W": width}, workers, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, 2.5 * x + y, rtol=1e-5, atol=1e-6)


@k.inline
def raise_to(out: k.View, i: k.Integer, least: k.Integer) -> None:
    """Returns early where nothing is to be done."""
    if out[i] >= least:
        return
    out[i] = least


@k.kernel
def parallel_loop_and_scopes(out: k.Output, ctx: k.Context):
    for i in ctx.parallel(out.shape[0]):
        raise_to(out, i, 2)
    ctx.barrier()
    for i in ctx.parallel(out.shape[0]):
        for n in k.static_range(20):
            raise_to(out, i, n - i)


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_loops_beside_scopes_that_are_left_early(workers):
    """Blocks of both have names and numbers, of counts of their own."""
    out, *_ = both(parallel_loop_and_scopes, [np.zeros(37, np.int64)], {}, workers)
    np.testing.assert_array_equal(out, np.maximum(2, 19 - np.arange(37)))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_narrow_floats_are_computed_in_f32(dtype, static):
    x, y = rng().normal(size=(2, 37)).astype(dtype)
    out = np.zeros(37, dtype)
    out, *_ = both(saxpy, [out, x, y, np.float32(0.5)], {"W": 16}, static=static)
    wide = np.float64 if dtype == np.float64 else np.float32
    np.testing.assert_array_equal(out, (wide(0.5) * x.astype(wide) + y.astype(wide)).astype(dtype))


@k.kernel
def _widened_constants(y: k.Output):
    y[0] = k.f64(k.f32(0.1))
    y[1] = k.f64(k.f16(0.1))
    y[2] = k.f64(k.f32(k.bf16(0.1)))
    y[3] = k.f64(k.f32(1e300))


def test_a_constant_is_rounded_before_it_is_widened():
    (y,) = both(_widened_constants, [np.zeros(4)])
    bf16 = np.float64(np.asarray(0.1, ml_dtypes.bfloat16))
    assert y.tolist() == [np.float64(np.float32(0.1)), np.float64(np.float16(0.1)), bf16, np.inf]


@k.kernel
def transpose(out: k.Output, x: k.Input, ctx: k.Context):
    for i, j in ctx.parallel(out.shape):
        out[i, j] = x[j, i]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 2), (0, 4)])
def test_parallel_over_two_axes(shape, workers):
    x = rng().integers(0, 99, shape).astype(np.int32)
    out, _ = both(transpose, [np.zeros(shape[::-1], np.int32), x], {}, workers)
    np.testing.assert_array_equal(out, x.T)


@k.kernel
def copy_any(out: k.Output, x: k.Input, ctx: k.Context):
    for index in ctx.parallel(out.shape):
        out[index] = x[index]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_generic_rank_and_strides(shape):
    x = rng().normal(size=shape).astype(np.float32)
    both(copy_any, [np.zeros(shape, np.float32), x], {}, 2)
    view = rng().normal(size=shape[::-1]).astype(np.float32).T
    out, _ = both(copy_any, [np.zeros(shape, np.float32), view])
    np.testing.assert_array_equal(out, view)
    out, _ = both(copy_any, [np.zeros(shape, np.float32), view], static=True)
    np.testing.assert_array_equal(out, view)


@k.kernel
def column_sums(out: k.Output, x: k.Input, ctx: k.Context):
    for j in ctx.parallel(x.shape[1]):
        total = 0.0
        for i in range(x.shape[0]):
            total += x[i, j]
        out[j] = total


def test_a_literal_takes_the_type_assigned_in_the_loop():
    for dtype in (np.float32, np.float64, np.float16):
        x = rng().integers(-9, 9, (13, 7)).astype(dtype)
        out, _ = both(column_sums, [np.zeros(7, dtype), x])
        np.testing.assert_array_equal(out, x.sum(0))


@k.kernel
def collatz(out: k.Output[k.i64, 1], x: k.Input[k.i64, 1]):
    for i in range(x.shape[0]):
        n = x[i]
        steps = 0
        while n != 1:
            if n % 2 == 0:
                n = n // 2
            else:
                n = 3 * n + 1
            steps += 1
        out[i] = steps


def test_while_and_run_time_if():
    x = np.arange(1, 40)
    out, _ = both(collatz, [np.zeros_like(x), x])
    assert out[26] == 111 and out[0] == 0


@k.kernel
def named_in_comprehensions(out: k.Output, x: k.Input, ctx: k.Context) -> None:
    # `last` is bound around the comprehension, `item` within it only
    item = x[0]
    doubled = [(last := item * 2) for item in (x[1], x[2], x[3])]
    out[0] = last
    out[1] = doubled[0] + doubled[1] + doubled[2]
    out[2] = item


def test_names_bound_in_a_comprehension():
    out, *_ = both(named_in_comprehensions, [np.zeros(3, np.float32), np.float32([5, 1, 2, 3])])
    np.testing.assert_array_equal(out, [6, 12, 5])


@k.kernel
def first_negative(out: k.Output[k.i64, 1], x: k.Input[k.f32, 2]):
    for i in range(x.shape[0]):
        found = -1
        for j in range(x.shape[1]):
            if x[i, j] >= 0.0:
                continue
            found = j
            break
        out[i] = found


def test_break_and_continue():
    x = np.abs(rng().normal(size=(5, 9))).astype(np.float32)
    x[1, 4] = x[3, 0] = x[3, 5] = -1
    out, _ = both(first_negative, [np.zeros(5, np.int64), x])
    np.testing.assert_array_equal(out, [-1, 4, -1, 0, -1])


@k.kernel
def count_down(out: k.Output[k.i64, 1]):
    n = 0
    for i in range(10, 0, -3):
        out[n] = i
        n += 1


def test_a_negative_step():
    out, *_ = both(count_down, [np.zeros(4, np.int64)])
    np.testing.assert_array_equal(out, [10, 7, 4, 1])


@k.kernel
def unrolled_exit(out: k.Output[k.i64, 1], x: k.Input[k.i64, 1]):
    total = 0
    last = -1
    for i in k.static_range(5):
        if x[i] == 0:
            continue
        if x[i] < 0:
            break
        total += x[i]
        last = i
    out[0] = total
    out[1] = last


@pytest.mark.parametrize(
    "x", [[1, 2, 3, 4, 5], [1, 0, 3, -1, 9], [-1, 2, 3, 4, 5], [0, 0, 0, 0, 0]]
)
def test_leaving_an_unrolled_loop_at_run_time(x):
    out, _ = both(unrolled_exit, [np.zeros(2, np.int64), np.array(x)])
    total, last = 0, -1
    for i, v in enumerate(x):
        if v == 0:
            continue
        if v < 0:
            break
        total, last = total + v, i
    assert list(out) == [total, last]


@k.kernel
def leave_vectors(out: k.Output[k.i64, 1], x: k.Input[k.f32, 1], *, W: int):
    at = -1
    for j, m in k.vectors(x.shape[0], W):
        v = x.load(j, width=W, mask=m)
        if k.any(v < 0.0):
            at = j
            break
    out[0] = at


@pytest.mark.parametrize("n", [3, 16, 40])
def test_break_out_of_vectors(n):
    x = np.ones(n, np.float32)
    out, _ = both(leave_vectors, [np.zeros(1, np.int64), x], {"W": 8})
    assert out[0] == -1
    x[n - 1] = -1
    out, _ = both(leave_vectors, [np.zeros(1, np.int64), x], {"W": 8})
    assert out[0] == (n - 1) // 8 * 8


# ***** functions *****
@k.inline
def clamp(x, low=0.0, *, high):
    return k.min(k.max(x, low), high)


@k.inline
def sign(x):
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


@k.inline
def divmod_pair(a, b):
    return a // b, a % b


@k.kernel
def uses_functions(out: k.Output, x: k.Input, *, epilogue):
    top = 3.0

    def local(v):
        return v + top

    double = lambda v: v * 2  # noqa: E731
    for i in range(x.shape[0]):
        v = clamp(x[i], high=top)
        out[i] = epilogue(double(local(v))) + k.f32(sign(x[i]))


@k.inline
def negate(x):
    return -x


def test_functions_closures_and_epilogues():
    x = np.linspace(-2, 6, 11).astype(np.float32)
    out, _ = both(uses_functions, [np.zeros_like(x), x], {"epilogue": negate})
    np.testing.assert_allclose(out, -2 * (np.clip(x, 0, 3) + 3) + np.sign(x))


@k.inline
def search(x, wanted):
    for i in range(x.shape[0]):
        if x[i] == wanted:
            return i, True
    return -1, False


@k.kernel
def uses_search(out: k.Output[k.i64, 2], x: k.Input[k.i32, 1], wanted: k.i32):
    at, found = search(x, wanted)
    out[0, 0] = at
    out[0, 1] = 1 if found else 0
    q, r = divmod_pair(k.i64(wanted), 4)
    out[1, 0] = q
    out[1, 1] = r


@pytest.mark.parametrize("wanted", [5, -7, 3])
def test_early_return_of_several_values(wanted):
    x = np.array([9, 5, -7, 5], np.int32)
    out, *_ = both(uses_search, [np.zeros((2, 2), np.int64), x, np.int32(wanted)])
    at = list(x).index(wanted) if wanted in x else -1
    assert out.tolist() == [[at, int(at >= 0)], list(divmod(wanted, 4))]


@k.kernel
def variadic(out: k.Output, *extra: k.Input, ctx: k.Context, scale: float = 1.0):
    for i in ctx.parallel(out.shape[0]):
        total = k.f32(0)
        for x in extra:
            total += x[i]
        out[i] = total * scale * len(extra)


def test_variadic_views():
    xs = [rng().normal(size=6).astype(np.float32) for _ in range(3)]
    out, *_ = both(variadic, [np.zeros(6, np.float32), *xs], {"scale": 0.5})
    np.testing.assert_allclose(out, sum(xs) * 1.5, rtol=1e-6)


@k.kernel
def conditional_return(out: k.Output[k.i64, 1], n: k.i64):
    out[0] = 1
    if n > 3:
        return
    out[0] = 2


@pytest.mark.parametrize("n", [3, 4])
def test_early_return_of_the_kernel(n):
    out, _ = both(conditional_return, [np.zeros(1, np.int64), np.int64(n)])
    assert out[0] == (1 if n > 3 else 2)


# ***** values *****
@k.kernel
def integers(out: k.Output, x: k.Input, y: k.Input):
    for i in range(x.shape[0]):
        a, b = x[i], y[i]
        out[i, 0] = a + b
        out[i, 1] = a - b
        out[i, 2] = a * b
        out[i, 3] = a // b
        out[i, 4] = a % b
        out[i, 5] = a & b
        out[i, 6] = a | b
        out[i, 7] = a ^ b
        out[i, 8] = a << (b & 3)
        out[i, 9] = a >> (b & 3)
        out[i, 10] = ~a
        out[i, 11] = k.min(a, b)
        out[i, 12] = k.max(a, b, 3)
        out[i, 13] = a // 4 + a % 8
        out[i, 14] = k.abs(a)
        out[i, 15] = a**3


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if np.dtype(d).kind in "iu"], ids=lambda d: np.dtype(d).name
)
def test_integer_arithmetic(dtype):
    info = np.iinfo(dtype)
    x = rng().integers(info.min, info.max, 50, dtype=dtype, endpoint=True)
    y = rng().integers(info.min, info.max, 50, dtype=dtype, endpoint=True)
    y[y == 0] = 1
    if info.min < 0:
        x[(x == info.min)] = 1  # the one division that overflows
    out, *_ = both(integers, [np.zeros((50, 16), dtype), x, y])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[:, 3], x // y)
        np.testing.assert_array_equal(out[:, 4], x % y)
        np.testing.assert_array_equal(out[:, 2], x * y)


@k.kernel
def conversions(out: k.Output, x: k.Input):
    for j, m in k.vectors(x.shape[0], 8):
        out.store(j, value=k.cast(x.load(j, width=8, mask=m), out.dtype), mask=m)


@pytest.mark.parametrize(
    "source", [*DTYPES, ml_dtypes.bfloat16, np.bool_], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize(
    "target", [*DTYPES, ml_dtypes.bfloat16, np.bool_], ids=lambda d: np.dtype(d).name
)
def test_every_conversion(source, target):
    if np.dtype(source).kind in "iu":
        info = np.iinfo(source)
        x = rng().integers(info.min, info.max, 33, dtype=source, endpoint=True)
    elif source == np.bool_:
        x = rng().random(33) < 0.5
    else:
        x = np.concatenate(
            [
                rng().normal(size=20) * 100,
                [0, -0.0, 0.5, -1.5, 2.5, np.nan, np.inf, -np.inf, 3e4, -3e4],
                # limits of integers, and numbers beside them
                [
                    127.5,
                    128,
                    -128.5,
                    -129,
                    255.5,
                    256,
                    -0.5,
                    -1,
                    32767.5,
                    32768,
                    -32769,
                    65535.5,
                    65536,
                ],
                [2147483520, 2147483647, 2147483648, -2147483648, -2147483904, 4e9, -4e9],
            ]
        )
        with np.errstate(over="ignore"):
            x = x.astype(source)
    out, _ = both(conversions, [np.zeros(x.shape, target), x])
    if np.dtype(target).kind not in "iu" or np.dtype(source).kind in "iub":
        with np.errstate(all="ignore"):
            want = (
                x.astype(np.float32).astype(target)
                if np.dtype(target).name in ("bfloat16", "float16")
                else x.astype(target)
            )
        np.testing.assert_array_equal(out.astype(np.float64), want.astype(np.float64))


@k.kernel
def comparisons(out: k.Output[k.bool, 2], x: k.Input, y: k.Input):
    for i in range(x.shape[0]):
        a, b = x[i], y[i]
        out[i, 0] = a < b
        out[i, 1] = a <= b
        out[i, 2] = a > b
        out[i, 3] = a >= b
        out[i, 4] = a == b
        out[i, 5] = a != b
        out[i, 6] = a < b or a == b
        out[i, 7] = not (a < b and b < 100)
        out[i, 8] = (a < b) == (b > a)


@pytest.mark.parametrize(
    "dtype", [np.int32, np.uint8, np.float32, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name
)
def test_comparisons(dtype):
    x = rng().integers(0, 5, 30).astype(dtype)
    y = rng().integers(0, 5, 30).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        x[3] = y[7] = np.nan
    out, *_ = both(comparisons, [np.zeros((30, 9), bool), x, y])
    x, y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_array_equal(out[:, 0], x < y)
    np.testing.assert_array_equal(out[:, 5], x != y)


@k.kernel
def guarded_access(out: k.Output[k.i64, 1], x: k.Input[k.i64, 1], n: k.i64):
    out[0] = 0
    if n < x.shape[0] and x[n] > 5:
        out[0] = x[n]


@pytest.mark.parametrize("n", [0, 2, 3, 10**15])
def test_and_does_not_evaluate_its_second_operand(n):
    x = np.array([1, 2, 7])
    out, *_ = both(guarded_access, [np.zeros(1, np.int64), x, np.int64(n)])
    assert out[0] == (7 if n == 2 else 0)


@k.kernel
def rounding(out: k.Output, x: k.Input):
    for j, m in k.vectors(x.shape[0], 8):
        v = x.load(j, width=8, mask=m)
        out.store(0, j, value=k.floor(v), mask=m)
        out.store(1, j, value=k.ceil(v), mask=m)
        out.store(2, j, value=k.trunc(v), mask=m)
        out.store(3, j, value=k.round(v), mask=m)
        out.store(4, j, value=k.abs(v), mask=m)
        out.store(5, j, value=k.sqrt(k.abs(v)), mask=m)
        out.store(6, j, value=k.copysign(2.0, v), mask=m)
        out.store(7, j, value=-v, mask=m)
        out.store(8, j, value=v // 2.0, mask=m)
        out.store(9, j, value=k.select(k.isnan(v), -1.0, k.select(k.isinf(v), 1.0, 0.0)), mask=m)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding(dtype):
    x = np.array(
        [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e30, -7.25, np.nan, np.inf, -np.inf], dtype
    )
    out, _ = both(rounding, [np.zeros((10, x.size), dtype), x])
    with np.errstate(invalid="ignore"):
        for row, fn in enumerate(
            (np.floor, np.ceil, np.trunc, np.rint, np.abs, lambda v: np.sqrt(np.abs(v)))
        ):
            np.testing.assert_array_equal(out[row], fn(x))


@k.kernel
def extremes(out: k.Output, x: k.Input, y: k.Input):
    for j, m in k.vectors(x.shape[0], 4):
        a, b = x.load(j, width=4, mask=m), y.load(j, width=4, mask=m)
        out.store(0, j, value=k.min(a, b), mask=m)
        out.store(1, j, value=k.max(a, b), mask=m)
        out.store(2, j, value=k.max(a, 0.5), mask=m)
        out.store(3, j, value=k.min(0.5, b), mask=m)


def test_min_and_max_keep_nan():
    x = np.array([1, np.nan, 3, np.nan, np.inf, -np.inf, 0.1], np.float32)
    y = np.array([np.nan, 2, 1, np.nan, 1, 2, -5], np.float32)
    out, *_ = both(extremes, [np.zeros((4, 7), np.float32), x, y])
    np.testing.assert_array_equal(
        out,
        [
            np.minimum(x, y),
            np.maximum(x, y),
            np.maximum(x, np.float32(0.5)),
            np.minimum(y, np.float32(0.5)),
        ],
    )


# ***** vectors *****
@k.kernel
def reductions(out: k.Output, x: k.Input, *, W: int):
    v = x.load(0, width=W)
    out[0] = k.reduce_add(v)
    out[1] = k.reduce_max(v)
    out[2] = k.reduce_min(v)
    out[3] = k.reduce_mul(v)


@pytest.mark.parametrize("width", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16])
def test_reductions_keep_nan(dtype, width):
    for lane in {0, width // 2, width - 1}:
        x = np.ones(width, dtype)
        x[lane] = -np.nan if lane % 2 else np.nan
        out, _ = both(reductions, [np.zeros(4, dtype), x], {"W": width})
        assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("width", [1, 2, 3, 8, 12, 16, 64])
@pytest.mark.parametrize(
    "dtype",
    [np.int32, np.uint8, np.float32, np.float64, ml_dtypes.bfloat16],
    ids=lambda d: np.dtype(d).name,
)
def test_reductions(dtype, width):
    x = rng().integers(1, 3, width).astype(dtype)
    out, _ = both(
        reductions,
        [np.zeros(4, np.float32 if x.dtype.kind not in "iu" else dtype), x],
        {"W": width},
    )
    assert out[1] == x.max() and out[2] == x.min()
    if x.dtype.kind == "f":
        x[width // 2] = np.nan
        out, _ = both(reductions, [np.zeros(4, np.float32), x], {"W": width})
        assert np.isnan(out).all()


@k.kernel
def lanes(out: k.Output[k.i32, 2], x: k.Input[k.i32, 1]):
    a, b = x.load(0, width=8), x.load(8, width=8)
    out.store(0, 0, value=k.shuffle(a, b, (15, 0, 14, 1, 13, 2, 12, 3)))
    both_ = k.interleave(a, b)
    out.store(1, 0, value=k.shuffle(both_, None, range(8)))
    even, odd = k.deinterleave(both_)
    out.store(2, 0, value=even)
    out.store(3, 0, value=odd)
    out.store(4, 0, value=k.iota(k.i32, 8) * a[3])
    out.store(5, 0, value=k.select(a < b, a, b))
    out.store(6, 0, value=k.splat(b[2], 8))
    out[7, 0] = k.i32(k.any(a < 0))
    out[7, 1] = k.i32(k.all(a >= 0))
    out[7, 2] = k.reduce_add(k.select(a > 10, 1, 0))
    out[7, 3] = k.popcount(a[1])
    out[7, 4] = k.count_leading_zeros(a[2])
    out[7, 5] = k.count_trailing_zeros(a[2])
    out[7, 6] = k.i32(k.popcount(k.bitcast(a < b, k.u8)))
    out[7, 7] = k.bitcast(k.f32(1.0), k.i32)
    for i in range(8):
        out[8, i] = a[i]
    out.store(9, 0, value=k.shuffle(k.concat(b, a), None, k.static_range(4, 12)))


def test_lanes():
    x = rng().integers(0, 20, 16).astype(np.int32)
    out, _ = both(lanes, [np.zeros((10, 8), np.int32), x])
    a, b = x[:8], x[8:]
    np.testing.assert_array_equal(out[2:4], [a, b])
    np.testing.assert_array_equal(out[5], np.minimum(a, b))
    np.testing.assert_array_equal(out[8], a)
    assert out[7, 6] == (a < b).sum()


@k.kernel
def tiles(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], *, M: int, N: int, W: int):
    acc = k.tile(k.f32, (M, N), width=W, fill=0.0)
    for r in range(x.shape[0]):
        for m in k.static_range(M):
            for n in k.static_range(N):
                acc[m, n] += x.load(r, n * W, width=W) * k.f32(m + 1)
    rows = k.tile(k.i64, M)
    for m in k.static_range(M):
        rows[m] = M - 1 - m
    for m in range(M):  # run-time indices
        for n in k.static_range(N):
            out.store(rows[m], n * W, value=acc[m, n])


def test_tiles():
    x = rng().normal(size=(5, 8)).astype(np.float32)
    out, _ = both(tiles, [np.zeros((3, 8), np.float32), x], {"M": 3, "N": 2, "W": 4}, rtol=1e-6)
    np.testing.assert_allclose(out, np.outer([3, 2, 1], x.sum(0)), rtol=1e-5)


@k.kernel
def strided(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], index: k.Input[k.i32, 1], *, W: int):
    n = x.shape[0]
    for j, m in k.vectors(n, W):
        v = x.load(j, 1, width=W, mask=m, axis=0)
        out.store(0, j, value=v, mask=m)
        out.store(j, 1, value=v * 2.0, mask=m, axis=0)
        at = index.load(j, width=W, mask=m)
        out.store(2, j, value=x[0].gather(at, mask=m, other=-1.0), mask=m)
        out[3].scatter(at, v, mask=m)


def test_gather_and_scatter():
    n = 11
    x = rng().normal(size=(n, n)).astype(np.float32)
    index = rng().permutation(n).astype(np.int32)
    out, *_ = both(strided, [np.zeros((n, n), np.float32), x, index], {"W": 4})
    np.testing.assert_array_equal(out[2], x[0][index])
    want = np.zeros(n, np.float32)
    want[index] = x[:, 1]
    np.testing.assert_array_equal(out[3, 2:], want[2:])


@k.kernel
def views(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], ctx: k.Context):
    rows, columns = x.shape
    flat = x.reshape(rows * columns)
    again = flat.reshape(-1, columns)
    turned = x.transpose(1, 0)
    part = x[1:3, 2:]
    bits = x.view(k.i32)
    out[0, 0] = flat[columns + 1]
    out[0, 1] = again[1, 1]
    out[0, 2] = turned[2, 1]
    out[0, 3] = part[0, 0]
    out[1, 0] = k.f32(part.shape[0] * 10 + part.shape[1])
    out[1, 1] = k.bitcast(bits[0, 0], k.f32)
    out[1, 2] = x[1][2]
    out[1, 3] = k.f32(x.size + x.rank + len(x.shape) + x.strides[0])


@pytest.mark.parametrize("static", [False, True])
def test_views(static):
    x = rng().normal(size=(4, 5)).astype(np.float32)
    out, _ = both(views, [np.zeros((2, 4), np.float32), x], static=static)
    np.testing.assert_allclose(
        out, [[x[1, 1], x[1, 1], x[1, 2], x[1, 2]], [23, x[0, 0], x[1, 2], 20 + 4 + 5]]
    )


@k.kernel
def compile_time(out: k.Output, x: k.Input, *, mode: str, table: tuple, kind=None):
    if mode == "sum":
        out[0] = k.f32(sum(table)) + x[0]
    elif mode == "dtype":
        if x.dtype == k.f32 and kind is None:
            out[0] = k.f32(max(table) * 2 + len(table))
        else:
            out[0] = undefined_name  # noqa: F821
    else:
        values = [x[i] for i in k.static_range(3) if i != 1]
        first, *rest = values
        out[0] = first + rest[0] + k.f32(table[-1]) + k.f32({"a": 4}["a"])


@pytest.mark.parametrize(("mode", "want"), [("sum", 7.5), ("dtype", 9.0), ("other", 8.5 + 3.5)])
def test_compile_time_values(mode, want):
    x = np.array([1.5, 2.5, 3.5], np.float32)
    out, _ = both(compile_time, [np.zeros(1, np.float32), x], {"mode": mode, "table": (1, 2, 3)})
    assert out[0] == pytest.approx(want)


# ***** workers *****
@k.kernel
def two_phases(
    out: k.Output[k.f32, 1], partial: k.InOut[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context
):
    mine = ctx.scratch(k.f32, (4, 8))
    mine[3, 7] = k.f32(0)
    for i in ctx.parallel(x.shape[0], grain=3):
        mine[3, 7] = x[i] * 2.0
        partial[i] = mine[3, 7]
    ctx.barrier()
    for i in ctx.parallel(x.shape[0]):
        out[i] = partial[x.shape[0] - 1 - i] + 1.0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("n", [0, 1, 40])
def test_barrier_and_scratch(workers, n):
    x = rng().normal(size=n).astype(np.float32)
    out, *_ = both(two_phases, [np.zeros_like(x), np.zeros_like(x), x], {}, workers)
    np.testing.assert_allclose(out, x[::-1] * 2 + 1)


@k.kernel
def barriers_in_a_loop(x: k.InOut[k.i64, 1], n: k.i64, ctx: k.Context):
    for _ in range(n):
        if ctx.worker == 0:
            x[0] += 1
        ctx.barrier()
        x.atomic_add(1, value=x[0])
        ctx.barrier()


@pytest.mark.parametrize("workers", [1, 2])
def test_barriers_in_a_loop(workers):
    x, _ = both(barriers_in_a_loop, [np.zeros(2, np.int64), np.int64(5)], {}, workers)
    assert list(x) == [5, 15 * workers]


@pytest.mark.parametrize("grain", [0, 1, 7, 1000])
def test_each_index_is_handed_out_once(grain):
    text = """
    def count(x: k.InOut[k.i32, 3], ctx: k.Context, *, grain):
        for i, j, l in ctx.parallel(x.shape, grain):
            x[i, j, l] += 1
    """
    x = np.zeros((5, 7, 9), np.int32)
    (x,) = both(k.from_source(text, "count", {"k": k}), [x], {"grain": grain}, 2)
    assert (x == 1).all()


# of 11 workers some have the same share
@pytest.mark.parametrize("workers", [1, 2, 3, 11])
@pytest.mark.parametrize("grain", [0, 5])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("total", [0, 1, 7, 23, 1001])
def test_chunks_are_long_at_first_and_short_at_the_end(total, multiple, grain, workers):
    text = """
    def note(ends: k.InOut[k.i64, 1], grain: k.i64, ctx: k.Context, *, multiple):
        for lo, hi in ctx.chunks(ends.shape[0], grain, multiple):
            for i in range(lo, hi):
                ends[i] += hi
    """
    given = [np.zeros(total, np.int64), np.int64(grain)]
    ends, _ = both(k.from_source(text, "note", {"k": k}), given, {"multiple": multiple}, workers)
    part = max(total // (4 * workers), 1)
    long, short = (grain, grain) if grain else (part, max(part // 4, 1))

    def whole(size):
        return -(-size // multiple) * multiple

    shares = min(workers, 8)
    share = whole(-(-total // shares))
    expected = np.zeros_like(ends)
    for first in range(0, total, max(share, 1)):
        begin, limit = first, min(first + share, total)
        while begin < limit:
            size = whole(long if begin - first < 3 * whole(long) else short)
            end = total if workers == 1 else min(begin + size, limit)
            expected[begin:end], begin = end, end
    np.testing.assert_array_equal(ends, expected)


@pytest.mark.parametrize(("workers", "chunks"), [(2, 1), (3, 1), (2, 4)])
def test_workers_begin_with_their_own_share(workers, chunks):
    """Each worker waits in its first chunk until all have one; what is left goes to any of them."""
    text = """
    def note(seen: k.InOut[k.i64, 1], begun: k.InOut[k.i64, 1], ctx: k.Context):
        for i in ctx.parallel(seen.shape[0], grain=1):
            seen[i] = ctx.worker
            begun.atomic_add(0, value=1)
            turns = k.i64(0)
            while begun.atomic_add(0, value=0) < ctx.num_workers and turns < 1 << 30:
                turns += 1
    """
    for run in (compiled, interpreted):
        seen, begun = np.full(workers * chunks, -1), np.zeros(1, np.int64)
        run(k.from_source(text, "note", {"k": k}), [seen, begun], {}, workers)
        assert list(seen[::chunks]) == [*range(workers)] and begun[0] == workers * chunks
        assert set(seen) <= {*range(workers)}


def test_one_of_two_views():
    text = """
    def choose(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], y: k.Input[k.f32, 1], n: k.i64):
        for i in range(out.shape[0]):
            row = k.select(i < n, x[i, 1:], y)
            for j in range(k.min(row.shape[0], out.shape[1])):
                out[i, j] = row[j]
            out[i, 3] = k.f32(row.shape[0])
    """
    x, y = np.arange(24, dtype=np.float32).reshape(4, 6), -np.ones(7, np.float32)
    out, *_ = both(
        k.from_source(text, "choose", {"k": k}), [np.zeros((4, 4), np.float32), x, y, np.int64(2)]
    )
    np.testing.assert_array_equal(out[:2, :3], x[:2, 1:4])
    assert (out[2:, :3] == -1).all() and out[:, 3].tolist() == [5, 5, 7, 7]


@pytest.mark.plain_code
def test_specialized_code_is_equal_for_equal_kernels():
    spec = k.TensorSpec(k.f32, ("n",))
    one = k.specialize(saxpy, [spec, spec, spec, k.f32], {"W": 8})
    two = k.specialize(saxpy, [spec, spec, spec, k.f32], {"W": 8})
    other = k.specialize(saxpy, [spec, spec, spec, k.f32], {"W": 16})
    assert one.key == two.key and one == two and one.key != other.key
    assert [(s.name, s.kind) for s in one.slots] == [
        ("out", "pointer"), ("out", "dim"), ("x", "pointer"), ("x", "dim"), ("y", "pointer"), ("y", "dim"),
        ("a", "scalar"),
    ]  # fmt: skip


@pytest.mark.plain_code
def test_static_strides_take_no_slots():
    spec = k.TensorSpec(k.f32, (None, 8), (16, 1))
    ir = k.specialize(copy_any, [spec, k.TensorSpec("float32", (None, 8), (None, 1))])
    assert [(s.arg, s.kind, s.axis) for s in ir.slots] == [
        (0, "pointer", 0), (0, "dim", 0), (1, "pointer", 0), (1, "dim", 0), (1, "stride", 0),
    ]  # fmt: skip


def test_print(capfd):
    text = """
    def show(x: k.Input[k.f32, 1]):
        k.print("x[{}] = {} {}%", 1, x[1], x.load(0, width=2))
    """
    fn = k.from_source(text, "show", {"k": k})
    compiled(fn, [np.array([1.5, 2.5], np.float32)])
    assert capfd.readouterr().out == "x[1] = 2.5 [1.5, 2.5]%\n"


# ***** records *****
class Line(NamedTuple):
    elements: Any
    start: Any
    width: int


class Other(NamedTuple):
    elements: Any
    start: Any
    width: int


class Place(NamedTuple):
    start: Any
    scale: Any


@k.inline
def place_from(i, width):
    if i % 3 == 0:
        return Place(i * width, 2.0)
    return Place(scale=k.f32(i), start=0)


@k.kernel
def lines(out: k.Output[k.f32, 2], x: k.Input[k.f32, 1], shift: k.i64):
    for i in range(out.shape[0]):
        place = place_from(i, 4)
        line = Line(x, place.start, width=4)
        if i > shift:
            line = line._replace(start=line.start + shift)
        elements, start, _ = line
        first = Line(elements, start, line.width) if i < 2 else line._replace(start=i)
        out.store(i, 0, value=elements.load(first.start, width=first.width) * place.scale)


@pytest.mark.parametrize("shift", [1, 3])
def test_records(shift):
    x = rng().normal(size=64).astype(np.float32)
    out, *_ = both(lines, [np.zeros((9, 4), np.float32), x, np.int64(shift)])
    for i in range(9):
        start = (4 * i if i % 3 == 0 else 0) + (shift if i > shift else 0)
        start = start if i < 2 else i
        scale = np.float32(i if i % 3 else 2)
        np.testing.assert_array_equal(out[i], x[start : start + 4] * scale)


@k.kernel
def records_of_two_kinds(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], n: k.i64):
    line = Line(x, 0, 1)
    if n > 2:
        line = Other(x, 1, 1)
    out[0] = line.elements[line.start]


@k.kernel
def record_without_field(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1], n: k.i64):
    line = Line(x, n, 1)
    out[0] = line.length


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (records_of_two_kinds, "a record Other and a record Line, which cannot be chosen"),
        (record_without_field, "a record Line: .* has no attribute 'length'"),
    ],
)
def test_records_that_do_not_fit(kernel, message):
    with pytest.raises(k.KernelError, match=message):
        k.specialize(kernel, [k.TensorSpec(k.f32, (None,)), k.TensorSpec(k.f32, (None,)), k.i64])


SEVERAL_VARIABLES = """
from max import kernel as k

def fibonacci(out: k.Output[k.i64, 1]):
    first, second, third, fourth, fifth, sixth = 1, 2, 3, 4, 5, 6
    for i in range(out.shape[0]):
        first, second, third, fourth, fifth, sixth = second, third, fourth, fifth, sixth, first
    out[0] = first + second * third - fourth * fifth - sixth

fn = k.from_source(SOURCE, "fibonacci", {"k": k})
print(k.specialize(fn, [k.TensorSpec(k.i64, (None,))]).key)
"""


def test_keys_do_not_depend_on_the_process():
    code = SEVERAL_VARIABLES[: SEVERAL_VARIABLES.index("fn =")]
    script = SEVERAL_VARIABLES.replace("SOURCE", repr(code[code.index("def") :]))
    keys = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(keys) == 1


@k.inline
def scaled_part(
    x: k.View, first: k.Integer, factor: k.Value, mask: k.Mask | None, more: k.SIMD | float
) -> Any:
    return k.cast(x.load(first, width=4, mask=mask), k.f32) * factor + more


@k.kernel
def typed_helper(out: k.Output[k.f32, 1], x: k.Input[k.f32, 1]):
    # numbers and values of run time, with and without a mask
    a = scaled_part(x, 0, 2, None, 0.5)
    b = scaled_part(x, out.shape[0] - 4, x[1], k.iota(k.i64, 4) < 3, a)
    out.store(0, value=b)


def test_annotations_of_helpers_change_nothing() -> None:
    """Values keep the types that the caller passes, whether numbers or values of run time."""
    x = np.array([3.0, -1.5, 2.0, 4.0, 7.0], np.float32)
    (out,) = both(typed_helper, [np.zeros(5, np.float32), x])[:1]
    a = x[:4] * 2 + 0.5
    np.testing.assert_array_equal(out[:4], np.array([*x[1:4], 0.0]) * x[1] + a)
