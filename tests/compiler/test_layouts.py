"""Sizes and layouts against Python's numbers and NumPy's strides; source locations of ops."""

from __future__ import annotations

import operator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max import mlir
from max._compiler.analysis.layout import Layout, collapse
from max._compiler.analysis.shapes import is_view, shape_of, strip, view_layout
from max._compiler.locations import SourceLocations, number_ops, staged_op_of
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import sizes
from max.mlir.dims import DimExpr

pytestmark = pytest.mark.any_target

SYMBOLS = ("a", "b", "c")
N = DimExpr.symbol("n")

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}
TREE = st.recursive(
    st.integers(-3, 9) | st.sampled_from(SYMBOLS),
    lambda inner: st.tuples(st.sampled_from(list(OPERATORS)), inner, inner),
    max_leaves=6,
)


def expression(tree) -> DimExpr | int:
    """The expression of a tree; a division that no expression can hold leaves its numerator."""
    if not isinstance(tree, tuple):
        return DimExpr.of(tree)
    symbol, x, y = tree[0], expression(tree[1]), expression(tree[2])
    if symbol == "//" and y == 0:
        return x
    return OPERATORS[symbol](x, y)


def value(tree, env: dict[str, int]) -> int:
    """What the tree is for these values of the symbols."""
    if not isinstance(tree, tuple):
        return env.get(tree, tree)
    x, y = value(tree[1], env), value(tree[2], env)
    if tree[0] == "//" and expression(tree[2]) == 0:
        return x
    return OPERATORS[tree[0]](x, y)


@settings(max_examples=100)
@given(trees=st.lists(TREE, max_size=4), values=st.tuples(*[st.integers(0, 9)] * 3))
def test_a_size_function_computes_what_the_expressions_say(trees, values) -> None:
    env = dict(zip(SYMBOLS, values, strict=True))
    all_sizes = [sizes.simplify(expression(tree)) for tree in trees]
    computed = sizes.size_function(all_sizes, SYMBOLS)(values)
    assert len(computed) == len(trees)
    for tree, result in zip(trees, computed, strict=True):
        try:
            assert result == value(tree, env)
        except ZeroDivisionError:
            pass  # a check rejects the values; the function must not raise


def test_a_size_function_of_no_symbols() -> None:
    assert sizes.size_function([3, 0], ())([]) == [3, 0]
    assert sizes.size_function([], ("n",))([5]) == []
    # the sum without terms, and powers
    assert sizes.size_function([N - N, N * N * N, 0 - N, 7 // (N + 1)], ("n",))([4]) == [
        0,
        64,
        -4,
        1,
    ]
    assert sizes.size_function([N // DimExpr.symbol("m")], ("n", "m"))([5, 0]) == [5]


@given(dims=st.lists(st.integers(0, 4) | st.sampled_from(SYMBOLS).map(DimExpr.symbol), max_size=4))
def test_products_and_quotients(dims) -> None:
    env = {"a": 3, "b": 5, "c": 7}
    total = sizes.product(dims)
    numbers = [dim if isinstance(dim, int) else dim.evaluate(env) for dim in dims]
    assert sizes.substitute(total, env) == int(np.prod(numbers, dtype=np.int64))
    assert isinstance(total, int) == all(isinstance(dim, int) or 0 in dims for dim in dims)
    for place, dim in enumerate(dims):
        quotient = sizes.divide(total, dim)
        if dim == 0:
            assert quotient is None
        elif 0 not in dims:
            assert quotient == sizes.product([*dims[:place], *dims[place + 1 :]])
        else:
            assert quotient == 0


def test_quotients_that_are_not_exact_for_all_values() -> None:
    assert sizes.divide(7, 2) is None and sizes.divide(8, 2) == 4 and sizes.divide(0, 0) is None
    assert sizes.divide(N * 6, 3) == N * 2 and sizes.divide(N * 6, 4) is None
    assert sizes.divide(N + 1, N) is None and sizes.divide(6, N) is None
    assert type(sizes.divide(N * 6, N)) is int


def test_substituted_sizes_are_plain_where_they_are_static() -> None:
    assert type(sizes.substitute(N * 3, {"n": 2})) is int
    assert sizes.substitute(N * 3, {"m": 2}) == N * 3 == sizes.substitute(N * 3, {})
    assert sizes.substitute(4, {"n": 2}) == 4
    assert sizes.substitute(N * 3, {"n": DimExpr.symbol("m")}) == DimExpr.symbol("m") * 3
    assert sizes.nominal(5) == 5 and sizes.nominal(N * 2 + 1) == 2 * sizes.NOMINAL + 1


# -- layouts


def elements(layout: Layout, memory: np.ndarray) -> np.ndarray:
    """What a layout selects of flat memory: NumPy computes the addresses."""
    index = np.full(layout.shape, layout.offset)
    for axis, (dim, stride) in enumerate(zip(layout.shape, layout.strides, strict=True)):
        along = np.arange(dim) * stride
        index = index + along.reshape([-1 if i == axis else 1 for i in range(len(layout.shape))])
    return memory[index]


@settings(max_examples=150)
@given(data=st.data())
def test_layouts_of_views_are_those_of_numpy(data) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 0]), min_size=1, max_size=4))
    memory = np.arange(int(np.prod(shape)))
    layout, array = Layout.contiguous(shape), memory.reshape(shape)
    for _ in range(data.draw(st.integers(1, 4))):
        rank = array.ndim
        match data.draw(st.sampled_from(["transpose", "slice", "broadcast", "reshape"])):
            case "transpose":
                perm = data.draw(st.permutations(range(rank)))
                layout, array = layout.transpose(perm), array.transpose(perm)
            case "slice":
                starts = [data.draw(st.integers(0, max(dim - 1, 0))) for dim in array.shape]
                steps = data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
                array = array[tuple(map(slice, starts, [None] * rank, steps))]
                layout = layout.slice(starts, steps, array.shape)
            case "broadcast":
                wide = [3 if dim == 1 and data.draw(st.booleans()) else dim for dim in array.shape]
                wide = [2] * data.draw(st.integers(0, 1)) + wide
                layout, array = layout.broadcast_to(wide), np.broadcast_to(array, wide)
            case _:
                new = data.draw(st.permutations(array.shape))
                if array.size and data.draw(st.booleans()):
                    new = [array.size // new[0], 1, new[0]] if rank else [1]
                reshaped = layout.reshape(new)
                if reshaped is None:  # so no strides of NumPy can say it either
                    assert array.size
                    with pytest.raises(AttributeError, match="[Ii]ncompatible shape"):
                        array.copy("K").view().shape = new
                        array.view().shape = tuple(new)
                    continue
                layout, array = reshaped, array.reshape(new)
        assert layout.shape == array.shape
        np.testing.assert_array_equal(elements(layout, memory), array)
        if layout.is_contiguous and array.size:
            flat = elements(layout, memory).ravel()
            np.testing.assert_array_equal(flat, flat[0] + np.arange(len(flat)))


def numbers(shape, strides, offset: int = 0) -> list[int]:
    """The positions of all elements in memory, in row-major order."""
    return [
        offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in np.ndindex(*shape)
    ]


def test_a_layout_is_contiguous_if_its_elements_follow_each_other(rng) -> None:
    contiguous = 0
    for _ in range(600):
        rank = int(rng.integers(0, 4))
        shape = tuple(rng.choice([0, 1, 2, 2, 3, 3, 4, 2], rank).tolist())
        layout = Layout.contiguous(shape)
        if rng.random() < 0.7:
            strides = [s if rng.random() < 0.6 else int(rng.integers(0, 7)) for s in layout.strides]
            layout = Layout(shape, tuple(strides), 5)
        found = numbers(shape, layout.strides)
        assert layout.is_contiguous is (found == list(range(len(found)))), layout
        contiguous += layout.is_contiguous
    assert 100 < contiguous < 540


def random_layout(rng) -> Layout:
    """A layout after a transpose, a broadcast and a slice, or some of them."""
    layout = Layout.contiguous(rng.choice([1, 2, 3, 4], int(rng.integers(1, 4))).tolist())
    if rng.random() < 0.4:
        layout = layout.transpose(rng.permutation(len(layout.shape)).tolist())
    if rng.random() < 0.3:
        layout = layout.broadcast_to([*rng.choice([1, 2], 1).tolist(), *layout.shape])
    if rng.random() < 0.4:
        rank = len(layout.shape)
        shape = [int(rng.integers(1, n + 1)) for n in layout.shape]
        layout = layout.slice([0] * rank, [1] * rank, shape)
    return layout


def regrouped(rng, shape) -> list[int]:
    """Another shape of as many elements: the prime factors in an order like the old one, grouped at random."""
    factors = [f for n in shape for f in ([2, 2] if n == 4 else [n] if n > 1 else [])]
    if rng.random() < 0.2:
        rng.shuffle(factors)
    new = [1] if rng.random() < 0.3 else []
    for factor in factors:
        if new and rng.random() < 0.5:
            new[-1] *= factor
        else:
            new.append(factor)
    return [*new, 1] if rng.random() < 0.3 else new


def test_a_reshape_has_strides_if_numpy_finds_some(rng) -> None:
    counts = {True: 0, False: 0}
    for _ in range(1500):
        layout = random_layout(rng)
        new = regrouped(rng, layout.shape)
        memory = np.arange(500, dtype=np.int8)
        array = np.lib.stride_tricks.as_strided(memory, layout.shape, layout.strides)
        try:
            array.view().shape = tuple(new)
            expected = True
        except AttributeError:
            expected = False
        reshaped = layout.reshape(new)
        assert (reshaped is not None) is expected, (layout, new)
        counts[expected] += 1
        if reshaped is not None:
            assert reshaped.shape == tuple(new)
            before = numbers(layout.shape, layout.strides, layout.offset)
            assert numbers(new, reshaped.strides, reshaped.offset) == before
    assert min(counts.values()) > 150


def test_reshapes_of_symbolic_sizes() -> None:
    """Groups of axes have equal products, whatever the symbols are."""
    apart = Layout((N, 2, 3), (12, 3, 1), 7)
    assert apart.reshape((N, 6)) == Layout((N, 6), (12, 1), 7)
    assert apart.reshape((N, 3, 2)) == Layout((N, 3, 2), (12, 2, 1), 7)
    assert apart.reshape((N * 2, 3)) is None and apart.reshape((6, N)) is None
    rows = Layout((N, 2, 3), (12, 6, 1), 7)
    assert rows.reshape((N * 2, 3)) == Layout((N * 2, 3), (6, 1), 7)
    assert Layout((N * 2, 3), (6, 1), 7).reshape((N, 2, 3)) == rows
    assert rows.reshape((N, 6)) is None
    assert Layout((2, N, 3), (N * 6, 6, 1)).reshape((N * 2, 3)) == Layout((N * 2, 3), (6, 1))
    # sizes that only a run compares: those of a contiguous value have strides whatever they are
    m = DimExpr.symbol("m")
    assert Layout.contiguous((N,)).reshape((m,)) == Layout.contiguous((m,))
    assert Layout((N,), (2,)).reshape((m,)) is None
    assert Layout((N, 2), (8, 4)).reshape((N,)) is None
    assert Layout((N,), (2,)).reshape((N, 2)) is None
    # no elements: any strides would do
    assert Layout((0, 3), (9, 2)).reshape((3, 0)) == Layout.contiguous((3, 0))
    assert Layout((N, 3), (9, 2)).reshape((0,)) == Layout.contiguous((0,))
    # an axis of 1 has no other element
    assert Layout((N, 1), (4, 9)).reshape((1, N)) == Layout((1, N), (0, 4))


def test_collapsed_axes_walk_the_same_elements(rng) -> None:
    """No axis of 1 is left, nor two that all views allow to merge; the last one stays if it must."""
    merges = 0
    for _ in range(600):
        rank, keep_last = int(rng.integers(1, 5)), bool(rng.random() < 0.5)
        shape = rng.choice([1, 2, 3], rank).tolist()
        views = []
        for _ in range(int(rng.integers(1, 3))):
            strides = list(Layout.contiguous(shape).strides)
            if rng.random() < 0.6:
                at = int(rng.integers(0, rank))
                strides[: at + 1] = [2 * stride for stride in strides[: at + 1]]
            views.append(tuple(strides))
        dims, strides = collapse(shape, views, keep_last=keep_last)
        for view, merged in zip(views, strides, strict=True):
            assert numbers(dims, merged) == numbers(shape, view)
        free = list(dims)
        if keep_last:
            assert free.pop() == shape[-1]
            assert [view[-1] for view in views] == [merged[-1] for merged in strides]
        assert 1 not in free
        for axis in range(1, len(free)):
            assert any(merged[axis - 1] != merged[axis] * dims[axis] for merged in strides)
        merges += len(dims) < len(shape) - shape.count(1)
    assert merges > 100
    assert collapse((N, 2, 3), [(6, 3, 1), (12, 6, 2)]) == ((N * 6,), [(1,), (2,)])
    assert collapse((N, 2, 3), [(6, 3, 1)], keep_last=True) == ((N * 2, 3), [(3, 1)])
    assert collapse((), [(), ()]) == ((), [(), ()]) and collapse((1,), [(5,)]) == ((), [()])


def views() -> list[mlir.MoOp]:
    """A transpose, reshape, broadcast, slice, and a reshape that drops the slice's axis of 1."""
    x_type = TensorType(DType.float32, (2, 3, 4), DeviceRef.CPU())
    with Graph("views", input_types=[x_type]) as graph:
        x = graph.inputs[0].tensor
        y = ops.reshape(ops.permute(x, [2, 0, 1]), [4, 1, 2, 3])
        y = ops.broadcast_to(y, [4, 5, 2, 3])
        graph.output(y[1:4:2, :, 1], ops.exp(x))
    *view_ops, exp, _ = mlir.walk(graph._module)
    assert all(map(is_view, view_ops)) and not is_view(exp) and not is_view("mo.reshape")
    return view_ops


def test_layouts_of_the_ops_that_move_no_elements() -> None:
    memory = np.arange(24)
    array, layout = memory.reshape(2, 3, 4), Layout.contiguous((2, 3, 4))
    transpose, reshape, broadcast, cut, squeeze = views()
    for op, expected in (
        (transpose, array := array.transpose(2, 0, 1)),
        (reshape, array := array.reshape(4, 1, 2, 3)),
        (broadcast, array := np.broadcast_to(array, (4, 5, 2, 3))),
        (cut, array := array[1:4:2, :, 1:2]),
        (squeeze, array.reshape(2, 5, 3)),
    ):
        assert op.spec.view
        layout = view_layout(op, layout)
        assert layout is not None and layout.shape == shape_of(op.results[0]) == expected.shape
        np.testing.assert_array_equal(elements(layout, memory), expected)
    assert view_layout(reshape, Layout((4, 6), (1, 4))) is not None
    assert view_layout(reshape, Layout((2, 12), (1, 2))) is None, "rows of other lengths"


def test_rebound_dims_replace_the_shape() -> None:
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 4], DeviceRef.CPU())]) as graph:
        graph.output(ops.rebind(graph.inputs[0].tensor, ["m", 4]))
    (op,) = [op for op in mlir.walk(graph._module) if op.name == "mo.rebind"]
    m = DimExpr.symbol("m")
    n = DimExpr.symbol("n")
    assert view_layout(op, Layout((n, 4), (4, 1), 7)) == Layout((m, 4), (4, 1), 7)
    assert view_layout(op, Layout((n, 4), (1, n), 7)) == Layout((m, 4), (1, n), 7)


def test_a_transfer_has_the_layout_of_its_operand() -> None:
    with Graph("g", input_types=[TensorType(DType.float32, [2, 3], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0])
    (output,) = mlir.walk(graph._module)
    x = output.operands[0]
    op = mlir.build("mo.transfer", (x,), {}, (x.type,))
    assert is_view(op) and view_layout(op, Layout((2, 3), (1, 2), 5)) == Layout((2, 3), (1, 2), 5)


def test_dims_of_one_are_left_out() -> None:
    assert strip((1, 3, 1, N)) == (3, N) and strip((1, 1)) == ()
    assert strip((1, 3, 1, N), 2) == (3, 1, N) and strip((1, 3), 0) == (1, 3)


# -- locations


def test_locations_of_ops() -> None:
    with Graph("g", input_types=[TensorType(DType.float32, [4], DeviceRef.CPU())]) as graph:
        graph.output(ops.exp(graph.inputs[0].tensor))
    module = graph._module
    locations = SourceLocations.of(module)
    all_ops = list(mlir.walk(module))
    exp = [op.name for op in all_ops].index("mo.exp")
    places = locations.texts()
    assert len(places) == len(all_ops)
    file, line = places[exp].rsplit(":", 1)
    assert file.endswith("test_layouts.py")
    assert "ops.exp(graph.inputs[0]" in Path(file).read_text().splitlines()[int(line) - 1]
    assert staged_op_of(all_ops[exp]) == -1, "the location is a line of a file, not a number"
    number_ops(module)
    assert [staged_op_of(op) for op in all_ops] == list(range(len(all_ops)))
    # one that is read from a stored program
    stored = SourceLocations(places)
    assert stored.texts() == places
    assert [stored.describe(number) for number in (-1, len(places), exp)] == ["", "", places[exp]]
    assert SourceLocations([None, mlir.StringAttr("a place")]).texts() == ["", ""]


@pytest.mark.parametrize("names", [["add", "mod", "div"], ["add", "add"], ["div", "add"]])
def test_a_region_has_the_location_of_what_raises(names) -> None:
    x_type = TensorType(DType.int32, [4], DeviceRef.CPU())
    with Graph("g", input_types=[x_type, x_type]) as graph:
        x, y = (value.tensor for value in graph.inputs)
        compute = {"add": lambda: x + y, "div": lambda: ops.div(x, y), "mod": lambda: x % y}
        graph.output(*[compute[name]() for name in names])
    (outer,) = [op for op in graph._module.walk() if op.name == "mo.graph"]
    assert staged_op_of(outer) == -1
    number_ops(graph._module)
    inner = list(mlir.walk(graph._module))
    raising = [n for n, op in enumerate(inner) if op.name in ("mo.div", "mo.mod")]
    assert len(raising) == len({*names} - {"add"})
    assert staged_op_of(outer) == (raising[0] if raising else len(inner) - 1)
    if raising:
        inner[raising[0]].location = inner[-1].location
        inner[-1].location = mlir.line_location("f", 99)
        assert staged_op_of(outer) == len(inner) - 1, "the number of the op, not its place"
        return
    elsewhere = mlir.line_location("f", 99)
    inner[-1].location = elsewhere
    assert staged_op_of(outer) == len(inner) - 2
    for op in inner[1:]:
        op.location = elsewhere
    assert staged_op_of(outer) == 0
