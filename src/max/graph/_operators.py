"""The operators that tensors of graphs and eager tensors share, and the op functions that methods of values call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, Self, TypeVar

__all__ = ["Operators", "bind_operations", "missing_method", "ops"]

Operand = TypeVar("Operand", contravariant=True)


class _Operations:
    """The functions of `max.graph.ops` that methods of values call; each is loaded when it is first called."""

    _load: Callable[[str], Any]

    def __getattr__(self, name: str) -> Any:
        function = self._load(name)
        setattr(self, name, function)
        return function


ops: Any = _Operations()


def bind_operations(load: Callable[[str], Any]) -> None:
    """Sets what loads an op by its name: ops import values, not the reverse.

    Args:
        load: Returns the function of `max.graph.ops` with this name.
    """
    ops._load = load


class Operators(Generic[Operand]):
    """Arithmetic, logic and comparison of tensors: each operator calls the op of its name.

    `Operand` is what the other side may be.
    """

    __slots__ = ()

    def _call(self, function: Callable[..., Any], *operands: Any) -> Self:
        """Calls an op. Here it is staged into the graph that is being built."""
        return function(*operands)

    def __neg__(self) -> Self:
        return self._call(ops.negate, self)

    def __abs__(self) -> Self:
        return self._call(ops.abs, self)

    def __invert__(self) -> Self:
        return self._call(ops.logical_not, self)

    def __add__(self, rhs: Operand) -> Self:
        return self._call(ops.add, self, rhs)

    def __radd__(self, lhs: Operand) -> Self:
        return self._call(ops.add, lhs, self)

    def __sub__(self, rhs: Operand) -> Self:
        return self._call(ops.sub, self, rhs)

    def __rsub__(self, lhs: Operand) -> Self:
        return self._call(ops.sub, lhs, self)

    def __mul__(self, rhs: Operand) -> Self:
        return self._call(ops.mul, self, rhs)

    def __rmul__(self, lhs: Operand) -> Self:
        return self._call(ops.mul, lhs, self)

    def __truediv__(self, rhs: Operand) -> Self:
        return self._call(ops.div, self, rhs)

    def __rtruediv__(self, lhs: Operand) -> Self:
        return self._call(ops.div, lhs, self)

    def __floordiv__(self, rhs: Operand) -> Self:
        return self._call(ops.floor_div, self, rhs)

    def __rfloordiv__(self, lhs: Operand) -> Self:
        return self._call(ops.floor_div, lhs, self)

    def __mod__(self, rhs: Operand) -> Self:
        return self._call(ops.mod, self, rhs)

    def __rmod__(self, lhs: Operand) -> Self:
        return self._call(ops.mod, lhs, self)

    def __divmod__(self, rhs: Operand) -> tuple[Self, Self]:
        return self // rhs, self % rhs

    def __rdivmod__(self, lhs: Operand) -> tuple[Self, Self]:
        return self.__rfloordiv__(lhs), self.__rmod__(lhs)

    def __pow__(self, rhs: Operand) -> Self:
        return self._call(ops.pow, self, rhs)

    def __rpow__(self, lhs: Operand) -> Self:
        return self._call(ops.pow, lhs, self)

    def __matmul__(self, rhs: Operand) -> Self:
        return self._call(ops.matmul, self, rhs)

    def __rmatmul__(self, lhs: Operand) -> Self:
        return self._call(ops.matmul, lhs, self)

    def __and__(self, rhs: Operand) -> Self:
        return self._call(ops.logical_and, self, rhs)

    def __rand__(self, lhs: Operand) -> Self:
        return self._call(ops.logical_and, lhs, self)

    def __or__(self, rhs: Operand) -> Self:
        return self._call(ops.logical_or, self, rhs)

    def __ror__(self, lhs: Operand) -> Self:
        return self._call(ops.logical_or, lhs, self)

    def __xor__(self, rhs: Operand) -> Self:
        return self._call(ops.logical_xor, self, rhs)

    def __rxor__(self, lhs: Operand) -> Self:
        return self._call(ops.logical_xor, lhs, self)

    def __lt__(self, rhs: Operand) -> Self:
        return self._call(ops.greater, rhs, self)

    def __le__(self, rhs: Operand) -> Self:
        return self._call(ops.greater_equal, rhs, self)

    def __gt__(self, rhs: Operand) -> Self:
        return self._call(ops.greater, self, rhs)

    def __ge__(self, rhs: Operand) -> Self:
        return self._call(ops.greater_equal, self, rhs)

    def __eq__(self, rhs: object) -> Self:  # type: ignore[override]
        return self._call(ops.equal, self, rhs)  # type: ignore[arg-type]

    def __ne__(self, rhs: object) -> Self:  # type: ignore[override]
        return self._call(ops.not_equal, self, rhs)  # type: ignore[arg-type]

    __hash__ = object.__hash__


def missing_method(value: object, name: str, module: str) -> AttributeError:
    """The error for an attribute that tensors lack: tensor methods of other libraries are functions here.

    Args:
        value: The tensor.
        name: The attribute.
        module: The module with the functions.
    """
    kind = type(value).__name__
    functions = import_module(module).__all__
    hint = f"; {module}.{name} is a function" if name in functions else ""
    return AttributeError(f"{kind!r} object has no attribute {name!r}{hint}", name=name, obj=value)
