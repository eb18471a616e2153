"""Staged casts round operand and result to their dtypes, exactly as in the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import _interpreter
from max._compiler.analysis.precision import holds
from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from tests.rounding import near_ties, nearest

SESSION = InferenceSession(devices=[CPU()])
CPU_REF = DeviceRef.CPU()
NARROW = (DType.bfloat16, DType.float16, DType.float8_e4m3fn, DType.float8_e5m2)
EIGHT_AND_SIXTEEN = (*NARROW, DType.float8_e4m3fnuz, DType.float8_e5m2fnuz)
FLOATS = (DType.float32, DType.bfloat16, DType.float16, DType.float64, *NARROW[2:])
UNARY = ("neg", "abs", "relu", "sqrt", "floor", "round")
BINARY = ("add", "sub", "mul", "max", "min")
OTHER = ("third", "where", "reduce_max", "broadcast", "transpose", "gather", "matmul")


def same_bits(actual: Any, expected: Any, what: str) -> None:
    """Asserts equal values, NaN included; the sign of a zero may differ, as that of a maximum of zeros is undefined."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    wrong = ~((a == e) | np.isnan(a) & np.isnan(e))
    assert not wrong.any(), f"{what}: {actual[wrong][:4]}, expected {expected[wrong][:4]}"


def _graph_of(build: Callable[..., Any], *arrays: np.ndarray) -> Graph:
    types = [TensorType(DType.from_numpy(a.dtype), a.shape, CPU_REF) for a in arrays]
    with Graph("casts", input_types=types) as graph:
        result = build(*(value.tensor for value in graph.inputs))
        graph.output(*(result if isinstance(result, list | tuple) else (result,)))
    return graph


def run(build: Callable[..., Any], *arrays: np.ndarray) -> tuple[list[Any], list[Any]]:
    """The results of the engine and of the interpreter."""
    graph = _graph_of(build, *arrays)
    with flags.override(MAX_CHECK=2):
        outputs = [o.to_numpy() for o in SESSION.load(graph).execute(*arrays)]
    return outputs, _interpreter.run(graph, arrays)


def check(build: Callable[..., Any], *arrays: np.ndarray) -> list[Any]:
    outputs, expected = run(build, *arrays)
    for number, (got, want) in enumerate(zip(outputs, expected, strict=True)):
        same_bits(got, want, f"result {number}")
    return outputs


@pytest.mark.parametrize("narrow", NARROW, ids=lambda d: d.name)
@pytest.mark.parametrize("columns", [1, 13, 64, 100])
def test_a_narrowing_cast_rounds(narrow: DType, columns: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, columns)).astype(np.float32)

    def build(x: TensorValue) -> Sequence[TensorValue]:
        y = x.cast(narrow)
        wide = y.cast(DType.float32)
        return y, wide, wide - x, ops.max(wide), wide.cast(narrow), wide + wide

    y, wide, *_ = check(build, x)
    same_bits(wide, x.astype(narrow.to_numpy()).astype(np.float32), "the value")
    same_bits(y.astype(np.float32), wide, "both")


@pytest.mark.parametrize("narrow", NARROW[:2], ids=lambda d: d.name)
def test_a_widening_cast_sees_the_stored_value(narrow: DType, rng: np.random.Generator) -> None:
    a, b = (rng.standard_normal((7, 50)).astype(narrow.to_numpy()) for _ in range(2))
    w = rng.standard_normal((50, 40)).astype(narrow.to_numpy())

    def build(a: TensorValue, b: TensorValue) -> list[TensorValue]:
        made: list[TensorValue] = []
        for y in (
            ops.tanh(a * b + a) * b,
            ops.softmax(a * b),
            ops.silu(a @ ops.constant(w, narrow, CPU_REF)),
            ops.sum(a * b, axis=0),
        ):
            made += [y, y.cast(DType.float32), y.cast(DType.int32)]
        return made

    outputs, _ = run(build, a, b)
    for y, wide, whole in zip(outputs[::3], outputs[1::3], outputs[2::3], strict=True):
        same_bits(wide, y.astype(np.float32), "widened")
        np.testing.assert_array_equal(whole, np.trunc(y.astype(np.float32)).astype(np.int32))


@pytest.mark.parametrize("narrow", EIGHT_AND_SIXTEEN, ids=lambda d: d.name)
def test_a_double_is_rounded_once(narrow: DType, rng: np.random.Generator) -> None:
    """Values on ties and within the precision of float32 of them: a scalar, rows, a constant."""
    dtype = narrow.to_numpy()
    x = near_ties(dtype, rng, 60)
    few, one = x[rng.permutation(x.size)[:13]], x[:1]

    def build(x: TensorValue, few: TensorValue, one: TensorValue) -> list[TensorValue]:
        constant = ops.constant(x_finite[:40], DType.float64, CPU_REF).cast(narrow)
        made = [x.cast(narrow), few.cast(narrow), one.cast(narrow), constant]
        # beside another op of the region, and with further uses of the rounded value
        made += [(-x).cast(narrow), x.cast(narrow).cast(DType.float64), ops.abs(x.cast(narrow))]
        return made

    expected = nearest(x, dtype)
    x_finite = x[np.isfinite(expected)]
    outputs = [np.asarray(o).astype(np.float64) for o in check(build, x, few, one)]
    values = [x, few, one, x_finite[:40], -x, x, np.abs(x)]
    for output, value in zip(outputs, values, strict=True):
        output[np.isinf(output)] = np.nan
        same_bits(output, nearest(value, dtype), "rounded")


def test_products_epilogues_and_norms(rng: np.random.Generator) -> None:
    """Exact sums, so that only later roundings can differ."""
    x = rng.integers(-40, 40, (9, 24)).astype(np.float32)
    weights = [rng.integers(-9, 9, (24, 48)).astype(np.float32) for _ in range(3)]
    half, wide = DType.bfloat16, DType.float32

    def build(x: TensorValue) -> list[TensorValue]:
        a, b, c = (ops.constant(w, wide, CPU_REF) for w in weights)
        low = x.cast(half)
        return [
            (x @ a).cast(half).cast(wide) * 3,
            ops.relu((x @ b).cast(half)).cast(wide) * (x @ c).cast(DType.float16).cast(wide),
            ops.relu(low @ a.cast(half)).cast(wide) * 5,
            ((low * 3).cast(wide) @ b) + 1,
        ]

    check(build, x)


def test_attention_keeps_a_rounding_that_was_staged(rng: np.random.Generator) -> None:
    q, key, v = (rng.standard_normal((2, 3, 20, 16)).astype(np.float32) * 3 for _ in range(3))
    half = DType.bfloat16

    def build(q: TensorValue, key: TensorValue, v: TensorValue) -> list[TensorValue]:
        scores = q @ key.transpose(-1, -2)
        weights = ops.softmax(scores).cast(half).cast(DType.float32)
        low = (q.cast(half) * 0.3).cast(DType.float32) @ key.transpose(-1, -2)
        return [
            ops.softmax(scores.cast(half).cast(DType.float32)) @ v,
            weights @ v,
            ops.softmax(low) @ v,
        ]

    outputs, expected = run(build, q, key, v)
    plain = _interpreter.run(
        _graph_of(lambda q, key, v: [ops.softmax(q @ key.transpose(-1, -2)) @ v], q, key, v),
        [q, key, v],
    )[0]
    for got, want in zip(outputs, expected, strict=True):
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    # rounding changes results by more than this tolerance tolerance
    assert np.abs(outputs[1] - plain).max() > 1e-4 * np.abs(plain).max()


def test_rms_norm_rounds_before_the_weight(rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 64)).astype(ml_dtypes.bfloat16)
    gamma = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    outputs, expected = run(
        lambda x, g: [
            ops.rms_norm(x, g, 1e-5, multiply_before_cast=before).cast(DType.float32)
            for before in (False, True)
        ],
        x,
        gamma,
    )
    for got, want in zip(outputs, expected, strict=True):
        differing = np.mean(got != want)
        assert differing < 0.02, differing


@pytest.mark.parametrize("wide", FLOATS, ids=lambda d: d.name)
def test_casts_of_representable_values(wide: DType) -> None:
    for narrow in (DType.bool, DType.int8, DType.uint8, *NARROW):
        bits = np.arange(2 ** (8 * narrow.size_in_bytes), dtype=np.uint64)
        values = bits.astype(f"u{narrow.size_in_bytes}").view(narrow.to_numpy())
        if narrow is DType.bool:
            values = np.array([False, True])
        with np.errstate(all="ignore"):
            exact = values.astype(np.float64)
            there = values.astype(wide.to_numpy()).astype(np.float64)
        if holds(wide, narrow):
            same_bits(there, exact, f"{narrow} in {wide}")


class Chain:
    """Random ops; a staged cast rounds each result before its first use."""

    def __init__(self, data: st.DataObject, values: list[TensorValue]) -> None:
        self.draw = data.draw
        self.values = values

    def pick(self) -> TensorValue:
        return self.values[-1 - self.draw(st.integers(0, min(len(self.values), 5) - 1))]

    def alike(self, x: TensorValue) -> TensorValue:
        """Another value of the dtype and shape of x."""
        y = next((v for v in reversed(self.values) if v.shape == x.shape and v is not x), -x)
        return y.cast(x.dtype)

    def step(self) -> None:
        x = self.pick()
        kind = self.draw(st.sampled_from((*UNARY, *BINARY * 2, *OTHER)))
        made = self.make(kind, x)
        # a cast to the same dtype is no op
        made = made.cast(DType.float64 if made.dtype is DType.float32 else DType.float32)
        if self.draw(st.booleans()):
            made = made.cast(x.dtype)
        self.values.append(made.cast(self.draw(st.sampled_from(FLOATS))))

    def make(self, kind: str, x: TensorValue) -> TensorValue:
        match kind:
            case "neg":
                return -x
            case "third":
                # no ops whose result depends on the sign of zero
                return x / 3
            case "where":
                y = self.alike(x)
                return ops.where(x > y, y, x)
            case "reduce_max":
                return ops.max(x, axis=self.draw(st.integers(0, 1)))
            case "broadcast":
                return ops.broadcast_to(ops.max(x), x.shape)
            case "transpose":
                return ops.transpose(x, 0, 1)
            case "gather":
                indices = ops.constant(np.zeros(2, np.int64), DType.int64, CPU_REF)
                return ops.gather(x.cast(DType.float32), indices, 0)
            case "matmul":
                rows = int(x.shape[1])
                one = ops.constant(np.eye(rows, 7, dtype=np.float32), DType.float32, CPU_REF)
                # one non-zero element a sum; infinities times zeros would be NaN
                return ops.min(ops.max(x.cast(DType.float32), -99.0), 99.0) @ one
            case name if name in BINARY:
                return getattr(ops, name)(x, self.alike(x))
            case name:
                return getattr(ops, name)(x)


def run_chain(data: st.DataObject, steps: int) -> None:
    rows, columns = data.draw(st.sampled_from(((3, 5), (1, 40), (9, 17), (4, 64))))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    arrays = [
        rng.standard_normal((rows, columns)).astype(dtype.to_numpy())
        for dtype in (DType.float32, DType.bfloat16)
    ]

    def build(*inputs: TensorValue) -> list[TensorValue]:
        chain = Chain(data, list(inputs))
        for _ in range(steps):
            chain.step()
        made: list[TensorValue] = []
        for y in chain.values[2:][-data.draw(st.integers(1, 3)) :]:
            made += [y, y.cast(DType.float64)]
        return made

    outputs = check(build, *arrays)
    for y, wide in zip(outputs[::2], outputs[1::2], strict=True):
        same_bits(wide, y.astype(np.float64), "widened")


@given(st.data())
@settings(max_examples=40)
def test_chains_are_exact(data: st.DataObject) -> None:
    run_chain(data, data.draw(st.integers(1, 10)))


@pytest.mark.long
@given(st.data())
@settings(max_examples=1500)
def test_chains_are_exact_long(data: st.DataObject) -> None:
    run_chain(data, data.draw(st.integers(4, 30)))
