"""Regions as plain data, evaluated by NumPy on the memory of their operands, against the interpreter of their graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from xdsl.ir import SSAValue

from max import _interpreter
from max._backends.cpu.passes import packed_ops
from max._backends.regions import Leaf, Literal, Node, RegionSpec, SizeOf
from max._compiler import mok
from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import shape_of
from max._compiler.lowering.region_specs import (
    RegionParts,
    epilogue_parts,
    needed_ops,
    norm_before,
    region_parts,
)
from max._compiler.mok import RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.fuse import fuse
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import clone_module, entry, verify_module
from max.mlir.sizes import Size

pytestmark = pytest.mark.any_target

assert packed_ops, "the ops of the CPU are part of the dialect once their module is imported"
CPU = DeviceRef.CPU()
F32, F64, BF16, F16, I32 = (
    DType.float32, DType.float64, DType.bfloat16, DType.float16, DType.int32,
)  # fmt: skip
SIZES = {"n": 3, "m": 5, "one": 1}
Array = np.ndarray[Any, Any]
Value = TensorValue
Build = Callable[..., Any]


def graph_of(build: Build, *types: tuple[DType, Sequence[int | str]]) -> Graph:
    inputs = [TensorType(dtype, tuple(shape), CPU) for dtype, shape in types]
    with Graph("g", input_types=inputs) as graph:
        results = build(*(value.tensor for value in graph.inputs))
        graph.output(*(results if isinstance(results, tuple) else (results,)))
    return graph


def region_of(graph: Graph) -> RegionOp:
    """The only region of a graph."""
    module = clone_module(graph.to_mlir())
    fuse(entry(module).block)
    verify_module(module)
    (region,) = [op for op in ops_of(entry(module).block) if isinstance(op, RegionOp)]
    return region


def number(size: Size) -> int:
    return size if isinstance(size, int) else size.evaluate(SIZES)


def strided(memory: Array, offset: int, dims: Sequence[int], strides: Sequence[Size]) -> Array:
    steps = [number(stride) * memory.itemsize for stride in strides]
    # the first element of a view that is walked backwards is not the first of the memory
    reach = [min(0, (dim - 1) * number(s)) for dim, s in zip(dims, strides, strict=True)]
    assert math.prod(dims) == 0 or offset + sum(reach) >= 0
    return np.lib.stride_tricks.as_strided(memory[offset:], dims, steps)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "exp": np.exp,
    "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "neg": np.negative, "abs": np.abs, "rsqrt": lambda x: x**-0.5,
    "fma": lambda x, y, z: x * y + z, "select": lambda c, x, y: np.where(c != 0, x, y),
    "greater": lambda x, y: (x > y).astype(np.float64), "div": np.divide, "relu": lambda x: np.maximum(x, 0),
}  # fmt: skip
REDUCTIONS = {
    "reduce_sum": np.sum,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_mul": np.prod,
}
GELU = {"tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))}


def node(value: Node, args: list[Array]) -> Array:
    if value.op in REDUCTIONS:
        row = REDUCTIONS[value.op](args[0], axis=-1, keepdims=True)
        return np.broadcast_to(row, args[0].shape)
    if value.op == "gelu":
        return GELU[value.attr](args[0])
    if value.op == "cast":
        # between compute types: whole numbers, or floats without rounding
        return np.trunc(args[0]) if value.dtype is I32 else args[0]
    if value.op == "round_to":
        return args[0].astype(value.dtype.to_numpy()).astype(np.float64)
    return ELEMENTWISE[value.op](*args)


def evaluated(
    parts: RegionParts,
    operands: Sequence[Array],
    sums: Sequence[Array] = (),
    memory: Sequence[Array] | None = None,
) -> list[Array]:
    """The memory of the results.

    Args:
        parts: The region.
        operands: Of the region; operand -1, -2, … are the results of its library op.
        sums: The first leaves of an epilogue, over its space.
        memory: Where results are written; else each has the memory of its elements.
    """
    spec = parts.spec
    dims = [number(dim) for dim in spec.dims]
    sources = iter(parts.sources)
    values: list[Array] = []
    for value in spec.values:
        match value:
            case Leaf():
                if len(values) < len(sums):
                    values.append(sums[len(values)].reshape(dims).astype(np.float64))
                    continue
                index, offset = next(sources)
                flat = np.ascontiguousarray(operands[index]).reshape(-1)
                assert DType.from_numpy(flat.dtype) is value.dtype
                view = strided(flat, number(offset), dims, value.strides)
                values.append(view.astype(np.float64))
            case Literal(value=constant):
                values.append(np.full(dims, constant, np.float64))
            case SizeOf(axis=axis):
                values.append(np.full(dims, dims[axis], np.float64))
            case Node(args=args):
                values.append(node(value, [values[a] for a in args]))
    assert next(sources, None) is None, "each leaf has a source, and no source is left"
    written: list[Array] = []
    for position, result in enumerate(spec.results):
        reach = [(dim - 1) * number(s) for dim, s in zip(dims, result.strides, strict=True)]
        flat = (
            np.zeros(sum(reach) + 1, result.dtype.to_numpy())
            if memory is None
            else memory[position]
        )
        strided(flat, 0, dims, result.strides)[...] = values[result.value].astype(flat.dtype)
        written.append(flat)
    return written


def drawn(*types: tuple[DType, Sequence[int | str]]) -> list[Array]:
    rng = np.random.default_rng(1)
    shapes = [[SIZES[d] if isinstance(d, str) else d for d in shape] for _, shape in types]
    return [
        (rng.standard_normal(shape) * 3).astype(dtype.to_numpy())
        for (dtype, _), shape in zip(types, shapes, strict=True)
    ]


def check(
    build: Build, *types: tuple[DType, Sequence[int | str]], rtol: float = 1e-5
) -> RegionSpec:
    """Compares the region of a graph with the graph's interpretation."""
    graph = graph_of(build, *types)
    region = region_of(graph)
    # the region may take operands in another order, and constants
    arrays = drawn(*types)
    inputs = list(entry_inputs(region))
    parts = region_parts(region)
    found = evaluated(parts, [arrays[i] for i in inputs])
    expected = _interpreter.run(graph, arrays)
    for memory, wanted in zip(found, expected, strict=True):
        result = memory.reshape(wanted.shape)
        assert result.dtype == wanted.dtype
        wide = [np.asarray(a).astype(np.float64) for a in (result, wanted)]
        np.testing.assert_allclose(*wide, rtol=rtol, atol=rtol)
    return parts.spec


def entry_inputs(region: RegionOp) -> list[int]:
    """For each operand of a region, which input of the graph it is."""
    graph = region.parent_op()
    assert graph is not None
    args: list[SSAValue] = list(graph.regions[0].block.args)
    return [args.index(operand) for operand in region.operands]


SHAPES = [(4, 6), ("n", "m"), (2, "n", 4), (1, 6), (5, 1), ("n", 1, "m"), (1, 1, 4), (7,)]
ROWWISE: dict[str, Callable[[Value, int], Value]] = {
    "softmax": lambda x, axis: ops.softmax(x, axis),
    "logsoftmax": lambda x, axis: ops.logsoftmax(x, axis),
    "mean": lambda x, axis: ops.mean(x, axis),
    "sum": lambda x, axis: ops.sum(x, axis),
    "max": lambda x, axis: ops.max(x, axis=axis),
    "min": lambda x, axis: ops.min(x, axis=axis),
    "centered": lambda x, axis: ops.exp(x) - ops.mean(x, axis),
    "scaled": lambda x, axis: x * ops.rsqrt(ops.mean(x * x, axis) + 1e-3) + ops.max(x, axis=axis),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWWISE)
def test_rows_of_each_axis(name: str, shape: tuple[int | str, ...]) -> None:
    for axis in range(len(shape)):
        spec = check(lambda x: ROWWISE[name](x, axis), (F32, shape))  # noqa: B023
        assert spec.reduces
        assert all(dim != 1 for dim in spec.dims[:-1]), "axes of size 1 are left out"


@pytest.mark.parametrize("shape", [(4, 6), ("n", "m"), (2, "n", 5)], ids=str)
def test_norms(shape: tuple[int | str, ...]) -> None:
    row = (shape[-1],)
    check(lambda x, g, b: ops.layer_norm(x, g, b, 1e-2), (F32, shape), (F32, row), (F32, row))
    for offset in (0.0, 1.0):
        for early in (False, True):
            check(
                lambda x, g: ops.rms_norm(x, g, 1e-2, offset, early),  # noqa: B023
                (F32, shape),
                (F32, row),
            )


def test_a_norm_whose_scale_is_one_number() -> None:
    def build(x: Value) -> Value:
        scale = ops.broadcast_to(ops.constant(2.5, F32, CPU), [6])
        return ops.rms_norm(x, scale, 1e-2)

    assert any(value == Literal(F32, 2.5) for value in check(build, (F32, (4, 6))).values)


@pytest.mark.parametrize("early", [False, True])
def test_where_a_norm_rounds(early: bool) -> None:
    """Before gamma multiplies it unless the graph says otherwise; f32 has nothing to round."""
    types = [(BF16, (3, 8)), (BF16, (8,))]
    graph = graph_of(lambda x, g: ops.rms_norm(x, g, 1e-2, 0.0, early), *types)
    spec = region_parts(region_of(graph)).spec
    rounded = [v for v in spec.values if isinstance(v, Node) and v.op == "round_to"]
    assert len(rounded) == (not early)
    for x, g in (drawn(*types), drawn(*types)[::-1][::-1]):
        (found,) = evaluated(region_parts(region_of(graph)), [x, g])
        wide = x.astype(np.float64)
        norm = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-2)
        norm = norm if early else norm.astype(x.dtype).astype(np.float64)
        expected = (norm * g.astype(np.float64)).astype(x.dtype)
        np.testing.assert_array_equal(found.reshape(3, 8), expected)


VIEWS: dict[str, tuple[Build, list[tuple[DType, Sequence[int | str]]]]] = {
    "a row": (lambda x, y: x + y, [(F32, ("n", "m")), (F32, ("m",))]),
    "a column": (lambda x, y: x * y, [(F32, ("n", "m")), (F32, ("n", 1))]),
    "a number": (lambda x, y: x - y, [(F32, ("n", "m")), (F32, ())]),
    "numbers only": (lambda x, y: ops.exp(x) - y, [(F32, ()), (F32, ())]),
    "a transpose": (lambda x, y: x + ops.transpose(y, 0, 1), [(F32, ("n", "m")), (F32, ("m", "n"))]),
    "a slice": (lambda x, y: x + y[1:7:2, 3:], [(F32, (3, 5)), (F32, (9, 8))]),
    "backwards": (lambda x, y: x + y[::-1, ::-2], [(F32, (3, 5)), (F32, (3, 10))]),
    "an axis in the middle": (
        lambda x, y: x + y, [(F32, (2, "n", 4)), (F32, (2, 1, 4))],
    ),
    "one argument twice": (lambda x: x + x[::-1], [(F32, ("n", 4))]),
    "one argument, shifted": (lambda x: x[:, 1:] - x[:, :-1], [(F32, ("n", 6))]),
    "equal views of one argument": (lambda x: x[:, 1:] * ops.exp(x[:, 1:]), [(F32, ("n", 6))]),
    "equal views of two arguments": (lambda x, y: x[:, 1:] * y[:, 1:], [(F32, (3, 6)), (F32, (3, 6))]),
    "reshapes": (
        lambda x, y: ops.reshape(ops.exp(x), ["n", 1, "m"]) + y, [(F32, ("n", "m")), (F32, ("n", 1, "m"))],
    ),
    "a column of rows": (
        lambda x, y: ops.softmax(x + ops.transpose(y, 0, 1), 0), [(F32, (4, 6)), (F32, (6, 4))],
    ),
    "rows of a broadcast": (lambda x, y: ops.sum(x * y, 1), [(F32, (4, 6, 5)), (F32, (6, 1))]),
    "a view of a computed value": (
        lambda x: ops.reshape(ops.sum(x, 1), ["n", 1, 1]) + ops.reshape(x, ["n", 1, "m"]), [(F32, ("n", "m"))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_arguments(name: str) -> None:
    build, types = VIEWS[name]
    check(build, *types)


def test_a_leaf_for_each_view() -> None:
    """A view that is read twice is one leaf; equal views of two arguments are two."""

    def leaves(name: str) -> int:
        build, types = VIEWS[name]
        return sum(isinstance(value, Leaf) for value in check(build, *types).values)

    assert (
        leaves("equal views of one argument") == 1 and leaves("equal views of two arguments") == 2
    )
    assert leaves("one argument twice") == 2 and leaves("one argument, shifted") == 2


def test_axes_are_merged_where_all_views_allow_it() -> None:
    shape = ("n", 4, 6)
    assert len(check(lambda x: ops.exp(x), (F32, shape)).dims) == 1
    assert len(check(lambda x, y: x + y, (F32, shape), (F32, (6,))).dims) == 2
    assert len(check(lambda x, y: x + y, (F32, shape), (F32, (4, 1))).dims) == 3
    # the reduced axis stays the last
    assert len(check(lambda x: ops.softmax(x, 2), (F32, shape)).dims) == 2
    assert len(check(lambda x: ops.softmax(x, 1), (F32, shape)).dims) == 3
    assert check(lambda x: ops.softmax(x, 2), (F32, shape)).dims[-1] == 6


def casts_of(spec: RegionSpec) -> list[tuple[str, DType]]:
    """The conversions of a region."""
    return [
        (value.op, value.dtype)
        for value in spec.values
        if isinstance(value, Node) and value.op in ("cast", "round_to")
    ]


CASTS: dict[str, tuple[Build, DType, list[tuple[str, DType]]]] = {
    "narrow and wide": (
        lambda x: ops.exp(x).cast(BF16).cast(F32), F32,
        [("cast", BF16), ("round_to", BF16), ("cast", F32)],
    ),
    "wide": (lambda x: x.cast(F32) * 2.0, BF16, [("cast", F32)]),
    "a computed value": (lambda x: ops.exp(x).cast(F32), BF16, [("round_to", BF16), ("cast", F32)]),
    "an exact value": (lambda x: ops.abs(-x).cast(F32), BF16, [("cast", F32)]),
    "a greatest value": (lambda x: ops.max(x, axis=1).cast(F32), BF16, [("cast", F32)]),
    "a sum": (lambda x: ops.sum(x, 1).cast(F32), BF16, [("round_to", BF16), ("cast", F32)]),
    "one rounding": (lambda x: ops.exp(x).cast(BF16), F64, [("round_to", BF16)]),
    "to the type of a computation": (lambda x: ops.exp(x).cast(F32), F64, [("cast", F32)]),
    "between narrow types": (
        lambda x: x.cast(F16) * 3.0, BF16, [("cast", F16), ("round_to", F16)],
    ),
    "a whole number": (lambda x: x.cast(I32), F32, [("cast", I32)]),
    "narrow and back": (
        lambda x: (-(x.cast(F32))).cast(BF16), BF16, [("cast", F32), ("cast", BF16)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_what_is_rounded(name: str) -> None:
    """A staged conversion rounds its operand and its result, unless they are known to be exact."""
    build, dtype, conversions = CASTS[name]
    spec = check(build, (dtype, (3, 8)), rtol=0.02 if "BF16" in repr(conversions) else 1e-2)
    assert casts_of(spec) == conversions


def test_exact_values_that_are_chosen() -> None:
    """The condition of a choice is no value; both values must be exact in the dtype."""

    def chosen(c: Value, x: Value, y: Value) -> Value:
        return ops.where(c > 0, x, y).cast(F32)

    types = [(F32, (3, 8)), (BF16, (3, 8)), (BF16, (3, 8))]
    assert casts_of(check(chosen, *types)) == [("cast", F32)]
    for build in (
        lambda c, x, y: chosen(c, x, ops.exp(y)),
        lambda c, x, y: chosen(c, ops.exp(x), y),
        lambda c, x, y: ops.max(x, ops.exp(y)).cast(F32) + c,
        lambda c, x, y: ops.max(ops.exp(x), y).cast(F32) + c,
    ):
        computed = check(build, *types, rtol=0.02)
        assert casts_of(computed) == [("round_to", BF16), ("cast", F32)]


def test_a_stored_value_that_others_need_rounded_is_that_value() -> None:
    def build(x: Value) -> tuple[Value, Value]:
        y = ops.exp(x)
        return y, y.cast(F32) + 1.0

    spec = check(build, (BF16, (3, 8)), rtol=0.02)
    stored = spec.values[spec.results[0].value]
    assert isinstance(stored, Node) and stored.op == "round_to"


def test_attributes_of_ops() -> None:
    spec = check(lambda x: ops.gelu(x, "tanh"), (F32, (3, 8)))
    assert [value.attr for value in spec.values if isinstance(value, Node)] == ["tanh"]


def test_results_in_parts_of_larger_buffers() -> None:
    """With the strides of the part; gaps stay as they are."""
    graph = graph_of(lambda x: (ops.exp(x), ops.sum(x, 1)), (F32, (4, 6)))
    layouts = [Layout((4, 6), (9, 1)), Layout((4, 1), (3, 1))]
    parts = region_parts(region_of(graph), layouts=layouts)
    (x,) = drawn((F32, (4, 6)))
    memory = [np.full(4 * 9, -7, np.float32), np.full(4 * 3, -7, np.float32)]
    evaluated(parts, [x], memory=memory)
    whole, sums = memory[0].reshape(4, 9), memory[1].reshape(4, 3)
    np.testing.assert_allclose(whole[:, :6], np.exp(x), rtol=1e-6)
    np.testing.assert_allclose(sums[:, 0], x.sum(1), rtol=1e-5, atol=1e-6)
    assert (whole[:, 6:] == -7).all() and (sums[:, 1:] == -7).all()


EPILOGUES: dict[str, tuple[Build, list[Sequence[int | str]], int | None]] = {
    "a bias": (lambda p, b: p + b, [(5,)], 2),
    "a residual": (lambda p, y: ops.tanh(p) * y, [("n", 5)], 1),
    "a value of each row": (lambda p, y: p * y, [("n", 1)], 2),
    "a number": (lambda p, y: p - y, [()], 1),
    "several": (lambda p, y, b, r: ops.relu(p + b) * r + y, [("n", 5), (5,), ("n", 1)], 2),
    "a transpose": (lambda p, y: p + ops.transpose(y, 0, 1), [(5, "n")], 2),
    "constants": (lambda p: p * 3.0 + 1.0, [], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    """Over rows and columns of the product, which is the first value; also as a launch of its own."""
    build, shapes, _ = EPILOGUES[name]
    types = [(F32, ("n", 4)), (F32, (4, 5)), *((F32, shape) for shape in shapes)]
    graph = graph_of(lambda x, w, *others: build(x @ w, *others), *types)
    region = region_of(graph)
    arrays = drawn(*types)
    (expected,) = _interpreter.run(graph, arrays)
    operands = [arrays[i] for i in entry_inputs(region)]
    (main,) = [op for op in ops_of(region.block) if op.spec.takes_epilogue]
    product = arrays[0] @ arrays[1]
    parts = epilogue_parts(region, main)
    assert parts is not None and len(parts.spec.dims) == 2 and not parts.spec.reduces
    assert shape_of(main.results[0]) == parts.spec.dims
    (found,) = evaluated(parts, operands, [product])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    # the result of the product is read from memory, as operand -1
    apart = region_parts(region, main, only_value=region.results_in_body[0])
    assert any(index == -1 for index, _ in apart.sources)
    (found,) = evaluated(apart, [*operands, product])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


def batched(build: Build, *shapes: Sequence[int | str]) -> RegionParts | None:
    """The epilogue of a product of many matrices, compared with the interpreter if there is one."""
    types = [(F32, (2, "n", 4)), (F32, (2, 4, 5)), *((F32, shape) for shape in shapes)]
    graph = graph_of(lambda x, w, *others: build(x @ w, *others), *types)
    region = region_of(graph)
    (main,) = [op for op in ops_of(region.block) if op.spec.takes_epilogue]
    parts = epilogue_parts(region, main)
    arrays = drawn(*types)
    (expected,) = _interpreter.run(graph, arrays)
    operands = [arrays[i] for i in entry_inputs(region)]
    product = arrays[0] @ arrays[1]
    if parts is not None:
        (found,) = evaluated(parts, operands, [product])
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    apart = region_parts(region, main, only_value=region.results_in_body[0])
    (found,) = evaluated(apart, [*operands, product])
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    return parts


def test_epilogues_over_merged_rows() -> None:
    """Rows of all matrices are one axis, along which each view needs one stride."""
    assert batched(lambda p, b: p + b, (5,)) is not None
    assert batched(lambda p, y: p + y, (2, "n", 5)) is not None
    assert batched(lambda p, y: p + y, (2, "n", 1)) is not None
    assert batched(lambda p, y: p + y, ("n", 5)) is None
    assert batched(lambda p, y: p + y, (2, 1, 1)) is None
    assert batched(lambda p, y: p + y, ("n", 1)) is None


def test_an_epilogue_of_one_row() -> None:
    types = [(F32, (1, 4)), (F32, (4, 5)), (F32, (5,)), (F32, (1, 1))]
    graph = graph_of(lambda x, w, b, y: (x @ w + b) * y, *types)
    region = region_of(graph)
    (main,) = [op for op in ops_of(region.block) if op.spec.takes_epilogue]
    parts = epilogue_parts(region, main)
    assert parts is not None and parts.spec.dims == (1, 5)
    arrays = drawn(*types)
    (expected,) = _interpreter.run(graph, arrays)
    operands = [arrays[i] for i in entry_inputs(region)]
    (found,) = evaluated(parts, operands, [arrays[0] @ arrays[1]])
    np.testing.assert_allclose(found.reshape(1, 5), expected, rtol=1e-5, atol=1e-5)


PACKED = "!mo.tensor<[2, 128], f32, cpu:0>"


def test_an_epilogue_of_the_second_product_as_a_launch_of_its_own() -> None:
    """The results of a library op are operands -1, -2, …."""
    x, wide = "!mo.tensor<[n, 4], f32, cpu:0>", "!mo.tensor<[n, 32], f32, cpu:0>"
    attributes = (
        '{encoding = "rows", columns = array<i64: 32, 32>, pairs = array<i64>, streamed = false}'
    )
    module = mok.parse(
        f"builtin.module {{ mo.graph @g(%x: {x}, %w: {PACKED}) -> ({wide}, {wide}) {{ "
        f"%l, %r = mok.packed_products(%x, %w) {attributes} : ({x}, {PACKED}) -> ({wide}, {wide}) "
        f"%a = mo.exp(%l) : ({wide}) -> {wide} %b = mo.neg(%r) : ({wide}) -> {wide} "
        f"mo.output(%a, %b) : ({wide}, {wide}) -> () }} }}"
    )
    fuse(entry(module).block)
    (region,) = [op for op in ops_of(entry(module).block) if isinstance(op, RegionOp)]
    (main,) = [op for op in ops_of(region.block) if op.spec.takes_epilogue]
    left, right = drawn((F32, ("n", 32)), (F32, ("n", 32)))
    for number, expected in enumerate((np.exp(left), -right)):
        parts = region_parts(region, main, only_value=region.results_in_body[number])
        assert parts.sources == ((-1 - number, 0),)
        (found,) = evaluated(parts, [right, left])
        np.testing.assert_allclose(found.reshape(3, 32), expected, rtol=1e-6)
        first = epilogue_parts(region, main, only_value=region.results_in_body[0])
        assert first is not None and first.spec.values[1:] == (Node("exp", (0,), F32),)
        product = main.results[number]
        fused = epilogue_parts(region, main, [product], region.results_in_body[number])
        assert fused is not None and fused.sources == ()
        (found,) = evaluated(fused, [], [(left, right)[number]])
        np.testing.assert_allclose(found.reshape(3, 32), expected, rtol=1e-6)


def test_the_norm_before_a_product() -> None:
    def norm(build: Callable[[Value, Value], Value], position: int = 0) -> str | None:
        types = [(F32, (4, 4)), (F32, (4,))]
        graph = graph_of(lambda x, g: x @ build(x, g) if position else build(x, g) @ x, *types)
        (main,) = [op for op in ops_of(entry(graph.to_mlir()).block) if op.name == "mo.matmul"]
        before = norm_before(main)
        return None if before is None else before.name

    assert norm(lambda x, g: ops.rms_norm(x, g, 1e-5)) == "mo.rms_norm"
    assert norm(lambda x, g: ops.rms_norm(x, g, 1e-5), position=1) is None
    assert norm(lambda x, g: ops.layer_norm(x, g, g, 1e-5)) is None
    assert norm(lambda x, g: x) is None
    module = graph_of(lambda x: x + 1.0, (F32, (4,))).to_mlir()
    constants = [op for op in ops_of(entry(module).block) if not op.operands]
    assert constants and all(norm_before(op) is None for op in constants)


def test_ops_that_many_values_need_are_looked_at_once() -> None:
    """A chain of squares has 2 ** 40 paths."""

    def build(x: Value) -> Value:
        for _ in range(40):
            x = x * x
        return x

    block = entry(graph_of(build, (F32, (4,))).to_mlir()).block
    *products, output = ops_of(block)
    assert needed_ops(output.operands[0]) == products and len(products) == 40
    assert needed_ops(products[2].operands[0]) == products[:2]
    assert needed_ops(block.args[0]) == []


def test_a_sum_that_is_widened_is_not_rounded() -> None:
    """A program writes a product of narrow factors with a wide result this way."""
    types = [(BF16, ("n", 4)), (BF16, (4, 5))]
    for build, conversions in (
        (lambda p: p.cast(F32) + 1.0, [("cast", F32)]),
        (lambda p: ops.exp(p).cast(F32), [("round_to", BF16), ("cast", F32)]),
        (
            lambda p: p.cast(F16) + p.cast(F16),
            [("round_to", BF16), ("cast", F16), ("round_to", F16)],
        ),
    ):
        region = region_of(graph_of(lambda x, w: build(x @ w), *types))  # noqa: B023
        (main,) = [op for op in ops_of(region.block) if op.spec.takes_epilogue]
        parts = epilogue_parts(region, main)
        assert parts is not None and casts_of(parts.spec) == conversions
