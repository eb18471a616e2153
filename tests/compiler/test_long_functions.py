"""Regions with a chain of long functions take four vectors at a time, others two."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest

from max._backends.cpu.regions import nest
from max._backends.cpu.regions.nest import write_nest
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops

Build = Callable[[TensorValue], TensorValue]
SESSION = InferenceSession(devices=[CPU()], num_threads=2)
CASES: dict[str, tuple[Build, Callable[[np.ndarray], np.ndarray], int]] = {
    "tanh": (ops.tanh, np.tanh, 2),
    "tanh of tanh": (lambda x: ops.tanh(ops.tanh(x) * x), lambda x: np.tanh(np.tanh(x) * x), 4),
    "exp of tanh": (lambda x: ops.exp(ops.tanh(x) + 1.0), lambda x: np.exp(np.tanh(x) + 1), 4),
    "tanh beside exp": (lambda x: ops.tanh(x) + ops.exp(x), lambda x: np.tanh(x) + np.exp(x), 2),
}


@pytest.mark.parametrize("dtype", [DType.float32, DType.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_chains(name: str, dtype: DType, rng: np.random.Generator) -> None:
    build, reference, vectors = CASES[name]
    native: list[int] = []
    texts: list[str] = []

    def recorded(spec, native_width):
        result = write_nest(spec, native_width)
        native.append(native_width)
        texts.append(result.source)
        return result

    with (
        mock.patch.object(nest, "write_nest", recorded),
        Graph("chain", input_types=[TensorType(dtype, ("n",), DeviceRef.CPU())]) as graph,
    ):
        graph.output(build(graph.inputs[0].tensor))
        model = SESSION.load(graph)
    # f64 calls the C library lane by lane
    width = native[0] * (vectors if dtype is DType.float32 else 2)
    assert len(texts) == 1
    assert f", {width})" in texts[0]
    for size in (0, 1, width - 1, width + 1, 4096 + 3 * width - 5):
        x = rng.normal(0, 2, size).astype(dtype.to_numpy())
        np.testing.assert_allclose(
            model.execute(x)[0].to_numpy(), reference(x.astype(np.float64)), rtol=2e-6, atol=1e-7
        )
