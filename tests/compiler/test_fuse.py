"""Fusion: the number of launches of small graphs, and their results against the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from max import _interpreter
from max import kernel as k
from max._backends.cpu.backend import cpu_backends
from max._compiler.pipeline import compile_module
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, ops
from tests.tolerance import assert_close

SESSION = InferenceSession(devices=[CPU()])
DEVICE = DeviceRef.CPU()
Build = Callable[..., TensorValue | tuple[TensorValue, ...]]


def launched(build: Build, shapes: Sequence[tuple[int, ...]]) -> int:
    """The number of launches of a graph; its results must equal those of the interpreter."""
    types = [TensorType(DType.float32, shape, DEVICE) for shape in shapes]
    with Graph("fused", input_types=types) as graph:
        results = build(*[value.tensor for value in graph.inputs])
        graph.output(*(results if isinstance(results, tuple) else (results,)))
    rng = np.random.default_rng(1)
    arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    expected = _interpreter.run(graph, [array.copy() for array in arrays])
    model = SESSION.load(graph)
    for actual, wanted in zip(model.execute(*arrays), expected, strict=True):
        assert_close(actual.to_numpy(), wanted, scale=64)
    return len(model.kernel_summaries)


def chain(x: TensorValue, count: int) -> TensorValue:
    """A chain of `count` ops that no pass removes."""
    for _ in range(count):
        x = ops.tanh(x)
    return x


SQUARE = (8, 8)
WEIGHT = (8,)
OVER_ROWS: dict[str, tuple[Build, int]] = {
    "softmax": (lambda x, w: ops.softmax(x), 6),
    "logsoftmax": (lambda x, w: ops.logsoftmax(x), 6),
    "layer_norm": (lambda x, w: ops.layer_norm(x, w, w, 1e-5), 8),
    "rms_norm": (lambda x, w: ops.rms_norm(x, w, 1e-5), 6),
}


@pytest.mark.parametrize("name", OVER_ROWS)
def test_a_region_has_at_most_96_ops(name: str) -> None:
    op, size = OVER_ROWS[name]
    shapes = [SQUARE, WEIGHT]
    assert launched(lambda x, w: chain(op(x, w), 96 - size), shapes) == 1
    assert launched(lambda x, w: chain(op(x, w), 97 - size), shapes) == 2


def test_groups_are_not_merged_beyond_the_limit() -> None:
    shapes = [SQUARE, SQUARE]
    assert launched(lambda x, y: chain(x, 48) + chain(y, 48), shapes) == 1
    assert launched(lambda x, y: chain(x, 60) + chain(y, 60), shapes) == 2
    assert launched(lambda x, y: (chain(x, 48), chain(ops.exp(x), 47)), shapes) == 1
    assert launched(lambda x, y: (chain(x, 48), chain(ops.exp(x), 48)), shapes) == 2
    # the second and the third group are merged, as the first is full
    full = launched(
        lambda x, y: (chain(x, 96), chain(ops.exp(x), 50), chain(ops.sin(x), 40)), shapes
    )
    assert full == 2


REDUCTIONS: dict[str, tuple[Build, int]] = {
    "one axis": (lambda x, y: ops.softmax(ops.softmax(x)), 1),
    "two axes": (lambda x, y: ops.softmax(ops.softmax(x, axis=0), axis=1), 2),
    "two axes, the last first": (lambda x, y: ops.softmax(ops.softmax(x, axis=1), axis=0), 2),
    "map and rows": (lambda x, y: ops.tanh(x) + ops.softmax(y), 1),
    "map and columns": (lambda x, y: ops.tanh(x) + ops.softmax(y, axis=0), 1),
    "rows and map": (lambda x, y: ops.softmax(x) + ops.tanh(y), 1),
    "map and rows, then columns": (
        lambda x, y: ops.softmax(ops.tanh(x) + ops.softmax(y, axis=1), axis=0),
        2,
    ),
    "map and columns, then rows": (
        lambda x, y: ops.softmax(ops.tanh(x) + ops.softmax(y, axis=0), axis=1),
        2,
    ),
    "sum of one axis": (lambda x, y: ops.softmax(x) + ops.softmax(y), 1),
    "sum of two axes": (lambda x, y: ops.softmax(x, axis=0) + ops.softmax(y, axis=1), 2),
    "sum of two axes, the last first": (
        lambda x, y: ops.softmax(x, axis=1) + ops.softmax(y, axis=0),
        2,
    ),
    "rows of one axis over the other": (
        lambda x, y: y - ops.transpose(ops.sum(x, axis=1), 0, 1),
        2,
    ),
    "rows over their axis": (lambda x, y: (x - ops.max(x, axis=1)) * ops.mean(y, axis=1), 1),
    "rows that are used twice": (
        lambda x, y: (ops.tanh(y) + (rows := ops.sum(ops.exp(x), axis=1))) * rows,
        1,
    ),
    "rows of rows": (lambda x, y: x * ops.sqrt(ops.exp(ops.mean(x, axis=1)) + 1), 1),
    "a row and its reduction": (lambda x, y: ops.sum(x / ops.sum(ops.exp(x), axis=1), axis=1), 1),
    "a map and its rows": (lambda x, y: ops.softmax(ops.tanh(x), axis=1), 1),
    "a map and its columns": (lambda x, y: ops.softmax(ops.tanh(x), axis=0), 1),
    "a map and its axis of size 1": (
        lambda x, y: ops.softmax(ops.softmax(ops.reshape(ops.tanh(x), [8, 1, 8]), axis=1), axis=1),
        1,
    ),
    "two axes over a map": (lambda x, y: ops.softmax(ops.softmax(ops.tanh(x), axis=1), axis=0), 2),
    "two axes over a map, the first first": (
        lambda x, y: ops.softmax(ops.softmax(ops.tanh(x), axis=0), axis=1),
        2,
    ),
    "columns of columns": (lambda x, y: x * ops.sqrt(ops.exp(ops.mean(x, axis=0)) + 1), 1),
    "rows times rows of another group": (
        lambda x, y: x * (ops.sum(ops.exp(x), axis=1) * ops.tanh(y[:, :1])),
        2,
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str) -> None:
    build, count = REDUCTIONS[name]
    assert launched(build, [SQUARE, SQUARE]) == count


def in_place(x: TensorValue, view: Build) -> tuple[TensorValue, ...]:
    """A value that is also an output, and an op over a view of it."""
    first = ops.tanh(x)
    return first, ops.exp(cast(TensorValue, view(first)))


VIEWS: dict[str, tuple[Build, int]] = {
    "reshaped by axes of size 1": (lambda v: ops.reshape(v, [8, 1, 8]), 1),
    "reshaped to other rows": (lambda v: ops.reshape(v, [4, 16]), 2),
    "repeated": (lambda v: ops.broadcast_to(ops.reshape(v, [1, 8, 8]), [3, 8, 8]), 2),
    "transposed": (lambda v: ops.transpose(v, 0, 1), 2),
    "reversed": (lambda v: v[::-1], 2),
    "a part": (lambda v: v[1:], 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_value(name: str) -> None:
    """A view that keeps element order is fused with its operand; square matrices have equal sizes when transposed."""
    view, count = VIEWS[name]
    assert launched(lambda x: in_place(x, view), [SQUARE]) == count


ROWS: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "beside their matrix": (lambda rows: rows, SQUARE, 1),
    "as a column with more axes": (lambda rows: ops.reshape(rows, [8, 1, 1]), (8, 1, 8), 1),
    "as a vector over the other axis": (
        lambda rows: ops.broadcast_to(ops.reshape(rows, [8]), [8, 8]),
        SQUARE,
        2,
    ),
    "in other columns": (lambda rows: rows, (8, 5), 2),
    "over further matrices": (lambda rows: ops.reshape(rows, [1, 8, 1]), (3, 8, 8), 2),
}


@pytest.mark.parametrize("name", ROWS)
def test_broadcast_row_sums(name: str) -> None:
    """Row sums are fused with an op only if they are broadcast over the reduced axis."""
    view, shape, count = ROWS[name]

    def build(x: TensorValue, y: TensorValue) -> TensorValue:
        return y * cast(TensorValue, view(ops.sum(ops.exp(x), axis=1)))

    assert launched(build, [SQUARE, shape]) == count


def test_an_op_of_two_values_of_its_group() -> None:
    def build(x: TensorValue) -> TensorValue:
        first = ops.tanh(x)
        return ops.exp(first) * first * first

    assert launched(build, [SQUARE]) == 1


def test_a_computed_weight_of_a_norm_has_its_own_kernel() -> None:
    """Each row of the norm reads the whole weight, not one element."""

    def build(x: TensorValue) -> TensorValue:
        shares = ops.softmax(x)
        return ops.rms_norm(shares * 2, shares, 1e-5)

    assert launched(build, [(8,)]) == 2
    assert launched(lambda x, w: ops.rms_norm(x, ops.tanh(w), 1e-5), [(8,), (8,)]) == 2


def test_fusion_makes_no_cycle() -> None:
    """The last sum must not join the first tanh: products stand between them."""

    def build(x: TensorValue, y: TensorValue, w: TensorValue) -> TensorValue:
        later = ops.tanh(y)
        first = ops.tanh(x)
        middle = later + first @ w
        return first + middle @ w

    assert launched(build, [SQUARE] * 3) == 3


def test_a_merged_group_begins_with_its_first_op() -> None:
    """The product lies between the first ops of both groups; merging the last sum too would make a cycle."""

    def build(x: TensorValue, y: TensorValue, w: TensorValue) -> TensorValue:
        first = ops.tanh(x)
        product = first @ w
        both = ops.exp(y) + first
        return both + product

    assert launched(build, [SQUARE] * 3) == 2


def test_groups_that_depend_on_each_other() -> None:
    """The sum joins the epilogue of the product, which depends on the other operand of the sum."""

    def build(x: TensorValue, w: TensorValue) -> TensorValue:
        first = ops.tanh(x)
        return ops.exp(ops.exp(first @ w)) + first

    assert launched(build, [SQUARE] * 2) == 2


def test_a_group_does_not_compute_a_size_that_it_needs() -> None:
    """The sum reads the size of the range, whose end is the other operand of the sum."""

    def build(x: TensorValue) -> tuple[TensorValue, ...]:
        positive = ops.cast(ops.sum(ops.cast(x > 0, DType.float32)), DType.int64)
        count = ops.min(ops.reshape(positive, []), 3)
        line = ops.range(0, count, 1, "n", dtype=DType.int64, device=DEVICE)
        return count * 2 + TensorValue(Dim("n")), line

    launched(build, [(8,)])


def test_siblings_with_a_common_operand() -> None:
    """Siblings merge for a common operand as large as the results, not for a row."""
    assert launched(lambda x, y, w: (ops.tanh(x), ops.exp(x)), [SQUARE, SQUARE, WEIGHT]) == 1
    shapes = [SQUARE, SQUARE, WEIGHT]
    both = launched(lambda x, y, w: (ops.tanh(x) + ops.tanh(y), ops.exp(x) * ops.exp(y)), shapes)
    assert both == 1, "the second group is merged before its last op is visited"
    assert launched(lambda x, y, w: (ops.tanh(x + w), ops.exp(y + w)), shapes) == 2


def test_the_epilogue_of_a_product_has_its_shape() -> None:
    def build(x: TensorValue, w: TensorValue) -> TensorValue:
        return ops.reshape(ops.tanh(x @ w), [8, 1, 8]) * 2

    assert launched(lambda x, w: ops.tanh(x @ w) * 2, [SQUARE, SQUARE]) == 1
    assert launched(build, [SQUARE, SQUARE]) == 2


def test_an_epilogue_with_an_operand_of_several_strides_is_a_launch_of_its_own() -> None:
    """The product's rows of all batches are one axis; the other operand has no single stride over it."""

    def build(x: TensorValue, w: TensorValue, y: TensorValue) -> TensorValue:
        return ops.tanh(x @ w) - ops.permute(y, [1, 0, 2])

    assert launched(build, [(2, 8, 8), (8, 8), (8, 2, 8)]) == 2


def test_siblings_of_different_iteration_spaces_are_not_merged() -> None:
    """Both read x, one as a matrix, one as a vector."""
    assert launched(lambda x: (ops.tanh(x), ops.exp(ops.reshape(x, [64]))), [SQUARE]) == 2


@pytest.mark.parametrize(("size", "serial"), [(2048, True), (1 << 16, False), ("n", False)])
def test_one_worker_runs_small_regions(size: int | str, serial: bool) -> None:
    with Graph("g", input_types=[TensorType(DType.float32, [size], DEVICE)]) as graph:
        graph.output(ops.tanh(graph.inputs[0].tensor))
    compiled, _ = compile_module(graph.to_mlir(), [], cpu_backends(k.host_target()))
    assert [launch.serial for launch in compiled.main.launches] == [serial]


@pytest.mark.parametrize(
    ("shape", "whole"),
    [
        (("n", 256), True),
        (("n", "m", 128), True),
        ((256, "n"), True),
        ((5, 20480), True),
        (("n", 100), False),
        (("n",), False),
        ((20480 + 8,), False),
    ],
)
def test_rows_of_whole_vectors_have_no_masked_tail(
    shape: tuple[int | str, ...], whole: bool, rng: np.random.Generator
) -> None:
    """A region over all elements, whose number is a multiple of the vector's lanes."""
    with Graph("g", input_types=[TensorType(DType.float32, shape, DEVICE)]) as graph:
        graph.output(ops.tanh(graph.inputs[0].tensor) + graph.inputs[0].tensor)
    _, (irs,) = compile_module(graph.to_mlir(), [], cpu_backends(k.host_target()))
    (ir,) = irs.values()
    assert ("mask" not in k.emit_llvm(ir, k.host_target())) == whole
    model = SESSION.load(graph)
    for n in (0, 1, 3, 67):
        sizes = [n if size == "n" else 2 if size == "m" else int(size) for size in shape]
        x = rng.uniform(-1, 1, sizes).astype(np.float32)
        (result,) = model.execute(x)
        assert_close(result.to_numpy(), np.tanh(x) + x, scale=64)


def test_a_wide_copy_of_codes_is_computed_where_it_is_used() -> None:
    """Codes are stored, their floats are not: else the first product would have two results, and no epilogue."""
    rng = np.random.default_rng(0)
    bytes_ = rng.integers(-9, 9, (64, 64)).astype(np.int8)
    types = [TensorType(DType.float32, shape, DEVICE) for shape in (["n", 64], [64, 64])]
    with Graph("codes", input_types=types) as graph:
        x, w = (value.tensor for value in graph.inputs)
        codes = ops.cast(ops.round((x @ w) * 4.0), DType.int8)
        floats = ops.cast(codes, DType.float32) * 0.25
        inner, outer = (ops.cast(v, DType.int32) for v in (codes, ops.constant(bytes_)))
        graph.output(ops.cast(inner @ outer, DType.float32) + floats)
    model = SESSION.load(graph)
    assert len(model.kernel_summaries) == 2
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (64, 64))]
    (got,), (want,) = model.execute(*operands), _interpreter.run(graph, operands)
    np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-5, atol=1e-5)


def test_a_product_writes_the_codes_that_another_one_needs() -> None:
    """The codes of the first product are the result of its own epilogue; without codes the second one has it all."""
    rng = np.random.default_rng(0)
    types = [TensorType(DType.float32, shape, DEVICE) for shape in (["n", 64], [64, 64], [64, 64])]

    def build(name: str, with_codes: bool) -> Graph:
        with Graph(name, input_types=types) as graph:
            x, v, w = (value.tensor for value in graph.inputs)
            first = ops.round((x @ v) * 4.0)
            if with_codes:
                first = ops.cast(ops.cast(first, DType.int8), DType.float32)
            graph.output(ops.tanh(x @ w + first * 0.25))
        return graph

    operands = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (64, 64), (64, 64))]  # fmt: skip
    for with_codes in (False, True):
        graph = build("codes" if with_codes else "floats", with_codes)
        model = SESSION.load(graph)
        first, second = model.kernel_summaries
        assert ("round" in first) is with_codes and ("round" in second) is not with_codes
        (got,), (want,) = model.execute(*operands), _interpreter.run(graph, operands)
        np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-4, atol=1e-5)


def test_codes_that_two_values_use_stay() -> None:
    """What a product adds to beside its codes stays with the other product."""
    types = [TensorType(DType.float32, shape, DEVICE) for shape in ([5, 64], [64, 64], [64, 64])]
    with Graph("shared", input_types=types) as graph:
        x, v, w = (value.tensor for value in graph.inputs)
        scaled = (x @ v) * 4.0
        codes = ops.cast(ops.cast(scaled, DType.int8), DType.float32)
        graph.output(ops.tanh(x @ w + codes - scaled))
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal(shape).astype(np.float32) for shape in ((5, 64), (64, 64), (64, 64))]  # fmt: skip
    model = SESSION.load(graph)
    assert len(model.kernel_summaries) == 2
    (got,), (want,) = model.execute(*operands), _interpreter.run(graph, operands)
    np.testing.assert_allclose(got.to_numpy(), want, rtol=1e-4, atol=1e-4)
