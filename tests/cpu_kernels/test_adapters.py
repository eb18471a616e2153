"""The terms of low-rank adapters: random shapes, ranks and batches against NumPy in float64; bad slots and places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import _interpreter
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from max.mlir.ops.models.adapters import LORA_PANEL, lora_place_size, lora_place_starts
from max.nn.kernels.adapters import adapter_rows, add_adapters
from tests.cpu_kernels.harness import run

CPU = DeviceRef.CPU()
Array = np.ndarray[Any, Any]


def panels_of(b: Array) -> Array:
    """B ``[columns, rank]`` as it lies in memory."""
    columns, rank = b.shape
    panels = -(-columns // LORA_PANEL)
    padded = np.zeros((panels * LORA_PANEL, rank))
    padded[:columns] = b
    return padded.reshape(panels, LORA_PANEL, rank).swapaxes(1, 2).reshape(-1)


@pytest.mark.parametrize("machine", ["host", "avx2", "generic"])
@pytest.mark.parametrize("tokens", [False, True])
def test_terms_of_adapters(machine: str, tokens: bool) -> None:
    @settings(max_examples=8, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
    def check(seed: int, workers: int) -> None:
        rng = np.random.default_rng(seed)
        rows, inputs, columns = (int(rng.integers(1, n)) for n in (30, 90, 200))
        max_rank, slots = int(rng.integers(0, 12)), int(rng.integers(1, 6))
        size = lora_place_size(max_rank, inputs, columns)
        before = int(rng.integers(0, 9))
        # elements that no adapter has are not read
        memory = np.full((slots, before + size), np.nan, np.float32)
        forms = np.zeros((slots, 2, 2), np.int32)
        at_b, at_gain, at_shift, _ = lora_place_starts(max_rank, inputs, columns)
        own: list[tuple[Array, Array, Array, Array]] = []
        for slot in range(slots):
            rank = int(rng.integers(0, max_rank + 1))
            a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((columns, rank))
            gain, shift = rng.standard_normal((2, columns))
            place = memory[slot, before:]
            place[: a.size] = (a.T if tokens else a).reshape(-1)
            lying = panels_of(b)
            place[at_b : at_b + lying.size] = lying
            vectors = bool(rng.integers(0, 2))
            if vectors:
                place[at_gain : at_gain + columns] = gain
                place[at_shift : at_shift + columns] = shift
            forms[slot, 1] = rank, vectors
            own.append((a, b, gain * vectors, shift * vectors))
        # in some batches no row has an adapter
        of_row = np.sort(rng.integers(-1, slots * int(rng.integers(0, 6) > 0), rows))
        of_row = np.concatenate([of_row[of_row >= 0], of_row[of_row < 0]])
        order = rng.permutation(rows)
        count = int((of_row >= 0).sum())
        y = rng.standard_normal((rows, columns)).astype(np.float32)
        x = (
            rng.integers(0, inputs, (rows, 1))
            if tokens
            else rng.standard_normal((rows, inputs)).astype(np.float32)
        )
        scales = rng.standard_normal(rows).astype(np.float32)
        expected = y.astype(np.float64)
        for row, slot in zip(order[:count], of_row[:count], strict=True):
            a, b, gain, shift = own[slot]
            narrow = a[:, x[row, 0]] if tokens else a @ x[row].astype(np.float64)
            expected[row] += scales[row] * (b @ narrow + gain * y[row] + shift)
        operands = [
            y, x, memory, forms, order.astype(np.int32), of_row.astype(np.int32), scales,
            np.array([count], np.int32), np.array([before, 0]),
        ]  # fmt: skip
        attributes = {"max_rank": max_rank, "inputs": inputs, "site": 1, "offset": 0}
        (got,) = run(
            "mo.lora.add",
            operands,
            [(np.float32, y.shape)],
            attributes,
            workers=workers,
            machine=machine,
        )
        np.testing.assert_allclose(
            got, expected, rtol=1e-4, atol=1e-4 * max(1, np.abs(expected).max())
        )

    check()


def graph() -> Graph:
    """Rows by adapter, and the terms of adapters with 4 rows of 5 inputs and 3 columns."""
    size = lora_place_size(2, 5, 3)
    types = [
        TensorType(dtype, shape, CPU)
        for dtype, shape in (
            (DType.float32, [4, 3]), (DType.float32, [4, 5]), (DType.float32, [2, size]), (DType.int32, [2, 1, 2]),
            (DType.int32, ["batch"]), (DType.float32, ["batch"]), (DType.uint32, ["offsets"]), (DType.int64, [2]),
        )
    ]  # fmt: skip
    with Graph("adapters", input_types=types) as built:
        y, x, memory, forms, slots, scales, offsets, place = (
            value.tensor for value in built.inputs
        )
        rows = adapter_rows(slots, scales, offsets, y.shape[0], 2)
        out = add_adapters(y, x, memory, forms, rows, place, max_rank=2, inputs=5, site=0, offset=0)
        built.output(out, *rows)
    return built


@pytest.fixture(scope="module")
def loaded() -> tuple[Graph, Model]:
    built = graph()
    return built, InferenceSession().load(built)


def inputs(**changes: Any) -> list[Array]:
    rng = np.random.default_rng(2)
    size = lora_place_size(2, 5, 3)
    values: dict[str, Array] = {
        "y": rng.standard_normal((4, 3)).astype(np.float32),
        "x": rng.standard_normal((4, 5)).astype(np.float32),
        "memory": rng.standard_normal((2, size)).astype(np.float32),
        "forms": np.array([[[2, 1]], [[1, 0]]], np.int32),
        "slots": np.array([1, -1, 0], np.int32),
        "scales": np.array([1, 2, 0.5], np.float32),
        "offsets": np.array([0, 1, 2, 4], np.uint32),
        "place": np.array([0, 0]),
    }
    for name, value in changes.items():
        values[name] = np.array(value, values[name].dtype)
    return list(values.values())


def test_rows_and_terms(loaded: tuple[Graph, Model]) -> None:
    built, model = loaded
    values = inputs()
    theirs = _interpreter.run(built, values)
    ours = [tensor.to_numpy() for tensor in model.execute(*values)]
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert ours[1].tolist() == [2, 3, 0, 1] and ours[2].tolist() == [0, 0, 1, -1]
    assert ours[4].tolist() == [3]


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": [2, -1, 0]}, {"slots": [1, -2, 0]}, {"slots": [1, 0]}, {"scales": [1.0]},
        {"offsets": [0, 1, 2, 5]}, {"offsets": [0, 2, 1, 4]}, {"offsets": [1, 1, 2, 4]}, {"offsets": [0, 4]},
        {"place": [1, 0]}, {"place": [-1, 0]}, {"place": [0, 1]}, {"place": [0, -1]}, {"place": [2**62, 0]},
        {"place": [0, 2**63 - 1]}, {"forms": [[[3, 0]], [[1, 0]]]}, {"forms": [[[-1, 0]], [[1, 0]]]},
    ],
)  # fmt: skip
def test_bad_inputs(loaded: tuple[Graph, Model], changes: dict[str, Any]) -> None:
    built, model = loaded
    values = inputs(**changes)
    raised = (ValueError, IndexError, _interpreter.InterpreterError)
    with pytest.raises(raised):
        _interpreter.run(built, values)
    with pytest.raises(raised):
        model.execute(*values)
