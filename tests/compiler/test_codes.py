"""Codes that a region makes and widens again: the same floats as by integers, bit for bit, without the casts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

DEVICE = DeviceRef.CPU()
SESSION = InferenceSession(devices=[CPU()])
F32, I32 = DType.float32, DType.int32
LIMITS = {DType.uint8: (0.0, 255.0), DType.int8: (-128.0, 127.0)}
Value = TensorValue


def number(x: float, dtype: DType = F32) -> Value:
    return ops.constant(x, dtype, DEVICE)


def quantized(x: Value, scale: float, zero: int, dtype: DType) -> Value:
    low, high = LIMITS[dtype]
    codes = ops.round(x / number(scale))
    codes = codes + number(float(zero)) if zero else codes
    return ops.cast(ops.min(ops.max(codes, number(low)), number(high)), dtype)


def dequantized(codes: Value, scale: float, zero: int) -> Value:
    if not zero:
        return ops.cast(codes, F32) * number(scale)
    return ops.cast(ops.cast(codes, I32) - number(zero, I32), F32) * number(scale)


def drawn(count: int = 1000) -> np.ndarray:
    """Random numbers, ties of codes, zeros of both signs, and what no code represents."""
    rng = np.random.default_rng(0)
    ties = (np.arange(-300, 300) + 0.5) * 0.5
    special = [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38]
    return np.concatenate([rng.standard_normal(count) * 50, ties, special]).astype(np.float32)


def check(build: Callable[[Value], tuple[Value, ...]]) -> list[str]:
    """The launches of a graph; its results are those of the interpreter, bit for bit."""
    x = drawn()
    with Graph("codes", input_types=[TensorType(F32, ["n"], DEVICE)]) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    model = SESSION.load(graph)
    with np.errstate(all="ignore"):
        expected = _interpreter.run(graph, [x])
    for got, want in zip(model.execute(x), expected, strict=True):
        result = got.to_numpy()
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(want))
    return model.kernel_summaries


@pytest.mark.parametrize("dtype", LIMITS, ids=["uint8", "int8"])
@pytest.mark.parametrize("zero", [0, 1, 117, -5])
def test_pairs(dtype: DType, zero: int) -> None:
    def build(x: Value) -> tuple[Value, ...]:
        y = dequantized(quantized(x, 0.5, zero, dtype), 0.5, zero)
        return (dequantized(quantized(ops.tanh(y), 0.0078, zero, dtype), 0.0078, zero),)

    (launch,) = check(build)
    assert "cast" not in launch


def test_codes_that_are_stored_too() -> None:
    def build(x: Value) -> tuple[Value, ...]:
        codes = quantized(x, 0.5, 3, DType.uint8)
        return codes, dequantized(codes, 0.5, 3) + 1.0

    (launch,) = check(build)
    assert launch.count("cast") == 1


def test_after_a_product() -> None:
    """The epilogue of a product; sums of integers are exact."""
    x = np.random.default_rng(1).integers(-4, 5, (7, 16)).astype(np.float32)
    w = np.random.default_rng(2).integers(-4, 5, (16, 24)).astype(np.float32)
    with Graph("product", input_types=[TensorType(F32, ["n", 16], DEVICE)]) as graph:
        y = graph.inputs[0].tensor @ ops.constant(w, F32, DEVICE)
        graph.output(dequantized(quantized(y, 0.25, 10, DType.uint8), 0.25, 10))
    model = SESSION.load(graph)
    (launch,) = model.kernel_summaries
    assert "cast" not in launch
    (want,) = _interpreter.run(graph, [x])
    np.testing.assert_array_equal(model.execute(x)[0].to_numpy(), want)


def unclipped(x: Value) -> Value:
    return ops.cast(ops.round(x), DType.uint8)


def not_rounded(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(x, number(0.0)), number(255.0)), DType.uint8)


def beyond(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(ops.round(x), number(-1.0)), number(255.0)), DType.uint8)


def with_fraction(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(ops.round(x), number(0.5)), number(250.0)), DType.uint8)


def moved_by_a_fraction(x: Value) -> Value:
    moved = ops.round(x) + number(0.25)
    return ops.cast(ops.min(ops.max(moved, number(0.0)), number(250.0)), DType.uint8)


def positive(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(ops.round(x), number(5.0)), number(250.0)), DType.uint8)


def wide(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(ops.round(x), number(0.0)), number(250.0)), DType.int16)


def not_clipped_below(x: Value) -> Value:
    return ops.cast(ops.min(ops.round(x), number(250.0)), DType.uint8)


def not_clipped_above(x: Value) -> Value:
    return ops.cast(ops.max(ops.round(x), number(0.0)), DType.uint8)


def clipped(x: Value, low: Value, high: Value) -> Value:
    return ops.cast(ops.min(ops.max(ops.round(x), low), high), DType.uint8)


def unknown_low(x: Value) -> Value:
    return clipped(x, ops.abs(x), number(250.0))


def unknown_high(x: Value) -> Value:
    return clipped(x, number(0.0), ops.abs(ops.round(x)))


def low_fraction(x: Value) -> Value:
    codes = ops.min(ops.max(ops.round(x), number(-0.5)), number(9.0))
    return ops.cast(codes, DType.int8)


def high_fraction(x: Value) -> Value:
    return clipped(x, number(0.0), number(250.5))


def from_one(x: Value) -> Value:
    return clipped(x, number(1.0), number(250.0))


def up_to_minus_one(x: Value) -> Value:
    codes = ops.min(ops.max(ops.round(x), number(-9.0)), number(-1.0))
    return ops.cast(codes, DType.int8)


def beyond_above(x: Value) -> Value:
    return clipped(x, number(0.0), number(256.0))


def moved_and_not_rounded(x: Value) -> Value:
    return ops.cast(ops.min(ops.max(x + 3.0, number(0.0)), number(250.0)), DType.uint8)


def moved_by_an_unknown_number(x: Value) -> Value:
    moved = ops.round(x) + ops.abs(x)
    return ops.cast(ops.min(ops.max(moved, number(0.0)), number(250.0)), DType.uint8)


def moved_far(x: Value) -> Value:
    moved = ops.round(x) + number(float((1 << 20) + 1))
    return ops.cast(ops.min(ops.max(moved, number(0.0)), number(250.0)), DType.uint8)


def of_halves(x: Value) -> Value:
    halves = ops.round(ops.cast(x, DType.float16))
    low, high = number(0.0, DType.float16), number(250.0, DType.float16)
    return ops.cast(ops.min(ops.max(halves, low), high), DType.uint8)


def computed(x: Value) -> Value:
    codes = ops.cast(x > 0.0, DType.uint8)
    return codes + codes


OTHERS = [unclipped, not_rounded, beyond, with_fraction, moved_by_a_fraction, positive, wide]
OTHERS += [not_clipped_below, not_clipped_above, unknown_low, unknown_high, low_fraction]
OTHERS += [high_fraction, from_one, up_to_minus_one, beyond_above, moved_and_not_rounded]
OTHERS += [moved_by_an_unknown_number, moved_far, of_halves, computed]


@pytest.mark.parametrize("build", OTHERS)
@pytest.mark.parametrize("zero", [0, 7])
def test_other_casts_stay(build: Callable[[Value], Value], zero: int) -> None:
    (launch,) = check(lambda x: (dequantized(build(x), 0.5, zero),))
    assert launch.count("cast") >= 2


def differences_of_16_bits(x: Value) -> Value:
    """They wrap."""
    codes = quantized(x, 0.5, 0, DType.uint8)
    return ops.cast(ops.cast(codes, DType.int16) - number(-32_700, DType.int16), F32)


def less_an_unknown_number(x: Value) -> Value:
    codes = quantized(x, 0.5, 0, DType.uint8)
    return ops.cast(ops.cast(codes, I32) - ops.cast(ops.abs(codes), I32), F32)


def difference_of_sums(x: Value) -> Value:
    codes = ops.cast(quantized(x, 0.5, 0, DType.uint8), I32)
    return ops.cast((codes + codes) - number(3, I32), F32)


def number_of_32_bits(x: Value) -> Value:
    return ops.cast(ops.cast(quantized(x, 0.5, 0, DType.uint8), I32), F32)


@pytest.mark.parametrize(
    "build",
    [differences_of_16_bits, less_an_unknown_number, difference_of_sums, number_of_32_bits],
)
def test_other_differences_stay(build: Callable[[Value], Value]) -> None:
    (launch,) = check(lambda x: (build(x),))
    assert launch.count("cast") >= 3


@pytest.mark.parametrize(("low", "high"), [(-128.0, 0.0), (0.0, 127.0), (0.0, 0.0)])
def test_limits_at_zero(low: float, high: float) -> None:
    def build(x: Value) -> tuple[Value, ...]:
        codes = ops.min(ops.max(ops.round(x), number(low)), number(high))
        return (ops.cast(ops.cast(codes, DType.int8), F32) * 0.5,)

    (launch,) = check(build)
    assert "cast" not in launch


@pytest.mark.parametrize("zero", [1 << 20, -(1 << 20)])
def test_the_largest_zero_points(zero: int) -> None:
    """Of codes and of the floats that become codes."""
    (launch,) = check(
        lambda x: (
            dequantized(quantized(x, 0.5, 0, DType.uint8), 0.5, zero),
            dequantized(quantized(x, 0.5, -zero, DType.uint8), 0.5, 3),
        )
    )
    assert "cast" not in launch
    (launch,) = check(
        lambda x: (dequantized(quantized(x, 0.5, 0, DType.uint8), 0.5, zero + zero // (1 << 20)),)
    )
    assert launch.count("cast") == 3


def test_differences_that_floats_do_not_hold_stay() -> None:
    """A zero point of more than 24 bits."""
    (launch,) = check(
        lambda x: (dequantized(quantized(x, 0.5, 0, DType.uint8), 0.5, (1 << 24) + 1),)
    )
    assert launch.count("cast") == 3


# codes of products ------------------------------------------------------------------------


def scaled(x: Value, factors: np.ndarray) -> Value:
    """A product of codes `x` [n, 16] as scaled integers [n, 24], a factor for each column."""
    w = np.random.default_rng(2).integers(-128, 128, (16, 24)).astype(np.int8)
    total = ops.cast(x, I32) @ ops.cast(ops.constant(w, DType.int8, DEVICE), I32)
    return ops.cast(total, F32) * ops.constant(factors, F32, DEVICE)


FACTORS = np.linspace(-1e-3, 2e-2, 24, dtype=np.float32)


def check_codes(build: Callable[[Value], tuple[Value, ...]]) -> str:
    """The launch of a graph on codes; its results are those of the interpreter, bit for bit."""
    x = np.random.default_rng(1).integers(-128, 128, (37, 16)).astype(np.int8)
    with Graph("product", input_types=[TensorType(DType.int8, ["n", 16], DEVICE)]) as graph:
        graph.output(*build(graph.inputs[0].tensor))
    model = SESSION.load(graph)
    expected = _interpreter.run(graph, [x])
    for got, want in zip(model.execute(x), expected, strict=True):
        np.testing.assert_array_equal(got.to_numpy(), want)
        if want.dtype == np.float32:
            np.testing.assert_array_equal(np.signbit(got.to_numpy()), np.signbit(want))
    (launch,) = model.kernel_summaries
    return launch


@pytest.mark.parametrize("dtype", LIMITS, ids=["uint8", "int8"])
@pytest.mark.parametrize("zero", [0, 17, -128, 255])
def test_scaled_integers_have_no_nan(dtype: DType, zero: int) -> None:
    """Limits are moved by the zero point, the sign of zeros is lost in the codes that follow, and these fit."""

    def build(x: Value) -> tuple[Value, ...]:
        y = dequantized(quantized(scaled(x, FACTORS), 0.5, zero, dtype), 0.5, zero)
        # exact, with one rounding as with two
        return (quantized(y * 0.5 - 1.0, 0.3, zero, dtype),)

    launch = check_codes(build)
    assert "is_nan" not in launch and "abs" not in launch
    assert launch.count("cast") == 2 and launch.count("cast_within") == 1
    # of the zero points one is left: that of the codes at the end
    assert launch.count("add") + launch.count("sub") == 1 + (zero != 0)


@pytest.mark.parametrize("zero", [0, 17])
def test_the_sign_of_zeros_stays_where_it_is_seen(zero: int) -> None:
    launch = check_codes(
        lambda x: (dequantized(quantized(scaled(x, FACTORS), 9.0, zero, DType.int8), 9.0, zero),)
    )
    assert "is_nan" not in launch and ("abs" in launch) == (not zero)


def test_the_sign_of_a_divisor_stays() -> None:
    def build(x: Value) -> tuple[Value, ...]:
        y = dequantized(quantized(scaled(x, FACTORS), 9.0, 0, DType.int8), 9.0, 0)
        return (quantized(number(1.0) / y, 0.3, 0, DType.int8),)

    with np.errstate(all="ignore"):
        assert "abs" in check_codes(build)


def test_zero_points_that_differ_stay() -> None:
    """A zero point less another one."""

    def build(x: Value) -> tuple[Value, ...]:
        y = dequantized(quantized(scaled(x, FACTORS), 0.5, 3, DType.int8), 0.5, 5)
        return (quantized(y, 0.3, 0, DType.int8),)

    launch = check_codes(build)
    assert launch.count("add") == 1 and launch.count("sub") == 1


@pytest.mark.parametrize("factor", [np.inf, np.nan, 1e25])
def test_factors_that_give_nan_or_infinities(factor: float) -> None:
    factors = np.full(24, factor, np.float32)

    def build(x: Value) -> tuple[Value, ...]:
        with np.errstate(all="ignore"):
            y = dequantized(quantized(scaled(x, factors), 0.5, 3, DType.int8), 0.5, 3)
            return (quantized(y, 0.3, 0, DType.int8),)

    with np.errstate(all="ignore"):
        assert "is_nan" in check_codes(build)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "within"),
    [
        (-128.0, 127.0, DType.int8, True), (-128.9, 127.0, DType.int8, False), (-128.0, 127.5, DType.int8, False),
        (0.0, 255.0, DType.uint8, True), (-1.0, 255.0, DType.uint8, False), (0.0, 256.0, DType.uint8, False),
        (-32768.0, 32767.0, DType.int16, True), (0.0, 65536.0, DType.uint16, False), (-9.0, 9.0, DType.bool, False),
        (-2.0**31, 2.0**31 - 128, DType.int32, True), (-2.0**31, 2.0**31, DType.int32, False),
    ],
)  # fmt: skip
def test_casts_that_fit(low: float, high: float, dtype: DType, within: bool) -> None:
    def build(x: Value) -> tuple[Value, ...]:
        y = scaled(x, FACTORS * np.float32(1e6))
        return (ops.cast(ops.min(ops.max(y, number(low)), number(high)), dtype),)

    assert ("cast_within" in check_codes(build)) == within


def test_sums_that_wrap_are_not_followed() -> None:
    """Bytes whose sums wrap have any value."""

    def build(x: Value) -> tuple[Value, ...]:
        total = x + x
        return (
            ops.cast(ops.cast(total, F32) * 1.0, DType.int8),
            ops.cast(ops.cast(x, F32) + 1.0, DType.int8),
        )

    assert "cast_within" not in check_codes(build)


def test_numbers_are_seen_through_transposes() -> None:
    """As they come where the transpose of a quantized value was moved."""
    x = (np.random.default_rng(3).standard_normal((7, 9)) * 50).astype(np.float32)

    def turned(value: float, dtype: DType = F32) -> Value:
        return ops.transpose(ops.broadcast_to(number(value, dtype), [9, 7]), 0, 1)

    with Graph("turned", input_types=[TensorType(F32, [7, 9], DEVICE)]) as graph:
        moved = ops.round(graph.inputs[0].tensor) + turned(5.0)
        codes = ops.cast(ops.min(ops.max(moved, turned(-128.0)), turned(127.0)), DType.int8)
        graph.output(ops.cast(ops.cast(codes, I32) - turned(5, I32), F32) * 0.5)
    model = SESSION.load(graph)
    (launch,) = model.kernel_summaries
    assert "cast" not in launch
    (want,) = _interpreter.run(graph, [x])
    np.testing.assert_array_equal(model.execute(x)[0].to_numpy(), want)
