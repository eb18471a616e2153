"""Element-wise ops on concatenations, which are computed part by part, against NumPy."""

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


PARTS = given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    rows=st.integers(1, 5),
    axis=st.integers(0, 2),
    broadcast=st.sampled_from(["none", "row", "column", "one"]),
    used_twice=st.booleans(),
    after=st.sampled_from(["output", "softmax", "matmul", "slice"]),
)


def check_parts(sizes, rows, axis, broadcast, used_twice, after):
    rng = np.random.default_rng(0)
    shapes = [[rows, 3, 4] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[axis] = size
    parts = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    whole = np.concatenate(parts, axis)
    other = rng.standard_normal({
        "none": whole.shape, "row": whole.shape[2:], "column": (*whole.shape[1:2], 1), "one": (1, 1, 1),
    }[broadcast]).astype(np.float32)  # fmt: skip
    types = [TensorType(DType.float32, a.shape, CPU) for a in (*parts, other)]
    with Graph("g", input_types=types) as graph:
        *xs, y = (value.tensor for value in graph.inputs)
        # some parts are computed, others are inputs
        joined = ops.concat([-x if i % 2 else x for i, x in enumerate(xs)], axis)
        z = ops.tanh(joined * y) + y * y
        outputs = [z + joined if used_twice else z]
        if after == "softmax":
            outputs = [ops.softmax(outputs[0])]
        if after == "matmul":
            outputs = [outputs[0] @ ops.transpose(outputs[0], 1, 2)]
        if after == "slice":
            outputs = [outputs[0][:, 1:], outputs[0]]
        graph.output(*outputs)
    found = [t.to_numpy() for t in InferenceSession().load(graph).execute(*parts, other)]
    joined = np.concatenate([-x if i % 2 else x for i, x in enumerate(parts)], axis)
    z = np.tanh(joined * other) + other * other
    z = z + joined if used_twice else z
    if after == "softmax":
        e = np.exp(z - z.max(-1, keepdims=True))
        z = e / e.sum(-1, keepdims=True)
    if after == "matmul":
        z = z @ z.transpose(0, 2, 1)
    if after == "slice":
        assert_close(found.pop(0), z[:, 1:], scale=4)
    assert_close(found[0], z, scale=4)


@PARTS
@settings(max_examples=25, deadline=None)
def test_parts(sizes, rows, axis, broadcast, used_twice, after):
    check_parts(sizes, rows, axis, broadcast, used_twice, after)


@pytest.mark.long
@PARTS
@settings(max_examples=300, deadline=None)
def test_more_parts(sizes, rows, axis, broadcast, used_twice, after):
    check_parts(sizes, rows, axis, broadcast, used_twice, after)


def test_rotated_halves_are_one_kernel(rng):
    with Graph("g", input_types=[TensorType(DType.float32, ["t", 4, 16], CPU)] * 3) as graph:
        x, cos, sin = (value.tensor for value in graph.inputs)
        turned = ops.concat([-x[..., 8:], x[..., :8]], -1)
        graph.output(x * cos + turned * sin)
    model = InferenceSession().load(graph)
    assert len(model.kernel_summaries) == 1
    x, cos, sin = (rng.standard_normal((5, 4, 16)).astype(np.float32) for _ in range(3))
    want = x * cos + np.concatenate([-x[..., 8:], x[..., :8]], -1) * sin
    assert_close(model.execute(x, cos, sin)[0].to_numpy(), want)
