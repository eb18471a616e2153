"""Padding by a tensor's own elements, against NumPy, with sizes that are known and that a run tells."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import Tensor
from max.experimental import functional as F
from max.graph import DeviceRef, Graph, TensorType, ops

CASES = [
    ((2, 3, 4), (0, 0, 1, 2, 3, 0)),
    ((2, 3, 4), (5, 3, 0, 0, 0, 0)),
    ((1, 5, 2), (2, 1, 7, 9, 0, 1)),
]


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_known_sizes(mode: str) -> None:
    for shape, paddings in CASES:
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        pairs = list(zip(paddings[::2], paddings[1::2], strict=True))
        got = F.pad(Tensor.from_dlpack(x), paddings, mode=mode).to_numpy()
        np.testing.assert_array_equal(got, np.pad(x, pairs, mode=mode))


@pytest.mark.parametrize("mode", ["reflect", "edge"])
def test_symbolic_sizes(mode: str) -> None:
    type_ = TensorType(DType.int32, ("rows", "columns"), DeviceRef.CPU())
    with Graph("borders", input_types=[type_]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.pad(x, (4, 5, 0, 2), mode=mode), ops.pad(x, (0, x.shape[0], 0, 0), mode))
    model = InferenceSession(devices=[CPU()]).load(graph)
    for shape in ((3, 4), (1, 1), (2, 5)):
        x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        fixed, grown = (out.to_numpy() for out in model.execute(x))
        np.testing.assert_array_equal(fixed, np.pad(x, ((4, 5), (0, 2)), mode=mode))
        np.testing.assert_array_equal(grown, np.pad(x, ((0, shape[0]), (0, 0)), mode=mode))
    with pytest.raises(Exception, match="out of range"):
        model.execute(np.zeros((0, 2), np.int32))


def test_what_does_not_fit() -> None:
    x = Tensor.ones((2, 3))
    with pytest.raises(ValueError, match="the padding -1 of axis 1 is negative"):
        F.pad(x, (0, 0, -1, 0), mode="edge")
    with pytest.raises(ValueError, match="axis 0 of .* has no element for mode 'reflect'"):
        F.pad(Tensor.ones((0, 3)), (1, 0, 0, 0), mode="reflect")
    with pytest.raises(ValueError, match="3 paddings for a tensor of rank 2"):
        F.pad(x, (0, 0, 1), mode="edge")
