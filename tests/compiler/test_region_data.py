"""A region as plain data: on what each value depends, and the views of its tensors."""

from __future__ import annotations

import pytest

from max._backends.regions import ArgView, Leaf, Literal, Node, RegionSpec, Result, SizeOf
from max.dtype import DType
from max.mlir import DimExpr

F32, I32 = DType.float32, DType.int32
N = DimExpr.symbol("n")


def softmax() -> RegionSpec:
    """exp(x - max(x) + bias) / sum of these, by the size of the axis."""
    values = (
        Leaf(F32, (8, 1)),
        Node("reduce_max", (0,), F32),
        Node("sub", (0, 1), F32),
        Leaf(F32, (1, 0)),
        Node("add", (2, 3), F32),
        Node("reduce_sum", (4,), F32),
        Node("div", (4, 5), F32),
        Literal(F32, 2.0),
        SizeOf(F32, 1),
        Node("mul", (7, 8), F32),
        Node("add", (5, 9), F32),
    )
    return RegionSpec((N, 8), True, values, (Result(6, F32, (8, 1)),))


def test_what_varies_along_the_last_axis() -> None:
    spec = softmax()
    assert spec.inner == (
        True, False, True, False, True, False, True, False, False, False, False,
    )  # fmt: skip
    # reductions that must end before a value, one after the other
    assert spec.level == (0, 1, 1, 0, 1, 2, 2, 0, 0, 0, 2)
    assert spec.size == N * 8
    scalar = RegionSpec((), False, (Leaf(F32, ()),), (Result(0, F32, ()),))
    assert scalar.inner == (False,) and scalar.size == 1


@pytest.mark.parametrize("op", ["reduce_sum", "reduce_max", "reduce_min", "reduce_mul"])
def test_a_reduction_ends_before_its_users(op: str) -> None:
    values = (Leaf(F32, (1,)), Node(op, (0,), F32), Node("add", (0, 1), F32))
    spec = RegionSpec((N,), True, values, (Result(2, F32, (1,)),))
    assert (spec.inner, spec.level) == ((True, False, True), (0, 1, 1))


def test_nothing_varies_along_an_axis_of_size_1() -> None:
    leaf, result = Leaf(F32, (8, 8, 1)), Result(1, F32, (8, 8, 1))
    values = (leaf, Node("neg", (0,), F32), Literal(F32, 1.0))
    spec = RegionSpec((N, 1, 8), False, values, (result,))
    assert spec.values[0] == Leaf(F32, (8, 0, 1)) and spec.results[0].strides == (8, 0, 1)
    assert spec.values[1:] == values[1:] and spec.inner == (True, True, False)
    last = RegionSpec((N, 1), False, (Leaf(F32, (1, 1)),), (Result(0, F32, (1, 1)),))
    assert last.values[0] == Leaf(F32, (1, 0)) and last.inner == (False,)


def test_views_of_arguments() -> None:
    """With strides only where the elements do not follow one another."""
    spec = RegionSpec((N, 4, 8), False, (Leaf(F32, (32, 8, 1)),), (Result(0, I32, (32, 8, 1)),))
    assert ArgView.of(spec, I32, (32, 8, 1), (0, 1, 2)) == ArgView(I32, (N, 4, 8), None)
    assert ArgView.of(spec, F32, (8, 0, 1), (0, 2)) == ArgView(F32, (N, 8), None)
    assert ArgView.of(spec, F32, (64, 8, 2), (0, 2)) == ArgView(F32, (N, 8), (64, 2))
    assert ArgView.of(spec, F32, (0, 0, 0), ()) == ArgView(F32, (1,), None)
