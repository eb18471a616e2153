"""The compile-time values that a name in a kernel may hold, with stand-ins for values that exist only at run time."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from max._dataclass import dataclass
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language.source import FunctionSource
from max.kernel.types import Type

Index = int | Atom
"""An index or a size: a Python integer if it is known at compile time."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotVar:
    """A variable that changes in a run-time loop: its value is in a slot."""

    slot: int
    type: Type
    weak: bool  # so far only literals were assigned
    owner: object  # the loop that needs the slot
    name: str


class Runtime:
    """The base of compile-time stand-ins for run-time objects: views, tiles, the context."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Unbound:
    """A name without a value at this point, and the reason."""

    reason: str


class Poison:
    """The value of an expression whose error is already reported; it causes no further errors."""

    def __repr__(self) -> str:
        return "an erroneous value"


POISON = Poison()


@dataclass(frozen=True, slots=True, eq=False)
class Method(Runtime):
    """A method of a view or of the context, before it is called."""

    fn: Callable[..., Any]
    owner: Any

    def __str__(self) -> str:
        return "a method"


@dataclass(frozen=True, slots=True, eq=False)
class Closure(Runtime):
    """A function defined inside a kernel, or a lambda."""

    source: FunctionSource
    env: dict[str, Any]

    def __str__(self) -> str:
        return f"the function {self.source.name}"


@dataclass(frozen=True, slots=True)
class RangeValue:
    """``range(…)``: a run-time loop, unless it is unrolled."""

    start: Any
    stop: Any
    step: int

    def static(self) -> range | None:
        """The Python range if all bounds are known at compile time, else None."""
        bounds = (self.start, self.stop)
        return range(*bounds, self.step) if all(isinstance(v, int) for v in bounds) else None


@dataclass(frozen=True, slots=True, eq=False)
class ParallelValue(Runtime):
    """``ctx.parallel(shape, grain)``."""

    shape: tuple[Index, ...]
    grain: Index  # 0: chosen at run time
    scalar: bool  # the shape was one number: the index is one number too

    def __str__(self) -> str:
        return "a parallel loop"


@dataclass(frozen=True, slots=True, eq=False)
class ChunksValue(Runtime):
    """``ctx.chunks(n, grain, multiple)``."""

    total: Index
    grain: Index
    multiple: int

    def __str__(self) -> str:
        return "a parallel loop over chunks"


@dataclass(frozen=True, slots=True, eq=False)
class VectorsValue(Runtime):
    """``k.vectors(n, width)`` or ``k.vectors(start, stop, width)``."""

    start: Index
    stop: Index
    width: int

    def __str__(self) -> str:
        return "a loop over vectors"


@dataclass(frozen=True, slots=True, eq=False)
class ContextValue(Runtime):
    """The kernel's ``ctx`` parameter."""

    def __str__(self) -> str:
        return "the context"


def is_number(v: Any) -> bool:
    """Whether ``v`` is a Python number, which takes the dtype of the other operand."""
    return isinstance(v, (int, float, np.number, np.bool_))


def plain_number(v: Any) -> Any:
    """A NumPy number as a Python number."""
    return v.item() if isinstance(v, np.generic) else v


def is_runtime(v: Any) -> bool:
    """Whether ``v`` is, or contains, a value that exists only at run time."""
    if isinstance(v, (Ref, Const, Runtime, SlotVar)):
        return True
    if isinstance(v, (tuple, list)):
        return any(is_runtime(item) for item in v)
    return False


def is_record(v: Any) -> bool:
    """Whether ``v`` is a `typing.NamedTuple`, a tuple with named items, or a class of such tuples."""
    kind = v if isinstance(v, type) else type(v)
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def tuple_like(v: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """The items as a tuple, or as a record of the class of ``v`` if ``v`` is a record."""
    kind: Any = type(v)
    return kind._make(items) if is_record(v) else tuple(items)


def describe(v: Any) -> str:
    """The type of a value, for error messages."""
    if isinstance(v, (Ref, Const)):
        return v.type.describe()
    if isinstance(v, Runtime):
        return str(v)
    if isinstance(v, tuple):
        return f"a tuple of {len(v)}" if type(v) is tuple else f"a record {type(v).__name__}"
    return repr(v)
