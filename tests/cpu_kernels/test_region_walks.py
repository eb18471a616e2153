"""How the CPU walks regions: the text of kernels for AVX2, the lanes of vectors, and which axes are walked in them.

`test_region_nests.py` runs such kernels. Here are the choices that change no result: blocks, tiles, chunks, vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from max import kernel as k
from max._backends.cpu import tuning
from max._backends.cpu.regions import axes
from max._backends.cpu.regions.nest import write_nest, write_region
from max._backends.cpu.regions.vector_width import native_width, vectors_per_step
from max._backends.regions import ArgView, Leaf, Literal, Node, RegionSpec, Result, SizeOf, Value
from max._compiler.codegen.epilogue import write_epilogue, write_part_epilogues
from max.dtype import DType
from max.mlir import DimExpr
from max.mlir.sizes import Sizes, contiguous_strides

pytestmark = pytest.mark.any_target

AVX2 = k.CPUTarget(frozenset({"avx2", "fma"}), "x86_64-unknown-linux-gnu", "x86-64")
AVX512 = k.CPUTarget(
    frozenset({"avx2", "avx512f", "avx512bw", "avx512vl"}), "x86_64-unknown-linux-gnu", "x86-64"
)
F32, F64, BF16, I8 = DType.float32, DType.float64, DType.bfloat16, DType.int8
N, M, P = (DimExpr.symbol(name) for name in "nmp")


def mapped(dims: Sizes, *leaves: Sizes, dtype: DType = F32, to: Sizes | None = None) -> RegionSpec:
    """The sum of the first and the last leaf; the result is contiguous if its strides are not given."""
    values = (*[Leaf(dtype, each) for each in leaves], Node("add", (0, len(leaves) - 1), dtype))
    return RegionSpec(
        dims, False, values, (Result(len(leaves), dtype, to or contiguous_strides(dims)),)
    )


def softmax(dims: Sizes, strides: Sizes, dtype: DType = F32) -> RegionSpec:
    values = (
        Leaf(dtype, strides),
        Node("reduce_max", (0,), dtype),
        Node("sub", (0, 1), dtype),
        Node("exp", (2,), dtype),
        Node("reduce_sum", (3,), dtype),
        Node("div", (3, 4), dtype),
    )
    return RegionSpec(dims, True, values, (Result(5, dtype, strides),))


def reduced(dims: Sizes, strides: Sizes, to: Sizes, dtype: DType = F32) -> RegionSpec:
    """The sum of squares, and the product of all elements."""
    values = (
        Leaf(dtype, strides),
        Node("mul", (0, 0), dtype),
        Node("reduce_sum", (1,), dtype),
        Node("reduce_mul", (0,), dtype),
    )
    return RegionSpec(dims, True, values, (Result(2, dtype, to), Result(3, dtype, to)))


def products(dims: Sizes, x: Sizes, y: Sizes) -> RegionSpec:
    """Sums of the products of two leaves, their greatest one, and sums of the squares of the second leaf."""
    values = (
        Leaf(F32, x), Leaf(F32, y), Node("mul", (0, 1), F32), Node("reduce_max", (2,), F32),
        Node("reduce_sum", (2,), F32), Node("mul", (1, 1), F32), Node("reduce_sum", (5,), F32),
    )  # fmt: skip
    return RegionSpec(dims, True, values, tuple(Result(i, F32, (1, 0)) for i in (3, 4, 6)))


def two_results(spec: RegionSpec) -> RegionSpec:
    """A second, narrow result that reads the second leaf too: all loads precede the stores."""
    values = (*spec.values, Node("sub", (0, 1), F32))
    (result,) = spec.results
    narrow = Result(len(values) - 1, BF16, result.strides)
    return replace(spec, values=values, results=(result, narrow))


def sums_of_two_types() -> RegionSpec:
    """Both in pieces of the shorter length, that of f32."""
    values = (
        Leaf(F32, (M, 1)), Node("reduce_sum", (0,), F32), Node("cast", (0,), F64),
        Node("reduce_sum", (2,), F64), Node("reduce_max", (0,), F32),
    )  # fmt: skip
    results = (Result(1, F32, (1, 0)), Result(3, F64, (1, 0)), Result(4, F32, (1, 0)))
    return RegionSpec((N, M), True, values, results)


def sums_of_what_is_stored() -> RegionSpec:
    """One walk, whose stores are not written twice."""
    values = (Leaf(F32, (M, 1)), Node("exp", (0,), F32), Node("reduce_sum", (1,), F32))
    results = (Result(1, F32, (M, 1)), Result(2, F32, (1, 0)))
    return RegionSpec((N, M), True, values, results)


def sums_of_a_value_of_each_column() -> RegionSpec:
    """Of a product that does not vary along the axis, beside elements that are read along another one."""
    values = (
        Leaf(F32, (1, N)), Leaf(F32, (1, 0)), Node("mul", (1, 1), F32), Node("reduce_sum", (2,), F32),
        Node("reduce_sum", (0,), F32),
    )  # fmt: skip
    return RegionSpec((N, 60), True, values, (Result(3, F32, (1, 0)), Result(4, F32, (1, 0))))


def normalized(dims: Sizes, strides: Sizes, late: bool = False, early: bool = False) -> RegionSpec:
    """A layer norm without weights, whose deviations are from an exact mean.

    Args:
        dims: The iteration space.
        strides: Those of the leaf and of the result.
        late: Whether the region has another result of the last walk, and the means and variances too.
        early: Whether it has a result of the first walk, which the program selects.
    """
    values: list[Value] = [Leaf(F32, strides), SizeOf(F32, len(dims) - 1)]
    values += [
        Node("reduce_sum", (0,), F32), Node("div", (2, 1), F32), Node("sub", (0, 3), F32),
        Node("mul", (4, 4), F32), Node("reduce_sum", (5,), F32), Node("div", (6, 1), F32),
        Literal(F32, 1e-5), Node("add", (7, 8), F32), Node("rsqrt", (9,), F32), Node("mul", (4, 10), F32),
    ]  # fmt: skip
    results = [Result(11, F32, strides)]
    if late:
        values += [
            Node("mul", (0, 3), F32), Node("reduce_sum", (12,), F32), Node("div", (0, 13), F32),
        ]  # fmt: skip
        results += [Result(14, F32, strides), Result(3, F32, (1, 0)), Result(7, F32, (1, 0))]
    if early:
        at = len(values)
        values += [
            Node("neg", (0,), F32), Node("greater", (0, at), DType.bool), Node("select", (at + 1, 0, at), F32),
        ]  # fmt: skip
        results.append(Result(len(values) - 1, F32, strides))
    return RegionSpec(dims, True, tuple(values), tuple(results))


def rounded() -> RegionSpec:
    """Narrow floats: one result as they are rounded, one computed from the rounded value, and a flag."""
    values = (
        Leaf(BF16, (1,)),
        Leaf(BF16, (0,)),
        Node("mul", (0, 1), BF16),
        Node("round_to", (2,), BF16),
        Literal(BF16, 0.5),
        Node("max", (3, 4), BF16),
        Node("greater", (5, 0), DType.bool),
        Node("cast", (2,), F32),
        Node("cast", (7,), DType.float16),
        Node("add", (8, 3), DType.float16),
    )
    results = (
        Result(3, BF16, (1,)), Result(5, F32, (2,)), Result(6, DType.bool, (1,)), Result(9, DType.float16, (1,)),
    )  # fmt: skip
    return RegionSpec((N,), False, values, results)


def scalar() -> RegionSpec:
    values = (Leaf(F64, ()), Node("exp", (0,), F64))
    return RegionSpec((), False, values, (Result(1, F64, ()),))


TEXTS: dict[str, Callable[[], RegionSpec]] = {
    "scalar": scalar,
    "rounded": rounded,
    "uncut_row": lambda: mapped((8192,), (1,), (0,)),
    "blocks": lambda: mapped((3, 8193), (8193, 1), (0, 1), to=(9000, 1)),
    "whole_vectors": lambda: mapped((N, M * 32), (M * 32, 1), (1, 0)),
    "transposed_tiles": lambda: two_results(mapped((N, M), (M, 1), (1, N))),
    "transposed_tiles_along_longer_rows": lambda: mapped((P, 300, 40), (12000, 40, 1), (0, 1, 300)),
    "tiles": lambda: mapped((N, 20), (20, 1), (1, N), dtype=F64),
    "rows": lambda: softmax((N, 300), (300, 1)),
    "long_rows": lambda: softmax((N, M), (M, 1), BF16),
    "sums_of_long_rows": lambda: reduced((N, M), (M, 1), (1, 0)),
    "sums_of_two_types": sums_of_two_types,
    "sums_of_what_is_stored": sums_of_what_is_stored,
    "sums_of_products": lambda: products((N, 300), (300, 1), (0, 1)),
    "sums_of_products_of_columns": lambda: products((N, 60), (1, N), (0, 3)),
    "sums_of_a_value_of_each_column": sums_of_a_value_of_each_column,
    "sums_of_integers": lambda: reduced((N, M), (M, 1), (1, 0), DType.int32),
    "sums_of_one_value": lambda: reduced((N, 300), (1, 0), (1, 0)),
    "columns": lambda: softmax((2, N, M), (N * M, 1, N)),
    "short_columns": lambda: softmax((N, 40, 5), (200, 1, 40)),
    "sums_of_columns": lambda: reduced((200, 4, 500), (1, 200, 800), (4, 1, 0), F64),
    "shared_row": lambda: softmax((N,), (1,)),
    "sums_of_a_shared_row": lambda: reduced((tuning.LONG_ROW,), (1,), (0,)),
    "one_row": lambda: softmax((32_767,), (1,)),
    "exact_means": lambda: normalized((N, M), (M, 1)),
    "exact_means_beside_a_late_result": lambda: normalized((N, M), (M, 1), late=True),
    "exact_means_beside_an_early_result": lambda: normalized((N, M), (M, 1), early=True),
    "exact_means_beside_early_results": lambda: normalized((N, M), (M, 1), late=True, early=True),
    "exact_means_of_a_shared_row": lambda: normalized((N,), (1,)),
    "exact_means_of_columns": lambda: normalized((40, 64), (1, 40)),
}  # fmt: skip


def described(view: ArgView) -> str:
    strides = "" if view.strides is None else f" strides {list(map(str, view.strides))}"
    return f"# {view.dtype.name} {list(map(str, view.shape))}{strides}"


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    kernel = write_region(TEXTS[name](), AVX2)
    lines = [described(view) for view in kernel.args]
    lines.append(f"# scalars {list(map(str, kernel.scalars))}{', one worker' * kernel.serial}")
    golden("\n".join([*lines, kernel.source]), f"regions/{name}.txt")


def gated(first: int, dtype: DType = BF16) -> RegionSpec:
    """Products times a vector, a value of each row and a number, plus a residual.

    Args:
        first: How many products there are.
        dtype: The dtype of the result.
    """
    leaves = [Leaf(F32, (40, 1))] * first
    values = (
        *leaves, Leaf(BF16, (0, 1)), Leaf(F32, (1, 0)), Leaf(F32, (0, 0)), Leaf(BF16, (64, 1)), SizeOf(F32, 1),
        Node("mul", (first - 1, first), F32), Node("mul", (first + 5, first + 1), F32),
        Node("mul", (first + 6, first + 2), F32), Node("fma", (first + 7, first + 4, first + 3), F32),
        Node("round_to", (first + 8,), BF16), Node("add", (first + 9, 0), F32),
    )  # fmt: skip
    return RegionSpec((N, 40), False, values, (Result(first + 10, dtype, (40, 1)),))


def test_text_of_epilogues(golden: Callable[[str, str], None]) -> None:
    """Of a kernel with one result, and of one with parts: a product as it is, a product, a pair of products."""
    constant = RegionSpec(
        (1, 40), False, (Leaf(F32, (40, 1)), Literal(F32, 2.0)), (Result(1, F32, (40, 1)),)
    )
    one = write_epilogue(gated(1))
    several = write_part_epilogues([None, (gated(1, F32), 1), (gated(2), 2), (constant, 1)])
    texts: list[str] = []
    for each in (one, several):
        texts += [described(view) for view in each.args] + [each.source]
    golden("\n".join(texts), "regions/epilogues.txt")


@pytest.mark.parametrize(
    ("dtype", "strides", "most"),
    [
        (F32, (M, 1), 128 * 32), (BF16, (M, 1), 128 * 32), (F64, (M, 1), 512 * 16), (F32, (1, N), 128),
        (F64, (1, N), 512),
    ],
)  # fmt: skip
def test_longer_sums_are_added_up_in_pieces(dtype: DType, strides: Sizes, most: int) -> None:
    """The most elements of a lane, by the lanes of a row."""

    def pieces(size: int | DimExpr, op: str = "reduce_sum") -> bool:
        values = (Leaf(dtype, strides), Node(op, (0,), dtype))
        spec = RegionSpec((N, size), True, values, (Result(1, dtype, (1, 0)),))
        return "pieces" in write_region(spec, AVX2).source

    assert [pieces(most), pieces(most + 1), pieces(M)] == [False, True, True]
    assert not pieces(M, "reduce_mul") and not pieces(M, "reduce_max")


@pytest.mark.parametrize(("size", "steps"), [(0, 16384), (1, 16384), (2, 8192), (300, 54)])
def test_chunks_of_rows(size: int, steps: int) -> None:
    """At least 16,384 elements."""
    source = write_region(reduced((N, size), (size, 1), (1, 0)), AVX2).source
    assert f"grain=k.max({steps}, " in source


@pytest.mark.parametrize("width", [4, 8, 16, 32])
def test_vectors_that_are_transposed(width: int) -> None:
    source = write_nest(mapped((N, M), (M, 1), (1, N)), width).source
    assert ("transpose(" in source) == (width in (8, 16))


def test_small_regions_run_on_one_worker() -> None:
    """Waking others costs more; the text is the same."""

    def serial(*dims: int | DimExpr) -> bool:
        return write_region(mapped(dims, contiguous_strides(dims)), AVX2).serial

    most = tuning.SERIAL_ELEMENTS
    assert serial(most) and serial(most // 2, 2) and serial(1) and serial()
    assert not serial(8, most // 8 + 1) and not serial(N, 1)
    assert serial(most + 1), "an axis that is not cut is one task"


@pytest.mark.parametrize(
    ("dtypes", "avx2", "avx512"),
    [
        ([F32], 8, 16), ([F64], 4, 8), ([BF16], 8, 16), ([BF16, F64], 4, 8), ([I8, F32], 8, 16), ([I8], 16, 32),
        ([DType.int16], 16, 32), ([DType.bool, I8], 16, 32), ([DType.int64, I8], 4, 8),
    ],
)  # fmt: skip
def test_lanes_of_the_widest_type(dtypes: list[DType], avx2: int, avx512: int) -> None:
    """Floats of 16 bits are computed in f32; narrow integers take twice the lanes of f32."""
    for order in (dtypes, dtypes[::-1]):
        values = tuple(Leaf(dtype, (1,)) for dtype in order)
        spec = RegionSpec((N,), False, values, (Result(0, order[0], (1,)),))
        assert [native_width(spec, target) for target in (AVX2, AVX512)] == [avx2, avx512]


def chained(reduces: bool, *ops: str, dtype: DType = F32) -> RegionSpec:
    """Ops of one operand, one after the other; `.` begins anew from the leaf."""
    values: list[Value] = [Leaf(dtype, (M, 1))]
    at = 0
    for op in ops:
        values.append(Node(op, (at,), dtype) if op != "." else Literal(dtype, 1.0))
        at = 0 if op == "." else len(values) - 1
    return RegionSpec((N, M), reduces, tuple(values), (Result(1, dtype, (M, 1)),))


@pytest.mark.parametrize(
    ("spec", "vectors"),
    [
        (chained(True, "reduce_sum"), 4),
        (chained(True, "neg", "abs", "neg", "reduce_sum"), 4),
        (chained(True, "neg", "abs", "neg", "abs", "reduce_sum"), 2),
        (chained(False, "neg"), 2),
        (chained(False, "tanh", "neg", "abs"), 2),
        (chained(False, "tanh", ".", "exp"), 2),
        (chained(False, "tanh", "neg", "exp"), 4),
        (chained(False, "exp", "sigmoid"), 4),
        (chained(False, "silu", "erf", "gelu"), 4),
        (chained(False, "exp", "neg", "exp", dtype=BF16), 4),
        (chained(False, "exp", "neg", "exp", dtype=F64), 2),
        (chained(True, "exp", "exp", "neg", "neg", "reduce_sum"), 2),
        (mapped((N, M), (M, 1), (1, N)), 1),
    ],
)
def test_vectors_of_a_step(spec: RegionSpec, vectors: int) -> None:
    """More accumulators for simple reductions, more chains of long functions, a tile at a time."""
    assert vectors_per_step(spec, columns=False) == vectors
    assert vectors_per_step(spec, columns=True) == 4


@pytest.mark.parametrize("args", [(1, 0), (0, 1)])
def test_the_longest_chain_counts(args: tuple[int, int]) -> None:
    values = (
        Leaf(F32, (1,)),
        Node("exp", (0,), F32),
        Node("add", args, F32),
        Node("tanh", (2,), F32),
    )
    spec = RegionSpec((N,), False, values, (Result(3, F32, (1,)),))
    assert vectors_per_step(spec, columns=False) == 4


def over(reduces: bool, dims: Sizes, *leaves: Sizes) -> RegionSpec:
    values = (*[Leaf(F32, each) for each in leaves], Literal(F32, 1.0))
    return RegionSpec(dims, reduces, values, ())


@pytest.mark.parametrize(
    ("spec", "axis"),
    [
        (over(False, (N, 8), (1, N)), None),
        (over(True, (N, 8), (1, N)), 0),
        (over(True, (N, 8), (8, 1)), None),
        (over(True, (N, 8), (1, N), (8, 1)), None),
        (over(True, (8,), (3,)), None),
        # read along the reduction, but nowhere in order
        (over(True, (N, 8), (16, 2)), None),
        # vectors along axis 1 for two leaves, along axis 0 for one
        (over(True, (4, 5, 6), (1, 4, 20), (30, 1, 5), (0, 1, 5)), 1),
        # what does not vary along the reduction has no say
        (over(True, (4, 5, 6), (1, 4, 20), (5, 1, 0), (5, 1, 0)), 0),
        (over(True, (4, 5, 6), (1, 4, 20), (30, 1, 5)), 0),
    ],
)
def test_the_axis_of_columns(spec: RegionSpec, axis: int | None) -> None:
    assert axes.column_axis(spec) == axis


@pytest.mark.parametrize(
    ("spec", "axis", "transposed"),
    [
        (over(False, (N, 8), (8, 1)), -1, []),
        (over(False, (N, 8), (1, 0)), -1, []),
        (over(False, (N, 8), (16, 2)), -1, []),
        (over(False, (N, 8), (8, 1), (1, N)), 0, [1]),
        (over(False, (N, 8), (1, N), (1, 0)), 0, [0]),
        (over(True, (N, 8), (1, N)), -1, []),
        (over(False, (4, 5, 6), (30, 1, 5)), 1, [0]),
        # of two leaves the first decides; the other cannot be transposed along its axis
        (over(False, (4, 5, 6), (1, 4, 20), (30, 1, 5)), 0, []),
        (over(False, (4, 5, 6), (1, 4, 20), (1, 0, 4)), 0, [0, 1]),
        (over(False, (), ()), -1, []),
    ],
)
def test_the_axis_of_tiles(spec: RegionSpec, axis: int, transposed: list[int]) -> None:
    assert axes.tile_axis(spec) == axis
    assert axes.transposed_leaves(spec, axis) == transposed


def test_tiles_that_are_not_transposed_in_registers() -> None:
    """Values of 64 bits or of 8, and results that are not written in vectors."""
    for dtype, found in ((F32, [1]), (BF16, [1]), (DType.int32, [1]), (F64, []), (I8, [])):
        assert axes.transposed_leaves(mapped((N, M), (M, 1), (1, N), dtype=dtype), 0) == found
    assert axes.transposed_leaves(mapped((N, M), (M, 1), (1, N), to=(M * 2, 2)), 0) == []
    assert axes.transposed_leaves(mapped((N, M), (M, 1), (1, N), to=(M + 1, 1)), 0) == [1]


@pytest.mark.parametrize(
    ("rows", "columns", "longer"), [(300, 40, True), (40, 300, False), (40, 40, False)]
)
def test_tiles_advance_along_the_longer_rows(rows: int, columns: int, longer: bool) -> None:
    spec = mapped((rows, columns), (columns, 1), (1, rows))
    assert axes.reads_longer_rows(spec, [1], 0) == longer
    # sizes known at run time only are not compared
    for n, m in ((rows, M), (N, columns)):
        assert not axes.reads_longer_rows(mapped((n, m), (m, 1), (1, n)), [1], 0)


def test_tiles_advance_along_rows_that_are_longer_than_all_results() -> None:
    spec = mapped((300, 40), (40, 1), (1, 300))
    (result,) = spec.results
    wide = Result(0, F32, (500, 1))
    for results, longer in (
        ((result, result), True),
        ((result, wide), False),
        ((wide, result), False),
    ):
        assert axes.reads_longer_rows(replace(spec, results=results), [1], 0) == longer
    both = mapped((300, 40), (1, 300), (1, 300))
    assert axes.reads_longer_rows(both, [0, 1], 0)
    gaps = replace(both, results=(wide,))
    assert not axes.reads_longer_rows(gaps, [0, 1], 0)
