"""The operators of dimension expressions, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import reduce

from max.mlir.dims import DimExpr

__all__ = ["POC"]


class POC(Enum):
    """The operators of dimension expressions."""

    add = "+"
    sub = "-"
    mul = "*"
    div = "//"

    def apply(self, operands: Iterable[DimExpr]) -> DimExpr:
        """Applies the operator to the operands, from left to right.

        Raises:
            ZeroDivisionError: A divisor is 0.
        """
        return reduce(_APPLY[self], operands)


_APPLY: dict[POC, Callable[[DimExpr, DimExpr], DimExpr]] = {
    POC.add: lambda x, y: x + y,
    POC.sub: lambda x, y: x - y,
    POC.mul: lambda x, y: x * y,
    POC.div: lambda x, y: x // y,
}
