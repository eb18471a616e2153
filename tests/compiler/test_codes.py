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


@pytest.mark.parametrize(
    "build", [unclipped, not_rounded, beyond, with_fraction, moved_by_a_fraction, positive, wide]
)
@pytest.mark.parametrize("zero", [0, 7])
def test_other_casts_stay(build: Callable[[Value], Value], zero: int) -> None:
    (launch,) = check(lambda x: (dequantized(build(x), 0.5, zero),))
    assert launch.count("cast") >= 2


def test_differences_that_floats_do_not_hold_stay() -> None:
    """A zero point of more than 24 bits."""
    (launch,) = check(
        lambda x: (dequantized(quantized(x, 0.5, 0, DType.uint8), 0.5, (1 << 24) + 1),)
    )
    assert launch.count("cast") == 3
