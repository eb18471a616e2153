"""Transposes of images that cancel, however they are staged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max._compiler import mok
from max._compiler.passes.channels import move_channels
from max._compiler.passes.redundant_ops import drop_dead_ops
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.type import ConvInputLayout, FilterLayout
from max.mlir import clone_module, entry, print_module, verify_module

CPU = DeviceRef.CPU()
C = 6


def convolved(x: TensorValue, weight: TensorValue) -> TensorValue:
    return ops.conv2d(
        x, weight, padding=(1, 1, 1, 1), input_layout=ConvInputLayout.NCHW, filter_layout=FilterLayout.FCRS
    )  # fmt: skip


def step(x: TensorValue, skip: TensorValue, number: int, weight: TensorValue) -> TensorValue:
    """An op between convolutions; images stay ``[N, C, H, W]``."""
    bias = ops.constant(np.arange(C, dtype=np.float32).reshape(C, 1, 1) / 4)
    match number:
        case 0:
            return convolved(x, weight)
        case 1:
            return x + bias
        case 2:
            return ops.relu(x)
        case 3:
            return x + skip
        case 4:
            return x * 0.5 - 1.0
        case 5:
            return ops.concat([x[:, : C // 2], skip[:, C // 2 :]], 1)
        case 6:
            return x * ops.mean(ops.mean(x, 3), 2)
        case 7:
            # a row that varies along two axes
            rows = ops.constant(np.arange(C * 5, dtype=np.float32).reshape(1, C, 1, 5) / 9)
            return ops.max(x, rows)
        case 8:
            return x - ops.max(x, axis=1)
        case 9:
            # pixels as one line, and back
            lines = ops.reshape(x, [x.shape[0], C, 20])
            return ops.reshape(lines * 0.5 - ops.mean(lines, 2), x.shape)
        case _:
            return ops.where(x > skip, x, 0.25)


def network(numbers: list[int], batch: Any) -> Graph:
    types = [
        TensorType(DType.float32, [batch, C, 4, 5], CPU),
        TensorType(DType.float32, [C, C, 3, 3], CPU),
    ]
    with Graph("images", input_types=types) as graph:
        x, weight = (value.tensor for value in graph.inputs)
        y = skip = convolved(x, weight)
        for number in numbers:
            y, skip = step(y, skip, number, weight), y
        graph.output(y, ops.reshape(skip, [-1]))
    return graph


def moved(graph: Graph) -> str:
    module = clone_module(graph.to_mlir())
    move_channels(entry(module).block)
    verify_module(module)
    drop_dead_ops(entry(module).block)
    return print_module(module)


@pytest.mark.parametrize("seed", range(6))
def test_random_networks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = [int(n) for n in rng.integers(0, 11, 7)]
    graph = network(numbers, "n" if seed % 2 else 2)
    x = rng.standard_normal((2, C, 4, 5)).astype(np.float32)
    weight = (rng.standard_normal((C, C, 3, 3)) / 7).astype(np.float32)
    loaded = InferenceSession().load(graph)
    for got, want in zip(
        loaded.execute(x, weight), _interpreter.run(graph, [x, weight]), strict=True
    ):
        np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-4, atol=1e-4)


def test_only_those_of_inputs_and_outputs_stay() -> None:
    """One for the input, one a filter, one for each output."""
    text = moved(network([1, 2, 0, 1, 3, 4, 2, 0, 10, 5, 6, 9, 8], "n"))
    perms = re.findall(r"mo\.transpose\(.*?perm = array<i64: ([^>]*)>", text)
    assert perms.count("0, 2, 3, 1") == 1
    assert perms.count("0, 3, 1, 2") == 2


def test_what_has_another_layout_stays() -> None:
    """A sum with an image that has channels first would move that one."""
    shapes = (["n", 4, 5, C], ["n", C, 4, 5])
    types = [TensorType(DType.float32, shape, CPU) for shape in shapes]
    with Graph("sum", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(ops.permute(x, [0, 3, 1, 2]) + y)
    before = print_module(graph.to_mlir())
    assert moved(graph) == before


IMAGE = TensorType(DType.float32, ["n", 4, 5, C], CPU)


def inner(build: Callable[..., TensorValue], count: int = 1) -> str:
    """The text of a graph of one op on images whose channels are moved to the front, and back behind it."""
    with Graph("images", input_types=[IMAGE] * count) as graph:
        images = [ops.permute(value.tensor, [0, 3, 1, 2]) for value in graph.inputs]
        graph.output(ops.permute(build(*images), [0, 2, 3, 1]))
    return moved(graph)


def test_slices_of_images() -> None:
    text = inner(lambda x: x[:, 1:4, ::2, :2])
    assert "transpose" not in text
    (start, stop, step) = (
        re.findall(rf"{name} = #mo.shape<(.*?)>", text) for name in ("start", "stop", "step")
    )
    assert (start, stop, step) == (["[0, 0, 0, 1]"], ["[n, 4, 2, 4]"], ["[1, 2, 1, 1]"])


def test_padded_images() -> None:
    text = inner(lambda x: ops.pad(x, [0, 0, 1, 2, 3, 0, 0, 4]))
    assert "transpose" not in text
    (low, high) = (re.findall(rf"{name} = #mo.shape<(.*?)>", text) for name in ("low", "high"))
    assert (low, high) == (["[0, 3, 0, 1]"], ["[0, 0, 4, 2]"])


def test_attributes_of_elementwise_ops_are_kept() -> None:
    text = inner(lambda x: ops.gelu(x, "tanh"))
    assert "transpose" not in text and 'approximate = "tanh"' in text


def test_operands_transposed_otherwise_stay() -> None:
    """Equal shapes by another order of the axes."""
    types = [IMAGE, TensorType(DType.float32, ["n", C, 5, 4], CPU)]
    with Graph("images", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        total = ops.permute(x, [0, 3, 1, 2]) + ops.permute(y, [0, 1, 3, 2])
        graph.output(ops.permute(total, [0, 2, 3, 1]))
    assert moved(graph).count("mo.transpose(") == 3


def test_matrices_have_no_channels() -> None:
    text = (
        "builtin.module { mo.graph @g(%x: T) -> (T) { %y = mo.transpose(%x) {perm = array<i64: 0, 1>} : (T) -> T\n"
        "%z = mo.neg(%y) : (T) -> T\n mo.output(%z) : (T) -> () } }"
    )
    module = mok.parse(text.replace("T", "!mo.tensor<[n, 4], f32, cpu:0>"))
    before = print_module(module)
    move_channels(entry(module).block)
    assert print_module(module) == before


def test_ops_without_images_stay() -> None:
    """Other transposes, and sums of images in the layout of kernels."""
    with Graph("images", input_types=[IMAGE]) as graph:
        x = graph.inputs[0].tensor
        y = x + ops.broadcast_to(ops.constant(np.arange(C, dtype=np.float32)), x.shape)
        graph.output(ops.permute(-ops.permute(y, [0, 2, 1, 3]), [0, 2, 1, 3]))
    assert moved(graph).count("mo.transpose(") == 2


def test_rows_with_channels() -> None:
    with Graph("rows", input_types=[TensorType(DType.float32, ["n", 5, C], CPU)]) as graph:
        x = ops.permute(graph.inputs[0].tensor, [0, 2, 1])
        graph.output(ops.permute(-x, [0, 2, 1]))
    assert "transpose" not in moved(graph)


def test_constants_of_another_shape_are_transposed() -> None:
    with Graph("images", input_types=[TensorType(DType.float32, [1, 4, 5, C], CPU)]) as graph:
        x = ops.permute(graph.inputs[0].tensor, [0, 3, 1, 2])
        other = ops.reshape(ops.constant(np.arange(C * 20, dtype=np.float32)), x.shape)
        graph.output(ops.permute(ops.concat([x, other], 1), [0, 2, 3, 1]))
    text = moved(graph)
    assert text.count("mo.transpose(") == 1 and "-> !mo.tensor<[1, 4, 5, 6], f32" in text


def test_lines_as_images_of_height_1() -> None:
    """Convolutions over lines, between reshapes that add and drop the height."""

    def staged(x: TensorValue) -> TensorValue:
        n, channels, high, wide = x.shape
        line = ops.reshape(x, [n, channels, high * wide])
        line = ops.relu(line - ops.mean(line, 2))
        return ops.reshape(line, [n, channels, 1, high * wide])

    text = inner(staged)
    assert "transpose" not in text and "axis = 1" in text
    assert "!mo.tensor<[n, 20, 6], f32" in text and "!mo.tensor<[n, 1, 20, 6], f32" in text


def test_windows_of_images() -> None:
    """A reshape that splits lines and columns, which another order of the axes follows."""
    with Graph("windows", input_types=[IMAGE]) as graph:
        x = ops.permute(graph.inputs[0].tensor, [0, 3, 1, 2])
        windows = ops.reshape(x, [x.shape[0], C, 2, 2, 5, 1])
        graph.output(ops.permute(windows, [0, 2, 4, 3, 5, 1]))
    perms = re.findall(r"mo\.transpose\(.*?perm = array<i64: ([^>]*)>", moved(graph))
    assert perms == ["0, 1, 3, 2, 4, 5"]


@pytest.mark.parametrize(
    "shape", [["n", 2, 3, 20], ["n", 120], [C, "n", 20], ["n", 20, C], ["n", C * 4, 5]]
)
def test_reshapes_of_channels_stay(shape: list[Any]) -> None:
    """The channels are split, joined with pixels, or elsewhere."""
    with Graph("reshaped", input_types=[IMAGE]) as graph:
        x = ops.permute(graph.inputs[0].tensor, [0, 3, 1, 2])
        graph.output(ops.reshape(x, shape))
    before = print_module(graph.to_mlir())
    assert moved(graph) == before


@pytest.mark.parametrize("length", [1, 20])
def test_results_of_reshaped_images(length: int) -> None:
    """Values move as the reference has them, for one image and for three."""
    with Graph("lines", input_types=[IMAGE]) as graph:
        x = ops.permute(graph.inputs[0].tensor, [0, 3, 1, 2])
        split = ops.reshape(x, [x.shape[0], C, 20 // length, 1, length])
        graph.output(split - ops.max(split, axis=2), ops.reshape(split, [x.shape[0], C, 5, 4]))
    model = InferenceSession().load(graph)
    rng = np.random.default_rng(length)
    for count in (1, 3):
        image = rng.standard_normal((count, 4, 5, C)).astype(np.float32)
        first = image.transpose(0, 3, 1, 2).reshape(count, C, 20 // length, 1, length)
        got = [value.to_numpy() for value in model.execute(image)]
        np.testing.assert_array_equal(got[0], first - first.max(2, keepdims=True))
        np.testing.assert_array_equal(got[1], first.reshape(count, C, 5, 4))
