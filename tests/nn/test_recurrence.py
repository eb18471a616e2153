"""Convolutions and scans with states: errors of invalid operands at staging, and one run in a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max._interpreter import REFERENCES
from max.driver import Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.nn.kernels.recurrence import (
    causal_conv_ragged,
    gated_delta_rule,
    selective_scan_ragged,
    ssd_ragged,
)
from tests.nn.harness import session

CPU = DeviceRef.CPU()
F32, U32 = DType.float32, DType.uint32
BATCH: list[Any] = [(U32, ["offsets"]), (U32, ["batch"]), (U32, ["batch"])]
CONV = [(F32, ["t", 6]), (F32, [3, 6]), (F32, [6])]
SSD = [
    (F32, ["t", 4, 5]),
    (F32, ["t", 4]),
    (F32, [4]),
    (F32, ["t", 2, 3]),
    (F32, ["t", 2, 3]),
    (F32, [4]),
    (F32, [4]),
]
SCAN = [
    (F32, ["t", 6]),
    (F32, ["t", 6]),
    (F32, [3, 6]),
    (F32, ["t", 3]),
    (F32, ["t", 3]),
    (F32, [6]),
    (F32, [6]),
]
DELTA = [(F32, ["t", 2, 3]), (F32, ["t", 2, 3]), (F32, ["t", 4, 5]), (F32, ["t", 4]), (F32, ["t", 4])]  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, list[Any], list[int]]] = {
    "conv": (causal_conv_ragged, CONV, [2, 6]),
    "ssd": (ssd_ragged, SSD, [4, 3, 5]),
    "scan": (selective_scan_ragged, SCAN, [3, 6]),
    "delta": (gated_delta_rule, DELTA, [4, 3, 5]),
}


def staged(
    function: Any,
    inputs: list[Any],
    state: list[int],
    batch: list[Any] = BATCH,
    state_dtype: DType = F32,
    **options: Any,
) -> Graph:
    types: list[Any] = [TensorType(dtype, shape, CPU) for dtype, shape in (*inputs, *batch)]
    types += [BufferType(state_dtype, ["slots", 2, *state], CPU), TensorType(U32, [], CPU)]
    with Graph("recurrence", input_types=types) as graph:
        *values, buffer, layer = graph.inputs
        out = function(*(v.tensor for v in values), buffer.buffer, layer.tensor, **options)
        graph.output(out)
    return graph


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_graph_updates_the_state_as_the_definition_says(
    name: str, rng: np.random.Generator
) -> None:
    function, inputs, state = FUNCTIONS[name]
    arrays: list[Any] = [
        rng.standard_normal([7 if dim == "t" else dim for dim in shape]).astype(np.float32)
        for _, shape in inputs
    ]
    if name in ("ssd", "scan"):
        arrays[2] = -np.abs(arrays[2])
    elif name == "delta":
        arrays[3], arrays[4] = -np.abs(arrays[3]), 1 / (1 + np.exp(-arrays[4]))
    arrays += [np.array(x, np.uint32) for x in ([0, 3, 7], [0, 4], [2, 0])]
    buffer = rng.standard_normal((3, 2, *state)).astype(np.float32)
    expected, layer = buffer.copy(), np.array(1, np.uint32)
    parameters: dict[str, Any] = {"low": 0.0, "high": 3e38}
    if name == "conv":
        parameters = {"activation": "none"}
    elif name == "delta":
        parameters = {"scale": 3**-0.5, "normalized": True}
    symbol = {
        "conv": "mo.causal_conv.ragged",
        "ssd": "mo.ssd.ragged",
        "scan": "mo.selective_scan.ragged",
        "delta": "mo.gated_delta.ragged",
    }[name]
    reference = REFERENCES[symbol](*arrays, expected, layer, **parameters)
    model = session().load(staged(function, inputs, state))
    (out,) = model.execute(*arrays, Tensor.from_numpy(buffer), layer)
    np.testing.assert_allclose(out.to_numpy(), reference, atol=1e-5)
    np.testing.assert_allclose(buffer, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "index", "shape", "message"),
    [
        ("conv", 1, [3, 5], "expected a column a channel"),
        ("conv", 0, ["t", 6, 1], "x is .*, expected rank 2"),
        ("ssd", 0, ["t", 4], "x is .*, expected rank 3"),
        ("ssd", 4, ["t", 2, 4], "c .*; expected one shape"),
        ("scan", 1, ["t", 5], "dt is .*, expected 6"),
        ("scan", 2, [3, 5], r"a is .*, expected"),
        ("delta", 1, ["t", 2, 4], "keys .*; expected one shape"),
        ("delta", 3, ["t", 2], "decays is .*, expected 4"),
    ],
)
def test_shapes_that_do_not_fit(name: str, index: int, shape: list[Any], message: str) -> None:
    function, inputs, state = FUNCTIONS[name]
    changed = [*inputs[:index], (F32, shape), *inputs[index + 1 :]]
    with pytest.raises(ValueError, match=message):
        staged(function, changed, state)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_states_and_sequences_are_checked_alike(name: str) -> None:
    function, inputs, state = FUNCTIONS[name]
    with pytest.raises(TypeError, match="state is .*, expected float32"):
        staged(function, inputs, state, state_dtype=DType.float64)
    for index, vector in enumerate(("input_row_offsets", "cache_lengths", "slots")):
        signed, matrix = list(BATCH), list(BATCH)
        signed[index], matrix[index] = (DType.int32, ["n"]), (U32, ["n", 1])
        with pytest.raises(TypeError, match=f"{vector} is .*, expected uint32"):
            staged(function, inputs, state, batch=signed)
        with pytest.raises(ValueError, match=f"{vector} is .*, expected rank 1"):
            staged(function, inputs, state, batch=matrix)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_state_of_another_shape(name: str) -> None:
    function, inputs, state = FUNCTIONS[name]
    with pytest.raises(ValueError, match=r"expected \[slots, layers, "):
        staged(function, inputs, [*state[:-1], 9])


def test_groups_and_activations_that_do_not_fit() -> None:
    heads = [(F32, ["t", 3, 3]), (F32, ["t", 3, 3]), *DELTA[2:]]
    with pytest.raises(ValueError, match="3 key heads do not divide 4 heads"):
        staged(gated_delta_rule, heads, [4, 3, 5])
    grouped = [*SSD[:3], (F32, ["t", 3, 3]), (F32, ["t", 3, 3]), *SSD[5:]]
    with pytest.raises(ValueError, match="3 groups do not divide 4 heads"):
        staged(ssd_ragged, grouped, [4, 3, 5])
    with pytest.raises(ValueError, match="activation is 'gelu', expected silu, or none"):
        staged(causal_conv_ragged, CONV, [2, 6], activation="gelu")
