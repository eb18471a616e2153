"""Shapes of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex, TypeGuard, cast, overload

from max import mlir
from max.graph.dim import Dim, DimLike, StaticDim, SymbolicDim
from max.mlir.dims import DimExpr

__all__ = ["Shape", "ShapeLike"]

ShapeLike = Iterable[DimLike]
"""What converts to a shape: an iterable of ints, names of symbols, and dimensions."""


class Shape(list[Dim]):
    """A list of dimensions. It compares equal to lists and tuples of equal ints, names or dimensions.

    Args:
        dims: The dimensions: ints, names of symbols, `Dim` objects.

    Raises:
        TypeError: An element is not a dimension.
    """

    def __init__(self, dims: ShapeLike = ()) -> None:
        try:
            iterator = iter(dims)
        except TypeError:
            raise TypeError(
                f"the shape is {dims!r}, expected a sequence of dimensions, such as (2, 'n')"
            ) from None
        super().__init__([d if isinstance(d, Dim) else Dim(d) for d in iterator])

    @classmethod
    def from_exprs(cls, exprs: Iterable[DimExpr]) -> Shape:
        """The shape of expressions of `max.mlir.dims`."""
        shape = cls.__new__(cls)
        super(Shape, shape).__init__([Dim.from_mlir(expr) for expr in exprs])
        return shape

    @property
    def exprs(self) -> tuple[DimExpr, ...]:
        """The dimensions as expressions of `max.mlir.dims`."""
        return tuple([dim.expr for dim in self])

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    @property
    def static_dims(self) -> list[int]:
        """The sizes of the static dimensions, without the others."""
        return [dim.dim for dim in self if isinstance(dim, StaticDim)]

    @property
    def parameters(self) -> Iterable[SymbolicDim]:
        """The symbolic dimensions on which the shape depends."""
        names = dict.fromkeys(name for dim in self for name in dim.expr.symbols)
        return [SymbolicDim(name) for name in names]

    @staticmethod
    def is_static(shape: Shape) -> TypeGuard[list[StaticDim]]:
        """Whether all dimensions of `shape` are static."""
        return all(isinstance(dim, StaticDim) for dim in shape)

    @classmethod
    def from_mlir(cls, attr: mlir.ShapeAttr) -> Shape:
        """The shape of an MLIR attribute."""
        return cls.from_exprs(attr.data)

    def to_mlir(self) -> mlir.ShapeAttr:
        """The MLIR attribute of the shape."""
        return mlir.ShapeAttr(self.exprs)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Dim: ...
    @overload
    def __getitem__(self, index: slice) -> Shape: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Dim | Shape:
        if isinstance(index, slice):
            return Shape(super().__getitem__(index))
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Shape:
        return Shape([*self, *other])

    def __radd__(self, other: Any) -> Shape:
        return Shape([*other, *self])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list | tuple):
            dims = cast("Sequence[object]", other)
            return len(self) == len(dims) and all(a == b for a, b in zip(self, dims, strict=True))
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        # the one of list would not ask `__eq__`
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    __hash__ = None  # type: ignore[assignment]
