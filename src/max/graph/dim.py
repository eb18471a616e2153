"""Dimensions of tensors: static, symbolic, and expressions over symbols."""

# `Dim.__new__` is a conversion, so module functions build instances and read `_expr`
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import reduce
from typing import Any, cast

import numpy as np

from max import mlir
from max._host.process_caches import cached_results
from max.mlir.dims import DimExpr

__all__ = ["AlgebraicDim", "Dim", "DimLike", "StaticDim", "SymbolicDim"]

_LIMIT = 1 << 63


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


class Dim:
    """A dimension of a tensor: a `StaticDim`, a `SymbolicDim` or an `AlgebraicDim`.

    ``Dim(10)``, ``Dim("batch")`` and ``Dim("batch") * 2`` are one of each. ``+``, ``-``, ``*`` and ``//`` accept
    dimensions and ints. Results are in canonical form, so that equal expressions are equal dimensions::

        Dim("a") * 2 + Dim("a") == Dim("a") * 3

    A static dimension equals and hashes as its int, a symbolic one as its name.

    Args:
        value: An int, the name of a symbol, or a dimension, which is returned unchanged.

    Raises:
        TypeError: The value is none of these.
        ValueError: The name is not an identifier, or the int does not fit 64 bits.
    """

    __slots__ = ("_expr",)

    _expr: DimExpr

    def __new__(cls, value: DimLike) -> Dim:
        return _to_dim(value)

    @staticmethod
    def from_mlir(attr: mlir.DimAttr | DimExpr) -> Dim:
        """The dimension of an MLIR attribute."""
        return _from_expr(attr if isinstance(attr, DimExpr) else attr.data)

    def to_mlir(self) -> mlir.DimAttr:
        """The MLIR attribute of the dimension."""
        return mlir.DimAttr(self._expr)

    @property
    def expr(self) -> DimExpr:
        """The dimension as an expression of `max.mlir.dims`."""
        return self._expr

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dimensions on which this one depends."""
        return [SymbolicDim(name) for name in self._expr.symbols]

    def substitute(self, mapping: Mapping[str, DimLike]) -> Dim:
        """The dimension with other dimensions for some of its symbols.

        Args:
            mapping: The dimensions by the names of the symbols; other symbols stay.
        """
        return _from_expr(
            self._expr.substitute({name: _to_dim(dim)._expr for name, dim in mapping.items()})
        )

    def __add__(self, other: DimLike) -> Dim:
        return _arithmetic(self, other, POC.add)

    def __radd__(self, other: DimLike) -> Dim:
        return _arithmetic(other, self, POC.add)

    def __sub__(self, other: DimLike) -> Dim:
        return _arithmetic(self, other, POC.sub)

    def __rsub__(self, other: DimLike) -> Dim:
        return _arithmetic(other, self, POC.sub)

    def __mul__(self, other: DimLike) -> Dim:
        return _arithmetic(self, other, POC.mul)

    def __rmul__(self, other: DimLike) -> Dim:
        return _arithmetic(other, self, POC.mul)

    def __floordiv__(self, other: DimLike) -> Dim:
        return _arithmetic(self, other, POC.div)

    def __rfloordiv__(self, other: DimLike) -> Dim:
        return _arithmetic(other, self, POC.div)

    def __neg__(self) -> Dim:
        return _from_expr(-self._expr)

    def __int__(self) -> int:
        raise TypeError(f"dimension {self} is not static, it has no int value")

    def __index__(self) -> int:
        return int(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim):
            return self._expr == other._expr
        if isinstance(other, int | np.integer):
            return self._expr == int(cast(int, other))
        if isinstance(other, str):
            return self._expr.symbol_name == other
        return NotImplemented

    def __hash__(self) -> int:
        # equal objects: a symbol hashes as its name, a static dimension as its int
        return hash(self._expr.symbol_name or self._expr)

    def __str__(self) -> str:
        return self._expr.text()

    def __repr__(self) -> str:
        return f"Dim({self._expr.text()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dim.from_mlir, (self._expr,))


DimLike = int | str | Dim | np.integer[Any]
"""What converts to a dimension: an int, the name of a symbol, or a dimension."""


class StaticDim(Dim):
    """A dimension of constant size. It is ordered with ints and converts to one with ``int``.

    Args:
        dim: The size.
    """

    __slots__ = ()

    def __new__(cls, dim: DimLike) -> StaticDim:
        result = _to_dim(dim)
        if not isinstance(result, StaticDim):
            raise TypeError(f"StaticDim({dim!r}): expected an int")
        return result

    @property
    def dim(self) -> int:
        """The size of the dimension."""
        return self._expr.value

    @staticmethod
    def from_mlir(attr: mlir.DimAttr | DimExpr) -> Dim:
        """The dimension of an MLIR attribute."""
        return Dim.from_mlir(attr)

    def __int__(self) -> int:
        return self._expr.value

    def __lt__(self, other: int | StaticDim) -> bool:
        return int(self) < int(other)

    def __le__(self, other: int | StaticDim) -> bool:
        return int(self) <= int(other)

    def __gt__(self, other: int | StaticDim) -> bool:
        return int(self) > int(other)

    def __ge__(self, other: int | StaticDim) -> bool:
        return int(self) >= int(other)

    def __repr__(self) -> str:
        return f"Dim({self._expr.value})"


class SymbolicDim(Dim):
    """A dimension whose size is known only when the graph runs, denoted by a name.

    Args:
        name: The name: a letter or ``_``, then letters, digits and ``_``.
    """

    __slots__ = ()

    def __new__(cls, name: DimLike) -> SymbolicDim:
        result = _to_dim(name)
        if not isinstance(result, SymbolicDim):
            raise TypeError(f"SymbolicDim({name!r}): expected the name of a symbol")
        return result

    @property
    def name(self) -> str:
        """The name of the dimension."""
        name = self._expr.symbol_name
        assert name is not None
        return name

    @staticmethod
    def from_mlir(attr: mlir.DimAttr | DimExpr) -> Dim:
        """The dimension of an MLIR attribute."""
        return Dim.from_mlir(attr)


class AlgebraicDim(Dim):
    """An expression over symbolic dimensions, such as ``Dim("batch") * 5``.

    Args:
        attr: An MLIR attribute, or anything that converts to a dimension.
    """

    __slots__ = ()

    def __new__(cls, attr: DimLike | mlir.DimAttr | DimExpr) -> Dim:
        if isinstance(attr, mlir.DimAttr | DimExpr):
            return Dim.from_mlir(attr)
        return _to_dim(attr)

    @classmethod
    def apply(cls, op: POC, *operands: DimLike) -> Dim:
        """Applies an operator to dimensions, from left to right.

        Args:
            op: The operator.
            operands: One dimension or more.

        Raises:
            ValueError: No operands.
            ZeroDivisionError: A divisor is 0.
        """
        if not operands:
            raise ValueError("AlgebraicDim.apply: expected at least one operand")
        return _from_expr(op.apply([_to_dim(operand)._expr for operand in operands]))

    @property
    def attr(self) -> mlir.DimAttr:
        """The MLIR attribute of the expression."""
        return mlir.DimAttr(self._expr)

    @staticmethod
    def from_mlir(attr: mlir.DimAttr | DimExpr) -> Dim:
        """The dimension of an MLIR attribute."""
        return Dim.from_mlir(attr)


def _make(cls: type[Dim], expr: DimExpr) -> Dim:
    dim = object.__new__(cls)
    dim._expr = expr
    return dim


@cached_results(8192)
def _from_expr(expr: DimExpr) -> Dim:
    if expr.is_static:
        if not -_LIMIT <= expr.value < _LIMIT:
            raise ValueError(f"dimension {expr} does not fit a signed 64-bit integer")
        return _make(StaticDim, expr)
    return _make(AlgebraicDim if expr.symbol_name is None else SymbolicDim, expr)


def _to_dim(value: object) -> Dim:
    if isinstance(value, Dim):
        return value
    if isinstance(value, str):
        return _from_expr(DimExpr.symbol(value))
    # a bool is an int, but no size
    if isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_):
        return _from_expr(DimExpr.constant(int(cast(int, value))))
    raise TypeError(
        f"{value!r} of type {type(value).__name__} is not a dimension; expected an int, the name "
        "of a symbol or a Dim"
    )


def _arithmetic(x: object, y: object, op: POC) -> Dim:
    try:
        operands = [_to_dim(x)._expr, _to_dim(y)._expr]
    except TypeError:
        return NotImplemented
    return _from_expr(op.apply(operands))
