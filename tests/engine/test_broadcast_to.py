"""`broadcast_to` with a shape that is a tensor: the engine and the interpreter read it at run time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from max import driver, engine
from max._interpreter import run
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops

CPU = DeviceRef.CPU()


def graph_of(shape: Sequence[Any], out_dims: Sequence[Any], integers: DType) -> Graph:
    types = [TensorType(DType.float32, shape, CPU), TensorType(integers, [len(out_dims)], CPU)]
    with Graph("broadcast", input_types=types) as graph:
        x, wanted = (v.tensor for v in graph.inputs)
        graph.output(ops.broadcast_to(x, wanted, out_dims=out_dims))
    return graph


@pytest.fixture(scope="module")
def session() -> engine.InferenceSession:
    return engine.InferenceSession(devices=[driver.CPU()])


CASES = [
    ((1, 3), ("n", 3), (4, 3), DType.int64),
    ((3,), ("m", "n"), (2, 3), DType.int32),
    ((1,), (5,), (5,), DType.int64),
    ((2, 1, "a"), (2, "m", "a"), (2, 7, 3), DType.int64),
    ((), ("r",), (3,), DType.int64),
]


@pytest.mark.parametrize(("shape", "out_dims", "sizes", "integers"), CASES)
def test_the_shape_is_read(
    session: engine.InferenceSession,
    rng: np.random.Generator,
    shape: tuple[Any, ...],
    out_dims: tuple[Any, ...],
    sizes: tuple[int, ...],
    integers: DType,
) -> None:
    graph = graph_of(shape, out_dims, integers)
    x = rng.normal(size=[3 if d == "a" else d for d in shape]).astype(np.float32)
    wanted = np.array(sizes, integers.to_numpy())
    expected = np.broadcast_to(x, sizes)
    np.testing.assert_array_equal(session.load(graph).execute(x, wanted)[0].to_numpy(), expected)
    np.testing.assert_array_equal(run(graph, [x, wanted])[0], expected)


@pytest.mark.parametrize(
    ("shape", "out_dims", "sizes"),
    [
        ((1, 3), ("n", 3), (4, 2)),
        ((1, 3), ("n", 3), (4, 4)),
        ((1, 3), (2, 3), (4, 3)),
        ((2, 3), ("n", 3), (3, 3)),
    ],
)
def test_a_shape_that_does_not_fit_raises(
    session: engine.InferenceSession,
    shape: tuple[int, ...],
    out_dims: tuple[Any, ...],
    sizes: tuple[int, ...],
) -> None:
    graph = graph_of(shape, out_dims, DType.int64)
    x, wanted = np.ones(shape, np.float32), np.array(sizes)
    with pytest.raises((ValueError, RuntimeError)):
        session.load(graph).execute(x, wanted)
    with pytest.raises((ValueError, RuntimeError)):
        run(graph, [x, wanted])


def test_wrong_arguments() -> None:
    types = [TensorType(DType.float32, [1, 3], CPU), TensorType(DType.float32, [2], CPU)]
    with Graph("broadcast", input_types=types) as graph:
        x, floats = (v.tensor for v in graph.inputs)
        with pytest.raises(ValueError, match="needs out_dims"):
            ops.broadcast_to(x, ops.shape_to_tensor(x.shape))
        with pytest.raises(TypeError, match="expected integers of rank 1"):
            ops.broadcast_to(x, floats, out_dims=["n", 3])
        with pytest.raises(ValueError, match="2 elements, out_dims 1"):
            ops.broadcast_to(x, ops.shape_to_tensor(x.shape), out_dims=["n"])
        graph.output()
