"""Conditions over dimensions that must hold at run time, such as bounds of slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from max._dataclass import dataclass
from max.mlir.dims import DimExpr, FloorDiv, may_be_negative

__all__ = ["MOST_ELEMENTS", "Condition", "count_conditions", "first_unmet", "size_conditions"]

MOST_ELEMENTS = 1 << 44
"""The maximum number of elements of a result, also of one that is never in memory: hours of work. Scores of attention
over a context of 2**19 tokens with 64 heads have as many."""
_PLAUSIBLE_SIZE = 1 << 20
"""A result that has `MOST_ELEMENTS` or fewer if all symbols have this value has no condition."""


@dataclass(frozen=True, slots=True)
class Condition:
    """``actual >= required``, or ``actual == required`` if `exact`, over the sizes of one execution.

    Args:
        actual: The left side: the actual size.
        required: The right side: the required size.
        message: The start of the error message: the op's name and the fault, without a period.
        exact: Whether both sides must be equal.
    """

    actual: DimExpr
    required: DimExpr
    message: str
    exact: bool = False

    @staticmethod
    def at_least(actual: DimExpr, required: DimExpr | int, message: str) -> Condition:
        """``actual >= required``, with negative terms moved to the right: ``n - 5 >= 0`` becomes ``n >= 5``."""
        difference = actual - required
        positive = {m: c for m, c in difference.terms if c > 0}
        left = DimExpr.from_terms(positive)
        return Condition(left, left - difference, message)

    @staticmethod
    def equal(actual: DimExpr, required: DimExpr, message: str) -> Condition:
        """``actual == required``."""
        return Condition(actual, required, message, exact=True)

    @property
    def always_holds(self) -> bool:
        """Whether the condition is proved for all non-negative sizes of the symbols."""
        return self.actual == self.required or (
            not self.exact and not may_be_negative(self.actual - self.required)
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols of both sides."""
        return tuple(dict.fromkeys((*self.actual.symbols, *self.required.symbols)))

    def holds(self, actual: int, required: int) -> bool:
        """Evaluates the condition for values of both sides."""
        return actual == required if self.exact else actual >= required

    def text(self, actual: int, required: int) -> str:
        """The error message for values that violate the condition: the actual and the required size."""
        # only the required side has symbols: the message is about them
        if self.actual.is_static and not self.exact and not self.required.is_static:
            return f"{self.message}: {self.required} is {required}, expected at most {actual}"
        left = str(self.actual) if self.actual.is_static else f"{self.actual} is {actual}"
        right = (
            str(self.required)
            if self.required.is_static
            else f"{self.required}, which is {required}"
        )
        return f"{self.message}: {left}, expected {'' if self.exact else 'at least '}{right}"


def first_unmet(conditions: Iterable[Condition], sizes: Mapping[str, int]) -> str | None:
    """The message of the first violated condition, or None. Conditions over unbound symbols are skipped."""
    for condition in conditions:
        if all(name in sizes for name in condition.symbols):
            actual, required = condition.actual.evaluate(sizes), condition.required.evaluate(sizes)
            if not condition.holds(actual, required):
                return condition.text(actual, required)
    return None


def size_conditions(op: str, shape: Sequence[DimExpr]) -> list[Condition]:
    """The conditions for valid sizes of a result: no dimension is negative or divides by 0.

    Args:
        op: The op's name, for messages.
        shape: The dimensions of the result.
    """
    conditions: list[Condition] = []
    for axis, dim in enumerate(shape):
        if dim.is_static:
            continue
        message = f"{op}: axis {axis} of the result has size {dim}"
        conditions += [
            Condition.at_least(divisor, 1, f"{message}, which divides by {divisor}")
            for divisor in _divisors(dim)
        ]
        if may_be_negative(dim):
            conditions.append(Condition.at_least(dim, 0, f"{message}, which must not be negative"))
    return conditions


def count_conditions(
    op: str, shape: Sequence[DimExpr], operands: Iterable[Sequence[DimExpr]]
) -> list[Condition]:
    """The condition that a result has no more than `MOST_ELEMENTS` elements.

    There is none where symbols of plausible values do not exceed it, and where an operand has as many elements.

    Args:
        op: The op's name, for messages.
        shape: The dimensions of the result.
        operands: The dimensions of the operands.
    """
    symbols = {name for dim in shape if not dim.is_static for name in dim.symbols}
    if not symbols:
        return []
    sizes = dict.fromkeys(symbols, _PLAUSIBLE_SIZE)
    try:
        if math.prod([dim.evaluate(sizes) for dim in shape]) <= MOST_ELEMENTS:
            return []
    except ZeroDivisionError:
        pass  # a quotient by a difference of symbols
    count = _count(shape)
    # as many elements are in memory already
    if any(_count(other) == count for other in operands):
        return []
    message = f"{op}: the number of elements of the result"
    return [Condition(DimExpr.constant(MOST_ELEMENTS), count, message)]


def _count(shape: Sequence[DimExpr]) -> DimExpr:
    count = DimExpr.constant(1)
    for dim in shape:
        count = count * dim
    return count


def _divisors(expr: DimExpr) -> list[DimExpr]:
    """The symbolic denominators in an expression, inner ones first."""
    denominators: list[DimExpr] = []
    for monomial, _ in expr.terms:
        for atom, _ in monomial:
            if isinstance(atom, FloorDiv):
                # inner ones first: the outer division is checked over values that exist
                denominators += [*_divisors(atom.numerator), *_divisors(atom.denominator)]
                if not atom.denominator.is_static:
                    denominators.append(atom.denominator)
    return denominators
