"""Floor division and remainders of floats: engine and interpreter, beside NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType

SPECIAL = (
    -4.2, -1.0, -0.0, 0.0, 1.0, 5.3, np.inf, -np.inf, np.nan, 1e30, 0.1, -0.1, 6.0, 7.0, -7.0, 2.0, 3.0, 0.3, 1e-40,
    65504.0, 1e-6,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.filterwarnings("ignore:overflow")
def test_quotients_and_remainders_are_exact(dtype: str, rng: np.random.Generator) -> None:
    count = len(SPECIAL)
    great = [
        rng.standard_normal(500) * 10.0 ** rng.integers(*ends, 500) for ends in ((0, 12), (-2, 5))
    ]
    near = rng.integers(-50, 50, (2, 500)) * 0.1  # quotients near integers
    kind = DType[dtype]
    wide = np.float64 if kind is DType.float64 else np.float32
    with np.errstate(all="ignore"):
        x, y = (
            np.concatenate([repeated, far, close]).astype(kind.to_numpy())
            for repeated, far, close in zip(
                (np.repeat(SPECIAL, count), np.tile(SPECIAL, count)), great, near, strict=True
            )
        )
        want = [
            function(x.astype(wide), y.astype(wide)).astype(x.dtype)
            for function in (np.floor_divide, np.mod)
        ]
    type_ = TensorType(kind, ["n"], DeviceRef.CPU())
    with Graph("division", input_types=[type_, type_]) as graph:
        a, b = (value.tensor for value in graph.inputs)
        graph.output(a // b, a % b)
    model = InferenceSession(devices=[CPU()]).load(graph)
    computed = model.execute(Tensor.from_numpy(x), Tensor.from_numpy(y))
    for got in ([result.to_numpy() for result in computed], _interpreter.run(graph, [x, y])):
        for numbers, expected in zip(got, want, strict=True):
            numbers, expected = numbers.astype(np.float64), expected.astype(np.float64)
            np.testing.assert_array_equal(numbers, expected)
            zero = expected == 0
            np.testing.assert_array_equal(np.signbit(numbers[zero]), np.signbit(expected[zero]))
