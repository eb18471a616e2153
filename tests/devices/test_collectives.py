"""Collectives over virtual CPU devices, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from tests.devices.harness import BACKENDS, refs, run

both = pytest.mark.parametrize("backend", BACKENDS)
counts = pytest.mark.parametrize("count", [1, 2, 3])


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 40, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


@both
@counts
@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16, np.int32, np.uint8, np.int64]
)
def test_allreduce(rng: np.random.Generator, backend: str, count: int, dtype: Any) -> None:
    xs = [numbers(rng, (5, 33), dtype) for _ in range(count)]
    ys = run(ops.allreduce.sum, xs, backend, signals=count)
    wide = np.float32 if np.dtype(dtype).itemsize < 4 and np.dtype(dtype).kind in "fV" else dtype
    wanted = xs[0].astype(wide)
    for x in xs[1:]:
        wanted = wanted + x.astype(wide)
    assert len(ys) == count
    for y in ys:
        np.testing.assert_array_equal(y, wanted.astype(dtype))


@both
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_allgather_of_uneven_sizes(rng: np.random.Generator, backend: str, axis: int) -> None:
    shapes = [[2, 3, 7] for _ in range(3)]
    for i, shape in enumerate(shapes):
        shape[axis] = 2 * i + 1
    xs = [numbers(rng, tuple(shape), np.float32) for shape in shapes]
    ys = run(lambda v, s: ops.allgather(v, s, axis), xs, backend, signals=3)
    for y in ys:
        np.testing.assert_array_equal(y, np.concatenate(xs, axis))


@both
@pytest.mark.parametrize("size", [1, 2, 4, None, 0])
def test_allgather_in_groups(rng: np.random.Generator, backend: str, size: int | None) -> None:
    xs = [numbers(rng, (rows, 3), np.float32) for rows in (2, 1, 3, 5)]
    ys = run(lambda v, s: ops.allgather(v, s, group_size=size), xs, backend, signals=4)
    step = size or 4
    for index, y in enumerate(ys):
        begin = index // step * step
        np.testing.assert_array_equal(y, np.concatenate(xs[begin : begin + step]))


@pytest.mark.parametrize("size", [3, 8, -2])
def test_groups_that_do_not_fit(rng: np.random.Generator, size: int) -> None:
    xs = [numbers(rng, (2, 3), np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match=f"group_size is {size}, expected a divisor of 4"):
        run(lambda v, s: ops.allgather(v, s, group_size=size), xs, BACKENDS[0], signals=4)


@both
def test_symbolic_and_empty(rng: np.random.Generator, backend: str) -> None:
    for rows in (0, 1, 9):
        xs = [numbers(rng, (rows, 6), np.float32), numbers(rng, (rows + 2, 6), np.float32)]
        ys = run(lambda v, s: ops.allgather(v, s), xs, backend, [["a", 6], ["b", 6]], signals=2)
        np.testing.assert_array_equal(ys[1], np.concatenate(xs))
        pair = [xs[0], xs[0]]
        ys = run(ops.allreduce.sum, pair, backend, [["n", 6], ["n", 6]], signals=2)
        np.testing.assert_array_equal(ys[1], xs[0] + xs[0])


@both
def test_a_result_that_one_device_changes_is_unchanged_on_the_others(
    rng: np.random.Generator, backend: str
) -> None:
    xs = [numbers(rng, (4, 8), np.float32) for _ in range(2)]

    def forward(values: list[Any], signals: list[Any]) -> list[Any]:
        first, second = ops.allreduce.sum(values, signals)
        kept = ops.buffer_create(BufferType(DType.float32, [4, 8], DeviceRef.CPU(0)))
        ops.buffer_store(kept, first)
        ops.buffer_store_slice(kept, ops.constant(0.0, DType.float32), [slice(0, 2)])
        return [ops.buffer_load(kept), first, second, values[1]]

    changed, first, second, input_1 = run(forward, xs, backend, signals=2)
    total = xs[0] + xs[1]
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(second, total)
    np.testing.assert_array_equal(input_1, xs[1])
    total[:2] = 0
    np.testing.assert_array_equal(changed, total)


@both
def test_collectives_in_a_subgraph(rng: np.random.Generator, backend: str) -> None:
    xs = [numbers(rng, (3, 4), np.float32) for _ in range(2)]

    def forward(values: list[Any], signals: list[Any]) -> list[Any]:
        types = [v.type for v in (*values, *signals)]
        inner = Graph.current.add_subgraph("step", input_types=types)
        with inner:
            args = inner.inputs
            pair = [a.tensor for a in args[:2]], [a.buffer for a in args[2:]]
            inner.output(*ops.allreduce.sum(*pair))
        once = ops.call(inner, *values, *signals)
        return ops.call(inner, *once, *signals)

    for y in run(forward, xs, backend, signals=2):
        np.testing.assert_allclose(y, 2 * (xs[0] + xs[1]))


F32, CPU = DType.float32, DeviceRef.CPU


@pytest.mark.parametrize(
    ("types", "signals", "error", "message"),
    [
        ([], [], ValueError, "no inputs"),
        ([(F32, [2])] * 2, [0], ValueError, "2 inputs and 1 signal buffers"),
        ([(F32, [2]), (F32, [3])], [0, 1], ValueError, r"input 1 is .*3.*, input 0 is .*2"),
        ([(F32, [2]), (DType.int32, [2])], [0, 1], TypeError, "expected one dtype"),
        ([(F32, [2]), (F32, [2, 1])], [0, 1], ValueError, "expected one rank"),
        ([(F32, [2])] * 2, [1, 0], ValueError, "signal buffer 0 is on cpu:1, input 0 on cpu:0"),
        ([(DType.bool, [2])] * 2, [0, 1], TypeError, "expected numbers"),
    ],
)
def test_what_is_refused(types: Any, signals: Any, error: Any, message: str) -> None:
    inputs = [TensorType(t, s, CPU(i)) for i, (t, s) in enumerate(types)]
    buffers = [BufferType(DType.uint8, [4], CPU(i)) for i in signals]
    with Graph("g", input_types=[*inputs, *buffers]) as graph:
        values = graph.inputs
        with pytest.raises(error, match=f"allreduce: .*{message}"):
            ops.allreduce.sum(
                [v.tensor for v in values[: len(inputs)]],
                [v.buffer for v in values[len(inputs) :]],
            )


def test_two_inputs_on_one_device_and_other_mistakes() -> None:
    types = [TensorType(F32, [2, 3], CPU(0))] * 2
    buffers = [BufferType(DType.uint8, [4], CPU(0)), BufferType(F32, [4], CPU(1))]
    other = [TensorType(F32, [2, 3], CPU(1)), TensorType(F32, [3, 4], CPU(1))]
    with Graph("g", input_types=[*types, *other, *buffers]) as graph:
        x, y, z, w = (v.tensor for v in graph.inputs[:4])
        s, t = (v.buffer for v in graph.inputs[4:])
        with pytest.raises(ValueError, match="inputs 0 and 1 are both on cpu:0"):
            ops.allgather([x, y], [s, s])
        with pytest.raises(TypeError, match="signal buffer 1 is f32.*, expected a buffer"):
            ops.allgather([x, z], [s, z])
        with pytest.raises(ValueError, match="axis 5 is out of range"):
            ops.allgather([x, z], [s, s], 5)
        with pytest.raises(ValueError, match="different|one device"):
            _ = x + z
    assert refs(2)[1] == CPU(1)
