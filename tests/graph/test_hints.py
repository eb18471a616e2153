"""Errors of common mistakes say what would fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from max import nn
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental.tensor import Tensor
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.nn.module_v3 import Linear

REF = DeviceRef.CPU()


@pytest.mark.parametrize("dtype", [np.float32, torch.float32, "float32", np.dtype("float32")])
def test_dtypes_of_others_are_named(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a DType, such as DType\.float32;"):
        TensorType(dtype, [2], REF)


def test_unknown_dtypes() -> None:
    with pytest.raises(TypeError, match=r"'float23', expected a DType, a member of max\.dtype"):
        TensorType("float23", [2], REF)  # type: ignore[arg-type]


def test_methods_of_torch_are_functions() -> None:
    x = Tensor.ones([2])
    with pytest.raises(
        AttributeError,
        match=r"'Tensor'.*'softmax'; max\.experimental\.functional\.softmax is a function",
    ):
        x.softmax()  # type: ignore[attr-defined]
    with Graph("g", input_types=[TensorType(DType.float32, [2], REF)]) as graph:
        value: TensorValue = graph.inputs[0].tensor
        with pytest.raises(AttributeError, match=r"'relu'; max\.graph\.ops\.relu is a function"):
            value.relu()  # type: ignore[attr-defined]
        assert not hasattr(value, "data")
    with pytest.raises(AttributeError, match="no attribute 'nothing'$"):
        x.nothing()  # type: ignore[attr-defined]


def test_float64_for_float32() -> None:
    with Graph("g", input_types=[TensorType(DType.float32, [2], REF)]) as graph:
        graph.output(graph.inputs[0].tensor + 1)
    model = InferenceSession(devices=[CPU()]).load(graph)
    with pytest.raises(
        TypeError, match=r"got dtype float64 \(shape \[2\]\); array\.astype\('float32'\) fits"
    ):
        model.execute(np.ones(2))
    with pytest.raises(TypeError, match=r"got dtype float64 \(shape \[2\]\)$"):
        model.execute(torch.ones(2, dtype=torch.float64))


def test_transposed_weights() -> None:
    weight = np.ones((3, 4), np.float32)
    with pytest.raises(
        ValueError, match=r"weight has shape \[3, 4\], the model takes \[4, 3\]; it is transposed"
    ):
        nn.Linear(3, 4, DType.float32, REF).load_state_dict({"weight": weight})
    bias = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"expected \[4, 3\] and float32; it is transposed"):
        Linear(3, 4).load_state_dict({"weight": weight, "bias": bias})
    with pytest.raises(ValueError, match=r"expected \[4, 3\] and float32$"):
        Linear(3, 4).load_state_dict({"weight": weight[:2], "bias": bias})


def test_misnamed_parameters() -> None:
    state = {"weight": np.ones((4, 3), np.float32), "bais": np.ones(4, np.float32)}
    with pytest.raises(KeyError, match="no value for 'bias'; it has 'bais'"):
        Linear(3, 4).load_state_dict(state)
