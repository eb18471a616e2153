"""Models: metadata, calling conventions, inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from max._config import flags
from max._interpreter import printing
from max.driver import CPU, Accelerator, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model, TensorSpec
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from tests.devices.fake import fake_devices
from tests.engine.conftest import DEVICE, buffer, tensor
from tests.tolerance import assert_close

Load = Callable[..., Model]


def test_metadata(load: Load) -> None:
    model = load(
        [tensor("batch", 4), tensor(3, dtype=DType.int64)], lambda x, i: (x * 2, i, ops.sum(x, 0))
    )
    assert model.input_metadata == [
        TensorSpec([None, 4], DType.float32, "input0"),
        TensorSpec([3], DType.int64, "input1"),
    ]
    assert [(s.shape, s.dtype) for s in model.output_metadata] == [
        ([None, 4], DType.float32),
        ([3], DType.int64),
        ([1, 4], DType.float32),
    ]
    assert (
        model.devices == [CPU()]
        and model.input_devices == [CPU()] * 2
        and model.output_devices == [CPU()] * 3
    )
    assert isinstance(model.signature, inspect.Signature)
    assert list(model.signature.parameters) == ["input0", "input1"]
    assert "batch" not in repr(model) and "float32" in repr(model)
    assert all(isinstance(line, str) for line in model.kernel_summaries)


def test_call_by_name(load: Load) -> None:
    model = load([tensor(2), tensor(2)], lambda x, y: x - y)
    a, b = np.array([3, 4], np.float32), np.array([1, 1], np.float32)
    for outputs in (
        model(a, b),
        model(a, input1=b),
        model(input1=b, input0=a),
        model.execute(a, b),
    ):
        assert outputs[0].to_numpy().tolist() == [2, 3]
    with pytest.raises(TypeError, match="input1.*the inputs are input0, input1"):
        model(a, other=b)
    with pytest.raises(TypeError, match="multiple values"):
        model(a, input0=b)


def test_inputs_of_every_kind(load: Load) -> None:
    model = load([tensor("n")], lambda x: x + 1)
    array = np.arange(6, dtype=np.float32)
    want = (array[::2] + 1).tolist()
    for value in (
        array[::2],
        torch.from_numpy(array)[::2],
        Tensor.from_numpy(array)[::2],
        Tensor.from_dlpack(array[::2]),
    ):
        assert model.execute(value)[0].to_numpy().tolist() == want
    array.flags.writeable = False
    assert model.execute(array)[0].to_numpy().tolist() == (array + 1).tolist()
    bf16 = load([tensor("n", dtype=DType.bfloat16)], lambda x: x * 2)
    assert bf16.execute(torch.ones(3, dtype=torch.bfloat16))[0].to_numpy().tolist() == [2, 2, 2]
    assert bf16.execute(np.ones(3, ml_dtypes.bfloat16))[0].to_numpy().tolist() == [2, 2, 2]


def test_python_scalars(load: Load) -> None:
    types = [
        tensor(),
        tensor(dtype=DType.int64),
        tensor(dtype=DType.bool),
        tensor(dtype=DType.uint8),
    ]
    model = load(types, lambda x, i, b, u: (x + 1, i + 1, ~b, u + 1))
    outputs = model.execute(1.5, 2, True, np.uint8(3))
    assert [o.item() for o in outputs] == [2.5, 3, False, 4]
    assert model.execute(3, 2, True, 3)[0].item() == 4.0


def test_outputs_are_the_callers_own(load: Load) -> None:
    model = load(
        [tensor("n", 2)], lambda x: (x, x * 2, x.reshape(["n" * 1, 2]), ops.transpose(x, 0, 1))
    )
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    first = [o.to_numpy() for o in model.execute(x)]
    second = [o.to_numpy() for o in model.execute(x + 1)]
    for a, b in zip(first, second, strict=True):
        assert not np.shares_memory(a, b) and not np.shares_memory(a, x)
    assert_close(first[0], x)
    assert_close(first[3], x.T)
    first[0][:] = 0
    assert_close(second[0], x + 1)


def test_one_value_given_twice(load: Load) -> None:
    def build(x):
        y = x + 1
        return y, y, y.reshape((4,)), y[0:1]

    outputs = [
        o.to_numpy() for o in load([tensor(2, 2)], build).execute(np.zeros((2, 2), np.float32))
    ]
    assert [o.shape for o in outputs] == [(2, 2), (2, 2), (4,), (1, 2)]
    assert all((o == 1).all() for o in outputs)
    assert not np.shares_memory(outputs[0], outputs[1]) and not np.shares_memory(
        outputs[0], outputs[2]
    )


def test_graph_without_inputs_and_without_outputs(load: Load) -> None:
    model = load(
        [], lambda: ops.constant(np.arange(3, dtype=np.float32), DType.float32, DEVICE) * 2
    )
    assert model.execute()[0].to_numpy().tolist() == [0, 2, 4]
    assert load([tensor(2)], lambda x: None).execute(np.zeros(2, np.float32)) == []


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_dims(load: Load, shape: tuple[int, int]) -> None:
    def build(x):
        return (
            ops.exp(x),
            ops.sum(x, 1),
            ops.softmax(x),
            ops.concat([x, x], 0),
            ops.transpose(x, 0, 1) + 1,
        )

    outputs = load([tensor("n", "m")], build).execute(np.zeros(shape, np.float32))
    n, m = shape
    assert [o.shape for o in outputs] == [(n, m), (n, 1), (n, m), (2 * n, m), (m, n)]
    assert not outputs[1].to_numpy().any()


def test_no_recompilation_when_sizes_grow(load: Load) -> None:
    from max._backends.cpu.runtime import jit
    from max._compiler.stats import stats

    model = load([tensor("n", "m"), tensor("m", 8)], lambda x, w: ops.softmax(x @ w))
    before = (stats.modules, stats.kernels, jit.stats.linked)
    for n, m in ((1, 1), (3, 70), (40, 5), (257, 129)):
        x, w = np.ones((n, m), np.float32), np.ones((m, 8), np.float32)
        assert_close(model.execute(x, w)[0].to_numpy(), np.full((n, 8), 0.125))
    assert (stats.modules, stats.kernels, jit.stats.linked) == before


def test_virtual_devices() -> None:
    session = InferenceSession(devices=[CPU(), CPU(1)])
    types = [
        TensorType(DType.float32, (3,), DeviceRef.CPU()),
        TensorType(DType.float32, (3,), DeviceRef("cpu", 1)),
    ]
    with Graph("two", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(x.to(DeviceRef("cpu", 1)) + y)
    model = session.load(graph)
    assert model.input_devices == [CPU(), CPU(1)] and model.output_devices == [CPU(1)]
    x = Tensor.from_numpy(np.ones(3, np.float32))
    (out,) = model.execute(x, x.to(CPU(1)))
    assert out.device is CPU(1) and out.to_numpy().tolist() == [2, 2, 2]
    with pytest.raises(
        ValueError, match=r"input 'input1' .* on cpu:1.*got a tensor on cpu:0.*\.to\(device\)"
    ):
        model.execute(x, x)
    with pytest.raises(ValueError, match=r"input 1 of two is on cpu:1, the session has cpu:0"):
        InferenceSession(devices=[CPU()]).load(graph)


def test_saved_graph(tmp_path: Path, session: InferenceSession) -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        session.load(tmp_path / "none.mlir")
    (tmp_path / "bad.mlir").write_text("not a graph")
    with pytest.raises(RuntimeError, match="not a saved graph"):
        session.load(tmp_path / "bad.mlir")
    with pytest.raises(TypeError, match="expected a Graph or the path"):
        session.load(3)
    with Graph("saved", input_types=[tensor("n")]) as graph:
        graph.output(graph.inputs[0].tensor * 3)
    (tmp_path / "good.mlir").write_text(str(graph))
    assert session.load(tmp_path / "good.mlir").execute(np.ones(2, np.float32))[
        0
    ].to_numpy().tolist() == [3, 3]


def test_interpreted_model(load: Load) -> None:
    with flags.override(MAX_INTERPRET=1):
        model = load([tensor("n", 3), buffer("n", 3)], _interpreted)
    x, b = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    (out,) = model.execute(x, b)
    assert_close(out.to_numpy(), np.full((2, 3), 1 / 3))
    assert (b == 2).all()
    with pytest.raises(TypeError, match="takes 2 inputs"):
        model.execute(x)


def _interpreted(x, b):
    b[...] = x * 2
    return ops.softmax(x)


def test_interpreted_buffers_of_another_device() -> None:
    """They are written there; tensors are shown as before, and NaN is no error."""
    with fake_devices(1), flags.override(MAX_INTERPRET=1):
        there = DeviceRef.GPU(0)
        types = [TensorType(DType.float32, ["n"], there), BufferType(DType.float32, ["n"], there)]
        with Graph("interpreted", input_types=types) as graph:
            x, b = graph.inputs[0].tensor, graph.inputs[1].buffer
            b[...] = x * 2.0
            graph.output(ops.sqrt(x))
        model = InferenceSession(devices=[CPU(), Accelerator(0)]).load(graph)
        shown = printing.CURRENT.get()
        array = np.array([1, -1], np.float32)
        x, b = (Tensor.from_numpy(each).to(Accelerator(0)) for each in (array, 0 * array))
        with np.errstate(invalid="ignore"):
            (out,) = model.execute(x, b)
        assert printing.CURRENT.get() is shown
        assert out.device is Accelerator(0)
        np.testing.assert_array_equal(out.to(CPU()).to_numpy(), [1, np.nan])
        assert b.to(CPU()).to_numpy().tolist() == [2, -2]
        assert x.to(CPU()).to_numpy().tolist() == [1, -1]
        with pytest.raises(RuntimeError, match="an interpreted model cannot be captured"):
            model.capture(1, x, b)


def test_session_settings() -> None:
    session = InferenceSession(num_threads=1)
    assert session.devices == [CPU()] and session.num_threads == 1 and "cpu:0" in repr(session)
    session.set_mojo_log_level("warning")
    session.set_split_k_reduction_precision("accum")
    session.use_old_top_k_kernel("off")
    with pytest.raises(ValueError, match="'loud' is not one of 'notset'"):
        session.set_mojo_log_level("loud")
    with pytest.raises(ValueError, match="num_threads is 0, expected 1 or more"):
        InferenceSession(num_threads=0)
    with pytest.raises(TypeError, match="'cpu' is not a device"):
        InferenceSession(devices=["cpu"])
