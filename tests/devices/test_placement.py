"""Placement of inputs, outputs and tensors; errors for tensors on the wrong device."""

from __future__ import annotations

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops

F32 = DType.float32


def graph_over_two_devices() -> Graph:
    types = [TensorType(F32, ["n"], DeviceRef.CPU(i)) for i in range(2)]
    with Graph("sum", input_types=types) as graph:
        x, y = (v.tensor for v in graph.inputs)
        total = x.to(DeviceRef.CPU(1)) + y
        assert total.device == DeviceRef.CPU(1)
        graph.output(total, ops.transfer_to(total, CPU(0)))
    return graph


def test_a_model_says_and_holds_its_devices(rng: np.random.Generator) -> None:
    model = InferenceSession(devices=[CPU(0), CPU(1)]).load(graph_over_two_devices())
    assert model.input_devices == [CPU(0), CPU(1)]
    assert model.output_devices == [CPU(1), CPU(0)]
    assert model.devices == [CPU(0), CPU(1)]
    x = rng.standard_normal(7).astype(np.float32)
    here = Tensor.from_numpy(x)
    there = here.to(CPU(1))
    first, second = model.execute(here, there)
    assert (first.device, second.device) == (CPU(1), CPU(0))
    np.testing.assert_array_equal(first.to_numpy(), x + x)
    np.testing.assert_array_equal(second.to_numpy(), x + x)
    first.to_numpy()[:] = 0  # each output has memory of its own
    np.testing.assert_array_equal(second.to_numpy(), x + x)
    with pytest.raises(ValueError, match=r"cpu:1.*\.to\(device\)|on cpu:"):
        model.execute(there, here)


def test_a_session_needs_the_devices_of_its_graphs() -> None:
    with pytest.raises(ValueError, match="input 1 of sum is on cpu:1, the session has cpu:0"):
        InferenceSession(devices=[CPU(0)]).load(graph_over_two_devices())


def test_moves_between_devices_copy() -> None:
    here = Tensor.from_numpy(np.arange(4, dtype=np.float32))
    assert here.to(CPU(0)) is here
    there, back = here.to([CPU(1), CPU(0)])
    there[0] = 9.0
    assert back is here and here.to_numpy()[0] == 0.0 and there.device is CPU(1)
    assert there.copy(CPU(2)).device is CPU(2)


def test_operands_on_different_devices_are_refused() -> None:
    types = [TensorType(F32, [2, 2], DeviceRef.CPU(i)) for i in range(2)]
    with Graph("g", input_types=types) as graph:
        x, y = (v.tensor for v in graph.inputs)
        for name, op in {
            "add": lambda: x + y, "matmul": lambda: x @ y, "concat": lambda: ops.concat([x, y]),
            "where": lambda: ops.where(x > 0, x, y),
        }.items():  # fmt: skip
            with pytest.raises(ValueError, match=r"cpu:0.*cpu:1"):
                op()
            assert name
