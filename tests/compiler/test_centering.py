"""Variances around exact means: which regions are rewritten, and their values, computed by NumPy in f32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from max._backends.regions import Leaf, Literal, Node, RegionSpec, Result, SizeOf, Value
from max._compiler.codegen.centering import with_exact_centers
from max.dtype import DType
from max.mlir import DimExpr
from max.mlir.sizes import Size

pytestmark = pytest.mark.any_target

F32, F64, BF16, I32 = DType.float32, DType.float64, DType.bfloat16, DType.int32
N, M = DimExpr.symbol("n"), DimExpr.symbol("m")
Array = np.ndarray[Any, Any]


class Values:
    """The values of a region, by name."""

    def __init__(self, dtype: DType = F32) -> None:
        self.dtype = dtype
        self.values: list[Value] = []

    def add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def node(self, op: str, *args: int, dtype: DType | None = None) -> int:
        return self.add(Node(op, args, dtype or self.dtype))

    def literal(self, number: float) -> int:
        return self.add(Literal(self.dtype, number))

    def spec(
        self, *results: int, size: Size = M, rows: Sequence[int] = (), other: Size = N
    ) -> RegionSpec:
        """The region.

        Args:
            results: The values that are stored over the whole space.
            size: That of the axis.
            rows: The values of which one is stored for each row.
            other: The number of rows.
        """
        stored = [Result(i, F64, (size, 1)) for i in results] + [
            Result(i, F64, (1, 0)) for i in rows
        ]
        return RegionSpec((other, size), True, tuple(self.values), tuple(stored))


def evaluated(spec: RegionSpec, x: Array) -> list[Array]:
    """The results, with f32 rounded after each step; the leaves are all `x`. Sums of rows that need none are NaN."""
    with np.errstate(all="ignore"):
        return _evaluated(spec, x)


def _evaluated(spec: RegionSpec, x: Array) -> list[Array]:
    values: list[Array] = []
    for value in spec.values:
        kind = np.float64 if value.dtype is F64 else np.float32
        match value:
            case Leaf():
                values.append(x.astype(kind))
            case Literal(value=number):
                values.append(np.full_like(x, number, kind))
            case SizeOf(axis=axis):
                values.append(np.full_like(x, x.shape[axis], kind))
            case Node(op=op, args=args):
                values.append(_node(op, [values[a] for a in args], kind))
    return [values[result.value] for result in spec.results]


def _node(op: str, args: list[Array], kind: Any) -> Array:
    first = args[0]
    if op in ("reduce_sum", "reduce_max"):
        # one element after the other: the error of a mean is as large as that of a kernel's, or larger
        sums = op == "reduce_sum"
        row = np.cumsum(first, -1, kind)[..., -1:] if sums else first.max(-1, keepdims=True)
        if len(args) > 1:
            row = np.where(args[1][..., :1] != 0, row, np.float32(np.nan))
        return np.broadcast_to(row, first.shape)
    simple = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.fmax, "neg": np.negative,
        "sqrt": np.sqrt, "abs": np.abs,
    }  # fmt: skip
    if op in simple:
        return simple[op](*args).astype(kind)
    if op == "fma":
        wide = [a.astype(np.float64) for a in args]
        return (wide[0] * wide[1] + wide[2]).astype(kind)
    if op == "select":
        return np.where(first != 0, args[1], args[2])
    if op == "greater":
        return (first > args[1]).astype(kind)
    if op == "is_inf":
        return np.isinf(first).astype(kind)
    assert op == "cast", op
    return first.astype(kind)


FORMS = ("div size", "mul part", "part mul", "mul literal", "div literal", "casts")


def deviations(v: Values, form: str, size: int = 64) -> tuple[int, int]:
    """A leaf's deviations from its mean, and the mean, in one of the forms that programs have."""
    x = v.add(Leaf(v.dtype, (M, 1)))
    total = v.node("reduce_sum", x)
    length = v.add(SizeOf(v.dtype, 1))
    match form:
        case "div size":
            mean = v.node("div", total, length)
        case "mul part" | "part mul":
            part = v.node("div", v.literal(1.0), length)
            mean = v.node("mul", *((total, part) if form == "mul part" else (part, total)))
        case "mul literal":
            # rounded to f32, as programs write it
            mean = v.node("mul", v.literal(float(np.float32(1 / size))), total)
        case "div literal":
            mean = v.node("div", total, v.literal(float(size)))
        case _:
            # conversions between narrow floats and f32 have no effect
            mean = v.node("div", v.node("cast", total, dtype=BF16), v.node("cast", length))
            return v.node("cast", v.node("sub", v.node("cast", x), v.node("cast", mean))), mean
    return v.node("sub", x, mean), mean


def variance(v: Values, c: int, form: str = "mul") -> int:
    """The mean of squares of deviations."""
    if form == "casts":
        square = v.node("cast", v.node("mul", c, v.node("cast", c)))
    else:
        square = v.node("mul", c, c)
    return v.node("div", v.node("reduce_sum", square), v.add(SizeOf(v.dtype, 1)))


def rows(size: int) -> Array:
    """Rows that are nearly constant, constant, and others; one whose squares are not finite in f32."""
    rng = np.random.default_rng(size)
    x = rng.standard_normal((6, size))
    x[0] = 1000 + 3e-4 * x[0]
    x[1] = 4097.1
    x[2] = -70_000 + 0.02 * x[2]
    x[3] = 1 + x[3]
    x[5] *= 1e25
    return x.astype(np.float32)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [64, 3000])
def test_norms_of_all_rows(form: str, conditional: bool, size: int) -> None:
    v = Values()
    c, _ = deviations(v, form, size)
    spread = variance(v, c, "casts" if form == "casts" else "mul")
    norm = v.node("div", c, v.node("sqrt", v.node("add", spread, v.literal(1e-12))))
    # a product with the norm's factor is written without another difference
    factor = v.node("div", v.literal(1.0), v.node("sqrt", v.node("add", spread, v.literal(1e-12))))
    one, other = v.node("mul", c, factor), v.node("mul", factor, c)
    spec = v.spec(norm, one, other, size=size, rows=(spread,))
    rewritten = with_exact_centers(spec, conditional)
    conditions = [
        value for value in rewritten.values if isinstance(value, Node) and value.op == "greater"
    ]
    assert len(conditions) == conditional
    assert rewritten.dims == spec.dims and rewritten.reduces
    for before, after in zip(spec.results, rewritten.results, strict=True):
        assert replace(after, value=before.value) == before
    x = rows(size)
    wide = x.astype(np.float64)
    center = wide - wide.mean(-1, keepdims=True)
    exact = (center * center).mean(-1, keepdims=True)
    found = evaluated(rewritten, x)
    assert np.isinf(found[3][5]).all(), "squares that overflow stay infinite"
    np.testing.assert_allclose(
        found[3][:5], np.broadcast_to(exact, x.shape)[:5], rtol=2e-4, atol=1e-12
    )
    for values in found[:3]:
        np.testing.assert_allclose(values[:5], (center / np.sqrt(exact + 1e-12))[:5], atol=2e-3)
    # the test's rows are such that the plain text is wrong
    plain = evaluated(spec, x)
    assert abs(plain[0][:5] - (center / np.sqrt(exact + 1e-12))[:5]).max() > 0.1


def test_programs_that_correct_their_variance_themselves() -> None:
    """The mean of their deviations is 0 then, and there is no further walk for them."""
    v = Values()
    c, _ = deviations(v, "div size")
    spread = variance(v, c)
    away = v.node("div", v.node("reduce_sum", v.node("cast", c)), v.add(SizeOf(F32, 1)))
    corrected = v.node("sub", spread, v.node("mul", away, away))
    spec = v.spec(size=64, rows=(corrected, away))
    rewritten = with_exact_centers(spec, True)
    assert not any(isinstance(each, Node) and each.op == "greater" for each in rewritten.values)
    x = rows(64)[:5]
    found, rest = evaluated(rewritten, x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(found[:, 0], wide.var(-1), rtol=2e-4, atol=1e-12)
    assert abs(rest).max() < 1e-6


def test_reductions_of_a_norm() -> None:
    """They walk corrected deviations."""
    v = Values()
    c, _ = deviations(v, "div size")
    norm = v.node("div", c, v.node("sqrt", v.node("add", variance(v, c), v.literal(1e-12))))
    top = v.node("reduce_max", norm)
    x = rows(64)[:5]
    wide = x.astype(np.float64)
    center = wide - wide.mean(-1, keepdims=True)
    expected = (center / np.sqrt(wide.var(-1, keepdims=True) + 1e-12)).max(-1)
    for conditional in (False, True):
        (found,) = evaluated(with_exact_centers(v.spec(rows=(top,)), conditional), x)
        np.testing.assert_allclose(found[:, 0], expected, atol=2e-3)


def test_two_norms_of_one_row() -> None:
    v = Values()
    c, _ = deviations(v, "div size")
    first = v.node("div", c, v.node("sqrt", variance(v, c)))
    shifted = v.node("add", first, v.literal(500.0))
    total = v.node("reduce_sum", shifted)
    again = v.node("sub", shifted, v.node("div", total, v.add(SizeOf(F32, 1))))
    second = v.node("div", again, v.node("sqrt", variance(v, again)))
    for conditional in (False, True):
        x = rows(64)[[0, 2, 3, 4]]
        (found,) = evaluated(with_exact_centers(v.spec(second, size=64), conditional), x)
        wide = x.astype(np.float64)
        expected = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
        np.testing.assert_allclose(found, expected, atol=1e-3)


def test_equal_leaves_of_two_arguments_stay_two() -> None:
    """Each is an argument of the kernel, in this order."""
    v = Values()
    c, _ = deviations(v, "div size")
    other = v.add(Leaf(F32, (M, 1)))
    third = v.add(Leaf(F32, (0, 1)))
    v.add(Leaf(F32, (1, 0)))
    spread = variance(v, c)
    spec = v.spec(v.node("add", third, v.node("mul", other, c)), size=64, rows=(spread,))
    leaves = [value for value in with_exact_centers(spec, False).values if isinstance(value, Leaf)]
    assert leaves == [Leaf(F32, (M, 1)), Leaf(F32, (M, 1)), Leaf(F32, (0, 1)), Leaf(F32, (1, 0))]


def test_products_with_a_corrected_center() -> None:
    """By a value of the row: two products, one of them once for the row. Others, and earlier ones, stay products."""

    def added(*names: str) -> tuple[int, int]:
        """The levels, and the multiply-adds of a value along the row, that a region has more with exact means."""
        v = Values()
        c, mean = deviations(v, "div size")
        spread = variance(v, c)
        results = {
            "by a row": v.node("mul", c, spread),
            "by an element": v.node("mul", v.add(Leaf(F32, (M, 1))), v.node("max", c, spread)),
            "by an element of the center": v.node("mul", c, v.node("add", 0, spread)),
            "of the sum": v.node("reduce_max", v.node("mul", c, mean)),
        }
        rows = [i for name, i in results.items() if name in names and name == "of the sum"]
        inner = [i for name, i in results.items() if name in names and i not in rows]
        spec = v.spec(*inner, size=M, rows=(spread, *rows))
        # without the values that no result needs
        rewritten = with_exact_centers(spec, False)
        needed, todo = set[int](), [result.value for result in rewritten.results]
        while todo:
            i = todo.pop()
            value = rewritten.values[i]
            if i not in needed and isinstance(value, Node):
                todo += value.args
            needed.add(i)
        products = [
            i
            for i in needed
            if isinstance(v := rewritten.values[i], Node) and v.op == "fma" and rewritten.inner[i]
        ]
        return max(rewritten.level[i] for i in needed), len(products)

    assert added() == (2, 0) and added("of the sum") == (2, 0)
    assert added("by a row") == (2, 1)
    assert added("by an element") == added("by an element of the center") == (2, 0)


def squares(spec: RegionSpec) -> bool:
    """Whether a region is rewritten, whatever its further walks."""
    found = [with_exact_centers(spec, conditional) is not spec for conditional in (False, True)]
    assert found[0] == found[1]
    return found[0]


def test_what_is_no_variance() -> None:
    """Other sums, other means, other squares: the region stays as it is."""

    def built(mean: Any, square: Any = lambda v, c: v.node("mul", c, c), **given: Any) -> bool:
        v = Values(given.get("dtype", F32))
        x = v.add(Leaf(v.dtype, (M, 1)))
        c = v.node(
            given.get("difference", "sub"), *given.get("order", lambda *both: both)(x, mean(v, x))
        )
        s = v.node(given.get("total", "reduce_sum"), square(v, c))
        return squares(v.spec(size=given.get("size", M), rows=(s,)))

    def by_size(v: Values, x: int) -> int:
        return v.node("div", v.node("reduce_sum", x), v.add(SizeOf(v.dtype, 1)))

    assert built(by_size) and built(by_size, dtype=F64) and built(by_size, dtype=BF16)
    assert not built(by_size, dtype=I32)
    assert not built(by_size, total="reduce_max") and not built(by_size, difference="add")
    assert not built(by_size, order=lambda x, mean: (mean, x))
    assert not built(by_size, square=lambda v, c: v.node("mul", c, v.node("abs", c)))
    assert not built(by_size, square=lambda v, c: v.node("mul", v.node("abs", c), c))
    assert not built(by_size, square=lambda v, c: v.node("add", c, c))
    assert not built(by_size, square=lambda v, c: c)
    # the mean of another value, and means of a maximum
    assert not built(lambda v, x: by_size(v, v.node("abs", x)))
    assert not built(lambda v, x: v.node("div", v.node("reduce_max", x), v.add(SizeOf(F32, 1))))
    # the size by the sum, and the sum times the size
    assert not built(lambda v, x: v.node("div", v.add(SizeOf(F32, 1)), v.node("reduce_sum", x)))
    assert not built(lambda v, x: v.node("mul", v.add(SizeOf(F32, 1)), v.node("reduce_sum", x)))
    assert not built(lambda v, x: v.node("mul", v.node("reduce_sum", x), v.add(SizeOf(F32, 1))))
    assert not built(lambda v, x: v.node("sub", v.node("reduce_sum", x), v.add(SizeOf(F32, 1))))
    assert not built(lambda v, x: v.node("div", v.node("reduce_sum", x), x))
    other = Leaf(F32, (1, 0))
    assert not built(lambda v, x: v.node("div", v.node("reduce_sum", x), v.add(other)), size=48)
    thirds = lambda v: v.node("div", v.literal(1.0), v.literal(3.0))  # noqa: E731
    assert not built(lambda v, x: v.node("mul", v.node("reduce_sum", x), thirds(v)))

    def part(v: Values, x: int, one: float = 1.0, op: str = "div", swap: bool = False) -> int:
        both = [v.literal(one), v.add(SizeOf(F32, 1))]
        return v.node("mul", v.node("reduce_sum", x), v.node(op, *both[:: -1 if swap else 1]))

    assert built(part)
    assert not built(lambda v, x: part(v, x, one=2.0)) and not built(
        lambda v, x: part(v, x, op="sub")
    )
    assert not built(lambda v, x: part(v, x, swap=True))
    assert not built(
        lambda v, x: v.node(
            "div", v.node("reduce_sum", x), v.node("div", v.literal(1.0), v.add(SizeOf(F32, 1)))
        )
    )


@pytest.mark.parametrize("op", ["div", "mul"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("size", "number", "is_mean"),
    [
        (48, 48, True), (48, 48 * (1 + 5e-7), True), (48, 48 * (1 + 2e-6), False), (48, 49, False), (1, 1, True),
        (M, 48, False), (0, 48, False),
    ],
)  # fmt: skip
def test_means_by_literals(op: str, swap: bool, size: Size, number: float, is_mean: bool) -> None:
    """Of a size that is known, up to the rounding of the literal."""
    v = Values()
    x = v.add(Leaf(F32, (M, 1)))
    both = [v.node("reduce_sum", x), v.literal(number if op == "div" else 1 / number)]
    c = v.node("sub", x, v.node(op, *both[:: -1 if swap else 1]))
    s = v.node("reduce_sum", v.node("mul", c, c))
    # x is read along an axis of one element as if it did not vary: no deviations
    expected = is_mean and size != 1 and not (op == "div" and swap)
    assert squares(v.spec(size=size, rows=(s,))) == expected


def test_deviations_of_other_walks() -> None:
    """Squares that are summed one walk later, and deviations that are the same along the row."""
    v = Values()
    c, _ = deviations(v, "div size")
    late = v.node("mul", c, c)
    top = v.node("reduce_max", c)
    scaled = v.node("sub", c, top)
    s = v.node("reduce_sum", v.node("mul", scaled, scaled))
    assert not squares(v.spec(size=M, rows=(s, top)))
    assert squares(v.spec(size=M, rows=(v.node("reduce_sum", late),)))
    v = Values()
    x = v.add(Leaf(F32, (1, 0)))
    c = v.node("sub", x, v.node("div", v.node("reduce_sum", x), v.add(SizeOf(F32, 1))))
    assert not squares(v.spec(size=M, rows=(v.node("reduce_sum", v.node("mul", c, c)),)))


def test_walks_that_may_be_added() -> None:
    """Not behind results that may lie in the memory of what is read again; see `test_in_place`."""

    def adds_a_walk(*names: str) -> bool:
        v = Values()
        c, mean = deviations(v, "div size")
        spread = variance(v, c)
        values = {
            "norm": v.node("div", c, v.node("sqrt", spread)),
            "early": v.node("abs", 0),
            "centered": c,
            "late": v.node("add", 0, v.node("reduce_max", v.node("mul", 0, mean))),
        }
        spec = v.spec(*[values[name] for name in names], size=M, rows=(spread,))
        rewritten = with_exact_centers(spec, True)
        return any(isinstance(value, Node) and value.op == "greater" for value in rewritten.values)

    assert adds_a_walk() and adds_a_walk("norm")
    assert not adds_a_walk("norm", "late") and not adds_a_walk("late")
    # results of two walks are never in place
    assert adds_a_walk("norm", "early") and adds_a_walk("norm", "early", "late")
    assert adds_a_walk("norm", "centered")
    wide = replace(Values().spec(), dims=(N, M))
    assert with_exact_centers(wide, True) is wide
