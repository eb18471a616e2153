"""Floats of 8 and 4 bits: conversions equal ml_dtypes' bit for bit; ops compute, move and store them."""

from __future__ import annotations

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()
FORMATS = [
    DType.float8_e4m3fn,
    DType.float8_e4m3fnuz,
    DType.float8_e5m2,
    DType.float8_e5m2fnuz,
    DType.float4_e2m1fn,
    DType.float6_e2m3fn,
    DType.float6_e3m2fn,
]
SESSION = InferenceSession(devices=[CPU()])

pytestmark = pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)


def every_code(dtype: DType) -> np.ndarray:
    count = 1 << dtype.size_in_bits
    return np.tile(np.arange(count, dtype=np.uint8), 256 // count).view(dtype.to_numpy())


def load(types, build):
    with Graph("float8", input_types=types) as graph:
        result = build(*[v.tensor for v in graph.inputs])
        graph.output(*(result if isinstance(result, tuple) else (result,)))
    return graph, SESSION.load(graph)


def tensor(dtype: DType, *shape) -> TensorType:
    return TensorType(dtype, shape, DEVICE)


def same_codes(got: np.ndarray, want: np.ndarray) -> None:
    """Asserts equal numbers and equal signs of zeros; any NaN equals any NaN."""
    assert got.dtype == want.dtype
    a, b = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    finite = ~np.isnan(b)
    np.testing.assert_array_equal(got.view(np.uint8)[finite], want.view(np.uint8)[finite])


@pytest.mark.parametrize("goal", [DType.float32, DType.float16, DType.bfloat16, DType.float64])
def test_every_code_widens_exactly(dtype: DType, goal: DType) -> None:
    _, model = load([tensor(dtype, "n")], lambda x: x.cast(goal))
    # a length with a tail of less than a vector
    codes = np.concatenate([every_code(dtype), every_code(dtype)[:13]])
    got = model.execute(codes)[0].to_numpy()
    with np.errstate(all="ignore"):
        want = codes.astype(goal.to_numpy())
    assert got.dtype == want.dtype
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def interesting(dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """All representable numbers, the midpoints of neighbors and the floats next to them, the extremes, and random
    bits.
    """
    finite = np.unique(every_code(dtype).astype(np.float32))
    finite = finite[np.isfinite(finite)]
    halfway = (finite[1:] + finite[:-1]) / 2
    edge = np.float32(finite[-1]) + (finite[-1] - finite[-2]) * np.float32([0.25, 0.5, 0.75, 1, 8])
    around = np.concatenate([halfway, edge, -edge, finite])
    near = [np.nextafter(around, np.float32(s * np.inf)) for s in (-1, 1)]
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3e38, -3e38])
    random = rng.integers(0, 2**32, 40_000, dtype=np.uint32).view(np.float32)
    scaled = rng.standard_normal(20_000).astype(np.float32) * np.float32(2.0) ** rng.integers(
        -20, 18, 20_000
    )
    return np.concatenate([around, *near, special, random, scaled.astype(np.float32)])


def test_float32_rounds_as_ml_dtypes_does(dtype: DType, rng: np.random.Generator) -> None:
    _, model = load([tensor(DType.float32, "n")], lambda x: x.cast(dtype))
    values = interesting(dtype, rng)
    if dtype.size_in_bits < 8:
        # the format has no NaN; the sign of the zero that NaN becomes is unspecified
        values = values[~np.isnan(values)]
    with np.errstate(all="ignore"):
        want = values.astype(dtype.to_numpy())
    same_codes(model.execute(values)[0].to_numpy(), want)


def test_one_element_and_empty(dtype: DType) -> None:
    """The conversion of single elements."""
    _, model = load(
        [tensor(DType.float32)], lambda x: (x.cast(dtype), x.cast(dtype).cast(DType.float32) * 2)
    )
    narrow, twice = [out.to_numpy() for out in model.execute(np.float32(0.3))]
    want = np.float32(0.3).astype(dtype.to_numpy())
    same_codes(narrow.reshape(1), np.asarray(want).reshape(1))
    assert twice == np.float32(want) * 2
    _, model = load([tensor(dtype, "n")], lambda x: x + x)
    assert model.execute(np.zeros(0, dtype.to_numpy()))[0].shape == (0,)


def test_ops_compute_in_float32(dtype: DType, rng: np.random.Generator) -> None:
    def build(x, y):
        return ops.tanh(x * y) + x, ops.max(x, y), x > y, ops.sum(x, axis=1), ops.softmax(y), -x

    types = [tensor(dtype, "n", 37), tensor(dtype, "n", 37)]
    graph, model = load(types, build)
    x, y = (
        rng.standard_normal((5, 37)).astype(np.float32).astype(dtype.to_numpy()) for _ in range(2)
    )
    expected = _interpreter.run(graph, [x, y])
    for got, want in zip(model.execute(x, y), expected, strict=True):
        array = got.to_numpy()
        assert array.dtype == want.dtype
        # one unit in the last place: the interpreter rounds after each op
        assert_close(array.astype(np.float32), want.astype(np.float32), dtype=dtype.to_numpy())


def test_moves(dtype: DType, rng: np.random.Generator) -> None:
    """Ops that move elements keep their bytes, those of NaNs too."""

    def build(x, i):
        moved = ops.concat([x.T, x.T], axis=0)
        picked = ops.gather(x, i, axis=0)
        return moved, picked, x[::-1, 1:], ops.pad(x, [0, 1, 2, 0]), ops.tile(x, [2, 1])

    _, model = load([tensor(dtype, 6, 7), tensor(DType.int64, 3)], build)
    x = rng.permutation(every_code(dtype))[:42].reshape(6, 7)
    i = np.array([5, 0, 2])
    moved, picked, turned, padded, tiled = [out.to_numpy() for out in model.execute(x, i)]
    same_codes(moved, np.concatenate([x.T, x.T]))
    same_codes(picked, x[i])
    same_codes(turned, x[::-1, 1:])
    same_codes(padded, np.pad(x.view(np.uint8), [(0, 1), (2, 0)]).view(x.dtype))
    same_codes(tiled, np.tile(x, (2, 1)))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_matmul(dtype: DType, rows: int, rng: np.random.Generator) -> None:
    """Products with 8-bit weights, which are converted when they are packed; sums are float32."""

    def build(x, w):
        return x.cast(DType.float32) @ w.cast(DType.float32).T, x @ w.T

    _, model = load([tensor(dtype, "m", 70), tensor(dtype, 33, 70)], build)
    x = (rng.standard_normal((rows, 70)) / 4).astype(np.float32).astype(dtype.to_numpy())
    w = (rng.standard_normal((33, 70)) / 4).astype(np.float32).astype(dtype.to_numpy())
    wide, narrow = [out.to_numpy().astype(np.float32) for out in model.execute(x, w)]
    want = x.astype(np.float64) @ w.astype(np.float64).T
    assert_close(wide, want.astype(np.float32), scale=8.0)
    rounded = want.astype(np.float32).astype(dtype.to_numpy()).astype(np.float32)
    # a sum next to a tie may be rounded up or down
    assert_close(narrow, rounded, dtype=dtype.to_numpy())
    assert np.mean(narrow == rounded) > 0.95


def test_constants_and_buffers(dtype: DType) -> None:
    from max.graph import BufferType

    values = np.array([[0.5, -2, 448 if "e4m3fn" == dtype.name[-6:] else 1]], np.float32)
    with Graph("constants", input_types=[BufferType(dtype, [2, 3], DEVICE)]) as graph:
        buffer = graph.inputs[0].buffer
        c = ops.constant(values, dtype, device=DEVICE)
        ops.buffer_store(buffer, ops.buffer_load(buffer) + c)
        graph.output(c)
    held = np.ones((2, 3), np.float32).astype(dtype.to_numpy())
    (out,) = SESSION.load(graph).execute(held)
    same_codes(out.to_numpy(), values.astype(dtype.to_numpy()))
    want = (1 + values.astype(dtype.to_numpy()).astype(np.float32)).astype(dtype.to_numpy())
    same_codes(held, np.broadcast_to(want, (2, 3)).copy())
