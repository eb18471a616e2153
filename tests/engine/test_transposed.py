"""Element-wise ops on transposed operands, which kernels transpose in registers, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()
TYPES = (DType.float32, DType.bfloat16, DType.float16, DType.int32, DType.int8, DType.float64)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_transposed_operands(dtype, symbolic, rng):
    for shape in ((5, 7), (16, 16), (33, 47), (200, 333), (1, 100), (100, 1)):
        turned = shape[::-1]
        dims = [("a", "b"), ("b", "a"), ("b", "a")] if symbolic else [shape, turned, turned]
        with Graph("g", input_types=[TensorType(dtype, d, CPU) for d in dims]) as graph:
            x, y, z = (value.tensor for value in graph.inputs)
            t = ops.transpose(x, 0, 1)
            graph.output(t * y + t[:, :1], ops.transpose(ops.transpose(y, 0, 1) + x, 0, 1) - z, t)
        arrays = [(rng.standard_normal(s) * 4).astype(dtype.to_numpy()) for s in (shape, turned, turned)]  # fmt: skip
        found = [t.to_numpy() for t in InferenceSession().load(graph).execute(*arrays)]
        kind = np.float64 if dtype.is_float() else dtype.to_numpy()
        x, y, z = (a.astype(kind) for a in arrays)
        for got, want in zip(found, (x.T * y + x.T[:, :1], (y.T + x).T - z, x.T), strict=True):
            assert_close(got, want.astype(kind), dtype.to_numpy(), scale=4)


PERMUTATIONS = given(
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    order=st.permutations(range(3)),
    rows=st.booleans(),
)


@PERMUTATIONS
@settings(max_examples=20, deadline=None)
def test_permutations(shape, order, rows):
    """Also with an operand that is broadcast along one axis."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    y = rng.standard_normal(x.transpose(order).shape[0 if rows else 2]).astype(np.float32)
    types = [TensorType(DType.float32, x.shape, CPU), TensorType(DType.float32, y.shape, CPU)]
    with Graph("g", input_types=types) as graph:
        a, b = (value.tensor for value in graph.inputs)
        turned = ops.permute(a, list(order))
        graph.output(turned * (ops.reshape(b, [-1, 1, 1]) if rows else b))
    (found,) = InferenceSession().load(graph).execute(x, y)
    want = x.transpose(order) * (y[:, None, None] if rows else y)
    assert_close(found.to_numpy(), want)


@pytest.mark.long
@PERMUTATIONS
@settings(max_examples=300, deadline=None)
def test_permutations_long(**drawn):
    test_permutations.hypothesis.inner_test(**drawn)
