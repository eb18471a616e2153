"""A session, and helpers that stage small graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType

DEVICE = DeviceRef.CPU()


def tensor(*shape: int | str, dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, shape, DEVICE)


def buffer(*shape: int | str, dtype: DType = DType.float32) -> BufferType:
    return BufferType(dtype, shape, DEVICE)


@pytest.fixture(scope="session")
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


@pytest.fixture
def load(session: InferenceSession) -> Callable[..., Model]:
    """``load([types], function of the inputs, weights)``: stages and loads."""

    def make(
        types: list[Any], build: Callable[..., Any], weights: Any = None, name: str = "model"
    ) -> Model:
        with Graph(name, input_types=types) as graph:
            values = [
                v.tensor if isinstance(t, TensorType) else v.buffer
                for v, t in zip(graph.inputs, types, strict=True)
            ]
            result = build(*values)
            outputs = (
                result if isinstance(result, tuple | list) else () if result is None else (result,)
            )
            graph.output(*outputs)
        return session.load(graph, weights_registry=weights)

    return make
