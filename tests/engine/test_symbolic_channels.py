"""Convolutions, pools and folds of symbolic channels and sizes: equal to those of static ones, or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from max import _interpreter, driver, engine
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

CPU = DeviceRef.CPU()


@pytest.fixture(scope="module")
def session() -> engine.InferenceSession:
    return engine.InferenceSession(devices=[driver.CPU()])


def graph_of(build: Callable[..., TensorValue], shapes: Sequence[Sequence[Any]]) -> Graph:
    types = [TensorType(DType.float32, shape, CPU) for shape in shapes]
    with Graph("channels", input_types=types) as graph:
        graph.output(build(*(v.tensor for v in graph.inputs)))
    return graph


# graph function, symbolic shapes, valid shapes, invalid shapes
CASES = {
    "conv2d": (
        lambda x, w: ops.conv2d(x, w, padding=(1, 0, 0, 1)),
        ((1, 6, 7, "c"), (3, 2, "k", 5)),
        ((1, 6, 7, 4), (3, 2, 4, 5)),
        ((1, 6, 7, 4), (3, 2, 3, 5)),
    ),
    "grouped": (
        lambda x, w: ops.conv2d(x, w, groups=2),
        ((1, 6, 7, "c"), (3, 2, "k", "f")),
        ((1, 6, 7, 4), (3, 2, 2, 6)),
        ((1, 6, 7, 4), (3, 2, 2, 5)),
    ),
    "conv3d": (
        lambda x, w: ops.conv3d(x, w),
        ((1, 3, 6, 7, "c"), (2, 3, 2, "k", 5)),
        ((1, 3, 6, 7, 4), (2, 3, 2, 4, 5)),
        ((1, 3, 6, 7, 2), (2, 3, 2, 4, 5)),
    ),
    "conv2d_transpose": (
        lambda x, w: ops.conv2d_transpose(x, w, stride=(2, 1)),
        ((1, 4, 5, "c"), (3, 2, 5, "k")),
        ((1, 4, 5, 3), (3, 2, 5, 3)),
        ((1, 4, 5, 4), (3, 2, 5, 3)),
    ),
    "larger window": (
        lambda x, w: ops.conv2d(x, w, stride=(2, 2)),
        ((1, "h", 5, 2), (3, 3, 2, 4)),
        ((1, 3, 5, 2), (3, 3, 2, 4)),
        ((1, 2, 5, 2), (3, 3, 2, 4)),
    ),
    "larger volume": (
        lambda x, w: ops.conv3d(x, w, padding=(0, 1, 0, 0, 0, 0)),
        (("b", "d", 3, "w", 1), (3, 3, 3, 1, 2)),
        ((2, 2, 3, 3, 1), (3, 3, 3, 1, 2)),
        ((2, 2, 3, 2, 1), (3, 3, 3, 1, 2)),
    ),
    "larger pool": (
        lambda x: ops.avg_pool2d(x, (3, 3), stride=3, padding=(0, 1)),
        ((1, "h", "w", 2),),
        ((1, 3, 1, 2),),
        ((1, 2, 1, 2),),
    ),
    "larger pool of maxima": (
        lambda x: ops.max_pool2d(x, (2, 3), ceil_mode=True),
        ((1, "h", "w", 2),),
        ((1, 2, 3, 2),),
        ((1, 2, 2, 2),),
    ),
    "larger block": (
        lambda x, like: ops.fold(x, (like.shape[0], 4), (3, 2), padding=(1, 0)),
        (("b", 12, "l"), ("h",)),
        ((2, 12, 6), (2,)),
        ((2, 12, 0), (0,)),
    ),
    "fold": (
        lambda x: ops.fold(x, (4, 4), (2, 2)),
        (("b", "c", "l"),),
        ((2, 12, 9),),
        ((2, 10, 9),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_channels_of_a_run(
    session: engine.InferenceSession, rng: np.random.Generator, name: str
) -> None:
    build, symbolic, sizes, wrong = CASES[name]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in sizes]
    (expected,) = _interpreter.run(graph_of(build, sizes), arrays)
    graph = graph_of(build, symbolic)
    model = session.load(graph)
    np.testing.assert_allclose(model.execute(*arrays)[0].to_numpy(), expected, 1e-4, 1e-4)
    np.testing.assert_allclose(_interpreter.run(graph, arrays)[0], expected, 1e-5, 1e-5)
    arrays = [np.ones(shape, np.float32) for shape in wrong]
    with pytest.raises((ValueError, RuntimeError), match="conv|fold|pool"):
        model.execute(*arrays)
    with pytest.raises((ValueError, RuntimeError)):
        _interpreter.run(graph, arrays)
