"""Variances whose mean is exact, for normalizations that the compiler or a program spells out.

A mean in f32 is off by some units in the last place. If a row is nearly constant, this error is as large as its
deviations. The walk that sums their squares also sums the deviations, which gives the error of the mean::

    m = mean(x)              c = x - m                c' = c - error
    error = mean(c)          sum((x - mean)²) = sum(c²) - sum(c) * error

Later walks use c'. If rows can be walked once more, another walk sums the deviations, but only of rows that are nearly
constant: in other rows the error of the mean is far below the deviations.
"""

from __future__ import annotations

import math
from dataclasses import replace

from max._backends.regions import Leaf, Literal, Node, RegionSpec, SizeOf, Value
from max._compiler.codegen.values import cast_source
from max.dtype import DType

__all__ = ["with_exact_centers"]


NEAR = 16
"""A row is nearly constant if its squared mean is more than this times its variance. In other rows the error of the
mean is far below the deviations: at most 4.2 times the bound of the error of a sum of ones."""


def with_exact_centers(spec: RegionSpec, conditional: bool) -> RegionSpec:
    """The region with its variances around exact means.

    Args:
        spec: The region.
        conditional: Whether a further walk may correct the rows that are nearly constant, instead of the walk that sums
            the squares of all rows.
    """
    centers = {c: i for i in range(len(spec.values)) if (c := _center(spec, i)) is not None}
    if not centers:
        return spec
    if conditional and not _uses_deviations(spec, centers):
        corrected = _Rewrite(spec, centers, True).run()
        # the further walk reads the arguments after results that it does not correct were stored
        if _stores_last(corrected) or not _stores_last(spec):
            return corrected
    return _Rewrite(spec, centers, False).run()


def _stores_last(spec: RegionSpec) -> bool:
    """Whether only the last walk stores results along the axis. These may overwrite the arguments."""
    last = max(spec.level)
    return all(spec.level[r.value] == last for r in spec.results if r.strides[-1] != 0)


def _uses_deviations(spec: RegionSpec, centers: dict[int, int]) -> bool:
    """Whether a program uses the sum of the deviations from a mean itself."""
    return any(
        isinstance(value, Node)
        and value.op == "reduce_sum"
        and cast_source(spec, value.args[0]) in centers
        for value in spec.values
    )


def _node(spec: RegionSpec, i: int, op: str) -> Node | None:
    """The value that `i` is without casts that have no effect, if it is a node of `op`."""
    value = spec.values[cast_source(spec, i)]
    return value if isinstance(value, Node) and value.op == op else None


def _center(spec: RegionSpec, i: int) -> int | None:
    """The value c of a sum of squares ``reduce_sum(c * c)``, if c is ``x - mean(x)``."""
    total = spec.values[i]
    if not (isinstance(total, Node) and total.op == "reduce_sum" and total.dtype.is_float()):
        return None
    square = _node(spec, total.args[0], "mul")
    if square is None or len({cast_source(spec, a) for a in square.args}) != 1:
        return None
    c = cast_source(spec, square.args[0])
    difference = _node(spec, c, "sub")
    if difference is None or not spec.inner[c]:
        return None
    x, mean = difference.args
    return c if _is_mean(spec, cast_source(spec, x), mean) else None


def _is_mean(spec: RegionSpec, x: int, i: int) -> bool:
    """Whether a value is the mean of `x`: its sum divided by the size, or times the inverse of the size."""
    for op in ("div", "mul"):
        node = _node(spec, i, op)
        if node is None:
            continue
        for first, second in (node.args, node.args[::-1]):
            total = _node(spec, first, "reduce_sum")
            if total is None or cast_source(spec, total.args[0]) != x:
                continue
            factor = spec.values[cast_source(spec, second)]
            size = spec.dims[-1]
            if op == "mul" and _is_inverse_size(spec, second):
                return True
            if isinstance(factor, SizeOf):
                return op == "div" and first == node.args[0]
            if isinstance(factor, Literal) and isinstance(size, int) and size:
                expected = float(size) if op == "div" else 1 / size
                # the literal may have been rounded to f32
                near = math.isclose(float(factor.value), expected, rel_tol=1e-6)
                return near and (op == "mul" or first == node.args[0])
    return False


def _is_inverse_size(spec: RegionSpec, i: int) -> bool:
    """Whether a value is 1 divided by the size of the axis."""
    node = _node(spec, i, "div")
    if node is None:
        return False
    one, size = (spec.values[cast_source(spec, a)] for a in node.args)
    return isinstance(one, Literal) and one.value == 1 and isinstance(size, SizeOf)


class _Rewrite:
    """Copies the values of a region.

    Args:
        spec: The region.
        centers: For each value ``x - mean(x)``, the sum of its squares.
        conditional: Whether only rows that are nearly constant are corrected.
    """

    def __init__(self, spec: RegionSpec, centers: dict[int, int], conditional: bool) -> None:
        self.spec = spec
        self.centers = centers
        self.conditional = conditional
        self.values: list[Value] = []
        self.number_of: dict[Node | Literal | SizeOf, int] = {}
        self.copies: dict[tuple[int, int], int] = {}
        """A value, and the walk that uses it, to its copy."""
        self.errors: dict[int, tuple[int, int]] = {}
        """For each center, the sum of its values, and their mean."""

    def run(self) -> RegionSpec:
        spec = self.spec
        # all of them, in their order: each leaf is an argument of the kernel
        for i, level in enumerate(spec.level):
            self.copy(i, level)
        results = tuple(
            replace(result, value=self.copy(result.value, spec.level[result.value]))
            for result in spec.results
        )
        return RegionSpec(spec.dims, spec.reduces, tuple(self.values), results)

    def add(self, value: Value) -> int:
        """The number of a copy; equal leaves of different arguments stay different."""
        self.values.append(value)
        return len(self.values) - 1

    def number_of_value(self, value: Node | Literal | SizeOf) -> int:
        """The number of a value that equals no leaf."""
        if value not in self.number_of:
            self.number_of[value] = self.add(value)
        return self.number_of[value]

    def node(self, op: str, args: tuple[int, ...], like: Node) -> int:
        return self.number_of_value(Node(op, args, like.dtype))

    def copy(self, i: int, walk: int) -> int:
        """The number of the copy of a value for a walk after that many reductions."""
        value = self.spec.values[i]
        if not isinstance(value, Node) or not self.spec.inner[i]:
            # what does not vary along the axis is the same for all walks; a reduction has the walk before its level
            walk = self.spec.level[i] - 1
        key = (i, walk)
        if key not in self.copies:
            self.copies[key] = self.copy_value(i, value, walk)
        return self.copies[key]

    def copy_value(self, i: int, value: Value, walk: int) -> int:
        if isinstance(value, Leaf):
            return self.add(value)
        if not isinstance(value, Node):
            return self.number_of_value(value)
        if value.op == "mul" and (scaled := self.scaled_center(value, walk)) is not None:
            return scaled
        args = tuple(self.copy(a, walk) for a in value.args)
        number = self.number_of_value(Node(value.op, args, value.dtype, value.attr))
        # later walks use the corrected center
        if i in self.centers and walk > self.spec.level[i]:
            _, error = self.error(i)
            return self.node("sub", (number, error), value)
        center = cast_source(self.spec, value.args[0])
        if value.op == "reduce_sum" and center in self.centers:
            # a program that corrects its variance itself finds nothing left
            total, error = self.error(center)
            size = self.number_of_value(SizeOf(value.dtype, len(self.spec.dims) - 1))
            return self.node("sub", (total, self.node("mul", (error, size), value)), value)
        for center, squares in self.centers.items():
            if squares == i:
                return self.around_mean(number, center, value)
        return number

    def scaled_center(self, value: Node, walk: int) -> int | None:
        """A corrected center times a value of the row, ``(c - error) * r``, as ``c * r - error * r``.

        The second product is computed once. None for other products.
        """
        for center, factor in (value.args, value.args[::-1]):
            level = self.spec.level[center]
            if center in self.centers and walk > level and not self.spec.inner[factor]:
                node = self.spec.values[center]
                assert isinstance(node, Node)
                if node.dtype is not value.dtype:
                    return None
                args = tuple(self.copy(a, walk) for a in node.args)
                plain = self.number_of_value(Node(node.op, args, node.dtype, node.attr))
                by = self.copy(factor, walk)
                _, error = self.error(center)
                away = self.node("neg", (self.node("mul", (error, by), value),), value)
                return self.node("fma", (plain, by, away), value)
        return None

    def error(self, center: int) -> tuple[int, int]:
        """The sum of a center's values, and their mean: the error of the mean that was subtracted."""
        if center not in self.errors:
            node = self.spec.values[center]
            assert isinstance(node, Node)
            addend = self.copy(center, self.spec.level[center])
            condition = (self.is_nearly_constant(center, node),) if self.conditional else ()
            total = self.node("reduce_sum", (addend, *condition), node)
            size = self.number_of_value(SizeOf(node.dtype, len(self.spec.dims) - 1))
            part = self.node("div", (self.number_of_value(Literal(node.dtype, 1.0)), size), node)
            error = self.node("mul", (total, part), node)
            if condition:
                none = self.number_of_value(Literal(node.dtype, 0.0))
                error = self.node("select", (*condition, error, none), node)
            self.errors[center] = total, error
        return self.errors[center]

    def is_nearly_constant(self, center: int, like: Node) -> int:
        """Whether a row's deviations from its mean are much smaller than the mean; false if their squares overflow."""
        walk = self.spec.level[center]
        squares = self.plain_squares(center)
        node = self.spec.values[center]
        assert isinstance(node, Node)
        mean = self.copy(node.args[1], walk)
        size = self.number_of_value(SizeOf(like.dtype, len(self.spec.dims) - 1))
        share = self.node("mul", (size, self.number_of_value(Literal(like.dtype, 1 / NEAR))), like)
        level = self.node("mul", (self.node("mul", (mean, mean), like), share), like)
        return self.number_of_value(Node("greater", (level, squares), DType.bool))

    def plain_squares(self, center: int) -> int:
        """The copy of a sum of squares of deviations from the mean in f32."""
        total = self.spec.values[self.centers[center]]
        assert isinstance(total, Node)
        argument = self.copy(total.args[0], self.spec.level[center])
        return self.number_of_value(Node(total.op, (argument,), total.dtype, total.attr))

    def around_mean(self, squares: int, center: int, like: Node) -> int:
        """A sum of squared deviations from a mean with an error, as that from the exact mean."""
        total, error = self.error(center)
        # sum(c²) - sum(c) * error
        exact = self.node("fma", (self.node("neg", (total,), like), error, squares), like)
        # all deviations may be the error, up to rounding
        exact = self.node("max", (exact, self.number_of_value(Literal(like.dtype, 0.0))), like)
        if self.conditional:
            condition = self.is_nearly_constant(center, like)
            return self.node("select", (condition, exact, squares), like)
        # squares that overflow stay infinite
        infinite = self.number_of_value(Node("is_inf", (squares,), DType.bool))
        return self.node("select", (infinite, squares, exact), like)
