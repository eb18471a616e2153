"""Forms of later programs on eager tensors: destinations of kernels, ops of `max.graph`, ranges of symbols."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from max import driver
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import functional as F
from max.experimental.nn import Module
from max.experimental.tensor import Tensor
from max.graph import BufferType, BufferValue, DeviceRef, Dim, Graph, TensorType, TensorValue, ops

KERNELS = """
from max import kernel as k


@k.register("accumulate_scaled")
def accumulate_scaled(
    y: k.InOut[k.f32, 2], x: k.Input[k.f32, 2], count: k.Input[k.i64, 0], ctx: k.Context, *, factor: float
):
    for i in ctx.parallel(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = y[i, j] + x[i, j] * factor + k.f32(count[()])
"""
CPU = DeviceRef.CPU()


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "own.py").write_text(KERNELS)
    return folder


def rows_of(x: Tensor) -> Tensor:
    """The number of rows as a scalar tensor, with ops of `max.graph`."""
    return Tensor.from_graph_value(ops.reshape(ops.shape_to_tensor([x.shape[0]]), []).to(CPU))  # type: ignore[arg-type]


def accumulated(x: Tensor, folder: Path) -> Tensor:
    with F.ensure_context():
        out = Tensor.ones(list(x.shape), dtype=x.dtype, device=x.device)
        F.inplace_custom(
            name="accumulate_scaled",
            device=x.device,
            values=[out.__buffervalue__(), x, rows_of(x)],
            parameters={"factor": 2.5},
            custom_extensions=folder,
        )
    return out


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_destination_is_written_eagerly_and_compiled(kernels: Path, rows: int) -> None:
    class Accumulate(Module[[Tensor], Tensor]):
        def forward(self, x: Tensor) -> Tensor:
            return accumulated(x, kernels) - x

    module = Accumulate()
    compiled = module.compile(TensorType(DType.float32, ["rows", 3], module.device))
    x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
    want = 1 + x * 2.5 + rows - x
    for function in (module, compiled):
        np.testing.assert_allclose(function(Tensor.from_dlpack(x)).to_numpy(), want, rtol=1e-5)


def test_a_tensor_in_memory_as_a_buffer_of_a_graph() -> None:
    """One buffer a graph and a tensor, which begins with its elements in each execution; the memory stays."""
    x = Tensor.ones([2], dtype=DType.float32)
    with Graph("g", input_types=[BufferType(DType.float32, [2], CPU)]) as graph:
        assert isinstance(
            Tensor.from_graph_value(graph.inputs[0]).__buffervalue__(), type(graph.inputs[0])
        )
        buffer = BufferValue(x)
        ops.buffer_store(buffer, ops.buffer_load(buffer) + graph.inputs[0].buffer[...])
        assert BufferValue(x).to_mlir() is buffer.to_mlir()
        graph.output(ops.buffer_load(BufferValue(x)))
    with Graph("other") as other:
        other.output(ops.buffer_load(BufferValue(x)))
    session = InferenceSession(devices=[driver.CPU()])
    model = session.load(graph)
    for _ in range(2):
        assert model.execute(np.full(2, 3, np.float32))[0].to_numpy().tolist() == [4, 4]
    assert session.load(other).execute()[0].to_numpy().tolist() == [1, 1] == x.to_numpy().tolist()


def test_a_tensor_in_memory_as_a_buffer_outside_of_a_graph() -> None:
    """It is written, as in MAX: by indexing and by ops, in a function and alone."""

    @F.functional
    def indexed(x: Any) -> Any:
        buffer = BufferValue(x)
        buffer[1:2] = buffer[...][0:1] * 5
        return buffer[...]

    @F.functional
    def by_ops(x: Any) -> Any:
        buffer = BufferValue(x)
        before = ops.buffer_load(buffer)
        ops.buffer_store(buffer, before * 3)
        ops.buffer_store_slice(buffer, before[0:1], [slice(2, 3)])
        return before

    x = Tensor.from_dlpack(np.array([1, 2, 4], np.float32))
    assert indexed(x).to_numpy().tolist() == [1, 5, 4] == x.to_numpy().tolist()
    assert by_ops(x).to_numpy().tolist() == [1, 5, 4]
    assert x.to_numpy().tolist() == [3, 15, 1]
    buffer: Any = BufferValue(x)
    buffer[...] = buffer[...] + 1
    assert x.to_numpy().tolist() == [4, 16, 2]
    with pytest.raises(TypeError, match="is not a buffer"):
        BufferValue(cast(Any, 3))


def test_ops_of_graphs_take_tensors_within_a_context() -> None:
    array = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    x = Tensor.from_dlpack(array)
    with pytest.raises(TypeError, match=r"max\.experimental\.functional"):
        ops.relu(x)
    with F.ensure_context():
        y: Any = ops.pad(ops.relu(x), [0, 1, 2, 0], mode="constant", value=0)
        sizes: Any = ops.shape_to_tensor(x.shape)
        assert isinstance(y, Tensor)
        with Graph("g", input_types=[TensorType(DType.float32, [3], CPU)]) as graph:
            assert isinstance(ops.relu(graph.inputs[0].tensor), TensorValue)
    want = np.pad(np.maximum(array, 0), [(0, 1), (2, 0)])
    np.testing.assert_array_equal(y.to_numpy(), want)
    assert sizes.to_numpy().tolist() == [3, 4]
    with pytest.raises(LookupError, match="no graph"):
        ops.shape_to_tensor([Dim(3)])


def test_a_list_of_slices_is_the_tuple() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    x = Tensor.from_dlpack(array)
    for index in (
        [slice(None), 1],
        [..., slice(1, 3)],
        [None, slice(0, 1)],
        [slice(None)] * 2 + [-1],
    ):
        np.testing.assert_array_equal(x[index].to_numpy(), array[tuple(index)])
    with pytest.raises(IndexError, match="MAX reads as a tuple of indices"):
        x[[0, 1]]


def test_ranges_of_symbols() -> None:
    class Places(Module[[Tensor], Tensor]):
        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            ranges = [F.arange(n, dtype=x.dtype), F.arange(1, n + 1, 1, dtype=x.dtype)]
            ranges.append(Tensor.arange(0, n, 1, n, dtype=x.dtype))
            return F.stack(ranges) * x

    module = Places()
    compiled = module.compile(TensorType(DType.float32, ["n"], CPU))
    for size in (1, 5):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        want = np.stack([np.arange(size), np.arange(size) + 1, np.arange(size)]) * x
        for function in (module, compiled):
            np.testing.assert_allclose(function(Tensor.from_dlpack(x)).to_numpy(), want, rtol=1e-6)


def test_the_device_of_a_module() -> None:
    class Bare(Module[..., Tensor]):
        pass

    class Own(Module):
        def __init__(self) -> None:
            self.device = "cpu"

    assert Bare().device == Tensor.ones([1]).device
    assert Own().device == "cpu"
    assert not hasattr(Own, "device")
