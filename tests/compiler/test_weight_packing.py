"""Which weights are packed; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from max._backends.cpu.packing import CPU_PACKING, NO_PACKING, Packing
from max._backends.cpu.passes.pack import pack_weights
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import MoOp, clone_module, entry, verify_module

Value = TensorValue
CPU = DeviceRef.CPU()
F32, BF16, I8, I32 = DType.float32, DType.bfloat16, DType.int8, DType.int32


def packed(
    build: Callable[[Value], Any],
    dtype: DType = F32,
    packing: Packing = CPU_PACKING,
    runs_here: Callable[[MoOp], bool] = lambda op: True,
    shape: tuple[int | str, ...] = ("n", 8),
) -> list[str]:
    """The ops of packing in a graph after the pass, with their encodings and columns."""
    with Graph("g", input_types=[TensorType(dtype, shape, CPU)]) as graph:
        results = build(graph.inputs[0].tensor)
        graph.output(*(results if isinstance(results, tuple) else (results,)))
    module = clone_module(graph.to_mlir())
    pack_weights(entry(module).block, runs_here, packing)
    verify_module(module)
    found = list[str]()
    for op in entry(module).block.ops:
        if isinstance(op, MoOp) and op.name.startswith("mok."):
            values = [op.name.removeprefix("mok.")]
            values += [
                str(op.attr(name)) for name in ("encoding", "columns") if name in op.attributes
            ]
            found.append(" ".join(values))
    return found


def weight(*shape: int, dtype: DType = F32) -> Value:
    return ops.constant(np.ones(shape, dtype.to_numpy()), dtype, CPU)


COLUMNS = ["pack columns", "packed_matmul columns 9"]


def test_products_of_weights() -> None:
    assert packed(lambda x: x @ weight(8, 9)) == COLUMNS
    assert packed(lambda x: x.cast(BF16) @ weight(8, 9, dtype=BF16)) == COLUMNS
    # packed once, for two products
    shared = packed(lambda x: (x @ (w := weight(8, 9)), ops.tanh(x) @ w))
    assert shared == [COLUMNS[0], COLUMNS[1], COLUMNS[1]]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: ops.tanh(x),
        lambda x: weight(9, 8) @ weight(8, 9),  # runs once, at load
        lambda x: x @ ops.transpose(x[:9], 0, 1),
        lambda x: x @ weight(8, 7),  # fewer columns than a panel may have
        lambda x: x[:, :7] @ weight(7, 9),
        lambda x: x @ weight(8, 0),
        lambda x: ops.broadcast_to(x, [2, "n", 8]) @ weight(2, 8, 9),
        lambda x: x.cast(DType.float64) @ weight(8, 9, dtype=DType.float64),
    ],
)
def test_products_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build) == []


def test_who_packs() -> None:
    def product(x: Value) -> Value:
        return x @ weight(8, 9)

    assert packed(product, packing=NO_PACKING) == []
    assert packed(product, packing=replace(CPU_PACKING, dense=frozenset({BF16}))) == []
    assert packed(product, packing=replace(CPU_PACKING, min_size=9)) == []
    assert packed(product, runs_here=lambda op: op.name != "mo.matmul") == []
    assert (
        packed(lambda x: (product(x), ops.tanh(x)), runs_here=lambda op: op.name == "mo.matmul")
        == COLUMNS
    )


def wide(x: Value) -> Value:
    return x.cast(I32)


def test_products_of_bytes() -> None:
    columns = ["pack int8 columns", "packed_matmul int8 columns 9"]
    assert packed(lambda x: wide(x) @ wide(weight(8, 9, dtype=I8)), I8) == columns
    # a product that wraps in 8 bits
    assert packed(lambda x: x @ weight(8, 9, dtype=I8), I8) == columns
    # a transpose of the bytes costs nothing: panels take either orientation
    rows = ["pack int8 rows", "packed_matmul int8 rows 9"]
    assert packed(lambda x: wide(x) @ wide(ops.transpose(weight(9, 8, dtype=I8), 0, 1)), I8) == rows
    assert packed(lambda x: wide(x) @ ops.transpose(wide(weight(9, 8, dtype=I8)), 0, 1), I8) == []
    assert packed(lambda x: x @ ops.transpose(weight(9, 8, dtype=I8), 0, 1), I8) == rows


@pytest.mark.parametrize(
    "build",
    [
        lambda x: x.cast(DType.int64) @ weight(8, 9, dtype=I8).cast(DType.int64),
        lambda x: wide(x) @ weight(8, 9, dtype=I32),
        lambda x: wide(x) @ wide(weight(8, 7, dtype=I8)),
        lambda x: wide(x) @ wide(weight(8, 9, dtype=DType.uint8)),
        lambda x: wide(weight(9, 8, dtype=I8)) @ wide(weight(8, 9, dtype=I8)),
        lambda x: wide(x) @ wide(ops.transpose(x[:9], 0, 1)),
        lambda x: wide(ops.broadcast_to(x, [2, "n", 8])) @ wide(weight(2, 8, 9, dtype=I8)),
    ],
)
def test_products_of_bytes_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build, I8) == []
    assert (
        packed(
            lambda x: wide(x) @ wide(weight(8, 9, dtype=I8)), I8, replace(CPU_PACKING, int8=False)
        )
        == []
    )


def convolved(x: Value, *filter: int, groups: int = 1, dtype: DType = F32) -> Value:
    return ops.conv2d(x.cast(dtype), weight(*filter, dtype=dtype), groups=groups)


IMAGE = (1, 5, 5, 4)
CONVOLUTION = ["pack_filter", "packed_conv 6"]


def test_filters() -> None:
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE) == CONVOLUTION
    assert packed(lambda x: convolved(x, 3, 3, 2, 6, groups=2), shape=IMAGE) == CONVOLUTION
    # a channel of each group, but two columns
    assert packed(lambda x: convolved(x, 3, 3, 1, 8, groups=4), shape=IMAGE) == [
        "pack_filter",
        "packed_conv 8",
    ]
    one = (1, 5, 5, 1)
    assert packed(lambda x: convolved(x, 3, 3, 1, 6), shape=one) == CONVOLUTION


def test_filters_are_packed_once() -> None:
    def build(x: Value) -> tuple[Value, ...]:
        w = weight(3, 3, 4, 6)
        return ops.conv2d(x, w), ops.conv2d(ops.tanh(x), w)

    assert packed(build, shape=IMAGE) == [*CONVOLUTION, CONVOLUTION[1]]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: convolved(x, 3, 3, 1, 4, groups=4),  # depthwise
        lambda x: convolved(x, 3, 3, 4, 6, dtype=DType.float64),
        lambda x: ops.conv2d(weight(1, 5, 5, 4), weight(3, 3, 4, 6)) + x[0, 0, 0, 0],
        lambda x: ops.conv2d(x, ops.reshape(x[0, :4, :4], [2, 2, 4, 4])),
    ],
)
def test_filters_that_stay(build: Callable[[Value], Any]) -> None:
    assert packed(build, shape=IMAGE) == []
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE, packing=NO_PACKING) == []
    only = replace(CPU_PACKING, filters=frozenset({BF16}))
    assert packed(lambda x: convolved(x, 3, 3, 4, 6), shape=IMAGE, packing=only) == []
