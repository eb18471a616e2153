"""Functions for each launch, on a stream, and shards of weights, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import (
    BufferType,
    DevicePlacementPolicy,
    DeviceRef,
    Graph,
    TensorType,
    ops,
)

DEVICES = [CPU(0), CPU(1)]
REFS = [DeviceRef.CPU(0), DeviceRef.CPU(1)]


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def run(graph: Graph, *inputs: Any) -> list[np.ndarray[Any, Any]]:
    results = InferenceSession(devices=DEVICES).load(graph).execute(*inputs)
    return [result.to_numpy() for result in results]


@pytest.mark.parametrize(("axis", "whole"), [(0, 1), (1, 1), (-1, 1), (0, 0)])
def test_shard_and_stack(rng: np.random.Generator, axis: int, whole: int) -> None:
    xs = [floats(rng, 6, 4) for _ in range(3)]
    kind = TensorType(DType.float32, (6, 4) if whole else ("n", 4), REFS[0])
    with Graph("shards", input_types=[kind] * 3) as graph:
        inputs = [value.tensor for value in graph.inputs]
        parts = ops.shard_and_stack(inputs, [DEVICES[0], REFS[1]], axis)
        assert [part.device for part in parts] == REFS
        graph.output(*parts)
    want = np.split(np.stack(xs), 2, axis + 1 if axis >= 0 else axis)
    for got, part in zip(run(graph, *xs), want, strict=True):
        np.testing.assert_array_equal(got, part)
    if not whole:
        with pytest.raises(ValueError, match="2 devices do not divide axis 0"):
            run(graph, *[floats(rng, 5, 4) for _ in range(3)])


def test_shards_that_do_not_fit() -> None:
    kinds = [
        TensorType(DType.float32, (3, 4), REFS[0]),
        TensorType(DType.float32, (3, 5), REFS[0]),
        TensorType(DType.int32, (3, 4), REFS[0]),
    ]
    with Graph("shards", input_types=kinds) as graph:
        x, y, z = (value.tensor for value in graph.inputs)
        for inputs, devices, axis, error, said in (
            ([], REFS, 0, ValueError, "inputs is empty"),
            ([x], [], 0, ValueError, "devices is empty"),
            ([x], REFS, 0, ValueError, "axis 0 has 3 elements, which 2 devices"),
            ([x, y], REFS[:1], 0, ValueError, "input 1"),
            ([x, z], REFS[:1], 0, ValueError, "input 1"),
            ([x], REFS[:1], 2, IndexError, "axis 2"),
        ):
            with pytest.raises(error, match=said):
                ops.shard_and_stack(inputs, devices, axis)


def test_a_function_for_each_launch(rng: np.random.Generator) -> None:
    xs = [floats(rng, 3, 5), floats(rng, 2, 5)]
    kinds = [TensorType(DType.float32, x.shape, ref) for x, ref in zip(xs, REFS, strict=True)]
    halves = [TensorType(DType.bool, x.shape, ref) for x, ref in zip(xs, REFS, strict=True)]
    with Graph("launches", input_types=kinds) as graph:
        values = [value.tensor for value in graph.inputs]
        doubled, positive = ops.parallel(
            [values, values],
            lambda x, y: [x + y, x > 0],
            result_types=[kinds, halves],
        )
        (single,) = ops.parallel([values], lambda x: -x, result_types=[kinds])
        graph.output(*doubled, *positive, *single)
    got = run(graph, *[np.copy(x) for x in xs])
    for result, want in zip(
        got, [x + x for x in xs] + [x > 0 for x in xs] + [-x for x in xs], strict=True
    ):
        np.testing.assert_array_equal(result, want)


def test_buffers_and_the_chain_of_launches(rng: np.random.Generator) -> None:
    xs = [floats(rng, 4), floats(rng, 4)]
    kind = TensorType(DType.float32, (4,), REFS[0])
    with Graph(
        "stores", input_types=[kind, kind, *[BufferType(DType.float32, (4,), REFS[0])] * 2]
    ) as graph:
        values = [value.tensor for value in graph.inputs[:2]]
        buffers = [value.buffer for value in graph.inputs[2:]]

        def body(x: Any, buffer: Any, chain: Any) -> Any:
            ops.buffer_store(buffer, x * 2)
            return ops.buffer_load(buffer) + 1, chain

        (results,), chain = ops.parallel(
            [values],
            body,
            buffers=buffers,
            chain=graph.always_ready_chain,
            result_types=[[kind] * 2],
        )
        assert chain is not None
        graph.output(*results)
    stored = [np.zeros(4, np.float32) for _ in xs]
    for got, x in zip(run(graph, *xs, *stored), xs, strict=True):
        np.testing.assert_array_equal(got, 2 * x + 1)
    for buffer, x in zip(stored, xs, strict=True):
        np.testing.assert_array_equal(buffer, 2 * x)


def test_launches_that_do_not_fit() -> None:
    kind = TensorType(DType.float32, (4,), REFS[0])
    with Graph(
        "launches", input_types=[kind, kind, BufferType(DType.float32, (4,), REFS[0])]
    ) as graph:
        x, y = (value.tensor for value in graph.inputs[:2])
        buffer = graph.inputs[2].buffer
        chain = graph.always_ready_chain
        pair: Any = [[kind, kind]]
        for inputs, body, options, error, said in (
            ([], lambda: x, {}, ValueError, "no inputs"),
            ([[x, y], [x]], lambda a, b: a, {}, ValueError, "bundle 1 of inputs has 1"),
            ([[x]], lambda a: a, {}, ValueError, "bundle 0 of result_types has 2"),
            ([[x, y]], lambda a: [a, a], {}, ValueError, "returns 2 tensors, expected 1"),
            ([[x, y]], lambda a: a > 0, {}, ValueError, "result 0"),
            ([[x, y]], lambda a: None, {}, TypeError, "returns None"),
            ([[x, y]], lambda a, b: a, {"buffers": [buffer] * 2}, ValueError, "need a chain"),
            (
                [[x, y]],
                lambda a, b: a,
                {"buffers": [buffer], "chain": chain},
                ValueError,
                "buffers has 1",
            ),
            (
                [[x, y]],
                lambda a, c: a,
                {"chain": chain},
                TypeError,
                "a pair of tensors and a chain",
            ),
        ):
            with pytest.raises(error, match=said):
                ops.parallel(inputs, body, result_types=pair, **options)


def test_a_function_on_a_stream(rng: np.random.Generator) -> None:
    x, y = floats(rng, 3, 5), floats(rng, 3, 5)
    kind = TensorType(DType.float32, ("n", 5), REFS[0])
    with Graph("stream", input_types=[kind, kind]) as graph:
        a, b = (value.tensor for value in graph.inputs)
        (total,) = ops.side_stream([a, b], lambda p, q: p + q, result_types=[kind], stream_id=0)
        both = ops.side_stream([a], lambda p: [p * 2, p], result_types=[kind, kind])
        for body, types, stream, error, said in (
            (lambda p: [p, p], [kind], 1, ValueError, "returns 2 tensors, expected 1"),
            (lambda p: p > 0, [kind], 1, ValueError, "result 0"),
            (lambda p: 3, [kind], 1, TypeError, "returns 3"),
            (lambda p: p, [kind], -1, ValueError, "stream_id is -1"),
            (lambda p: p, [kind], "1", TypeError, "stream_id is '1'"),
        ):
            with pytest.raises(error, match=said):
                ops.side_stream([a], body, result_types=types, stream_id=stream)  # pyright: ignore[reportArgumentType]
        graph.output(total, *both)
    for got, want in zip(run(graph, x, y), [x + y, x * 2, x], strict=True):
        np.testing.assert_array_equal(got, want)


def test_options_of_graphs() -> None:
    for policy in DevicePlacementPolicy:
        assert (
            Graph("placed", strict_device_placement=policy, is_device_graph=True).name == "placed"
        )
    with pytest.raises(TypeError, match="strict_device_placement is 'error'"):
        Graph("placed", strict_device_placement="error")  # pyright: ignore[reportArgumentType]
    assert Graph.debug.source_tracebacks is False and Graph("debug").debug is Graph.debug
    Graph.debug.source_tracebacks = True
    try:
        assert Graph("debug").debug.source_tracebacks
        with pytest.raises(TypeError, match="source_tracebacks is 1"):
            Graph.debug.source_tracebacks = 1  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        Graph.debug.source_tracebacks = False
