"""Read-only memory of arrays and files: shared until a tensor is written, copied then."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

CPU_REF = DeviceRef.CPU()


def read_only(elements: Any) -> np.ndarray:
    array = np.array(elements)
    array.flags.writeable = False
    return array


def from_file(array: np.ndarray, folder: Path) -> tuple[Tensor, Callable[[], np.ndarray]]:
    path = folder / "elements.bin"
    array.tofile(path)
    tensor = Tensor.mmap(path, DType.from_numpy(array.dtype), array.shape, "r")
    return tensor, lambda: np.fromfile(path, array.dtype).reshape(array.shape)


SOURCES: dict[str, Any] = {
    "numpy": lambda array, folder: (Tensor.from_numpy(array), lambda: array),
    "dlpack": lambda array, folder: (Tensor.from_dlpack(array), lambda: array),
    "bytes": lambda array, folder: (
        Tensor.from_numpy(np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)),
        lambda: array,
    ),
    "memmap": lambda array, folder: (
        array.tofile(folder / "map.bin"),
        (
            Tensor.from_numpy(np.memmap(folder / "map.bin", array.dtype, "r", shape=array.shape)),
            lambda: np.fromfile(folder / "map.bin", array.dtype).reshape(array.shape),
        ),
    )[1],
    "mmap": from_file,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", range(6))
def test_writes_are_those_of_a_copy(source: str, seed: int, tmp_path: Path) -> None:
    """Random views and writes: the tensors are what NumPy's views of a copy are; the source never changes."""
    draw = random.Random(f"{source} {seed}")
    rows, columns = draw.choice([(1, 1), (3, 5), (7, 2), (64, 33)])
    dtype = draw.choice(["f4", "i8", "u1", "f8"])
    array = read_only(np.arange(rows * columns).reshape(rows, columns).astype(dtype))
    before = array.copy()
    tensor, content = SOURCES[source](array, tmp_path)
    pairs: list[tuple[Tensor, np.ndarray]] = [(tensor, before.copy())]
    for _ in range(12):
        view, expected = draw.choice(pairs)
        match draw.randrange(4):
            case 0 if view.rank == 2:
                first = draw.randrange(view.shape[0])
                pairs.append((view[first:], expected[first:]))
            case 1 if view.rank == 2:
                pairs.append((view[:, -1], expected[:, -1]))
            case 2:
                index = tuple(draw.randrange(n) for n in view.shape)
                value = draw.randrange(100)
                view[index] = value
                expected[index] = value
            case _:
                np.testing.assert_array_equal(view.to_numpy(), expected)
        del view, expected
    for view, expected in pairs:
        np.testing.assert_array_equal(view.to_numpy(), expected)
    np.testing.assert_array_equal(content(), before)


def test_memory_is_shared_until_the_first_write() -> None:
    array = read_only(np.arange(8, dtype=np.float32))
    tensor = Tensor.from_numpy(array)
    start = array.ctypes.data
    view = tensor[2:].view(DType.int32)
    assert tensor.to_numpy().ctypes.data == start and not tensor.to_numpy().flags.writeable
    assert view.to_numpy().ctypes.data == start + 8
    tensor.inplace_copy_from(Tensor.zeros((8,), DType.float32))
    assert tensor.to_numpy().ctypes.data != start and not view.to_numpy().any()
    assert tensor.to_numpy().flags.writeable
    assert array.tolist() == list(range(8))


@pytest.mark.parametrize("export", [Tensor.to_numpy, np.from_dlpack, lambda t: t.to_numpy()[2:]])
def test_an_array_that_reads_the_memory_keeps_its_elements(export: Any) -> None:
    """A write would leave the array behind: it is an error while the array lives."""
    tensor = Tensor.from_numpy(read_only(np.arange(4.0)))
    view = tensor[1:]
    array = export(tensor)
    for write in (lambda: tensor.__setitem__(0, 1), lambda: view.__setitem__(0, 1)):
        with pytest.raises(ValueError, match="an array of to_numpy"):
            write()
    del array
    view[0] = 9
    assert tensor.to_numpy().tolist() == [0, 9, 2, 3]


def test_a_loaded_model_keeps_its_weights() -> None:
    array = read_only(np.arange(4, dtype=np.float32))
    weight = Tensor.from_numpy(array)
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 4], CPU_REF)]) as graph:
        value = ops.constant_external("w", TensorType(DType.float32, [4], CPU_REF))
        graph.output(graph.inputs[0].tensor + value)
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry={"w": weight})
    with pytest.raises(ValueError, match="a loaded model reads it"):
        weight[0] = 9
    result = model.execute(np.zeros((1, 4), np.float32))[0].to_numpy()
    assert result.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", ["array", "tensor", "view", "mmap"])
def test_a_model_writes_to_a_copy(kind: str, tmp_path: Path) -> None:
    types = [BufferType(DType.float32, ["n"], CPU_REF)]
    with Graph("g", input_types=types) as graph:
        buffer = graph.inputs[0].buffer
        ops.buffer_store(buffer, ops.buffer_load(buffer) + 1)
        graph.output(ops.buffer_load(buffer))
    model = InferenceSession(devices=[CPU()]).load(graph)
    array = read_only(np.arange(6, dtype=np.float32))
    tensor, content = SOURCES["mmap" if kind == "mmap" else "numpy"](array, tmp_path)
    argument: Any = {"array": array, "view": tensor[2:]}.get(kind, tensor)
    for step in (1, 2):
        result = model.execute(argument)[0].to_numpy()
        # an array of NumPy that is read-only cannot change: each execution begins with its elements
        added = 1 if kind == "array" else step
        np.testing.assert_array_equal(result, array[2 if kind == "view" else 0 :] + added)
    np.testing.assert_array_equal(content(), np.arange(6))
    if kind != "array":
        expected = np.arange(6) + np.where(np.arange(6) < (2 if kind == "view" else 0), 0, 2)
        np.testing.assert_array_equal(tensor.to_numpy(), expected)
