"""The typing rules of values: what arithmetic, comparisons and conversions give. The base of the frontend."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: what they are is what these functions find out

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from max.kernel.errors import Diagnostic, KernelError, KernelTypeError, KernelValueError
from max.kernel.frontend.builder import Builder
from max.kernel.ir.nodes import Atom, Const, Let, Ref
from max.kernel.types import (
    BOOL,
    INDEX,
    ScalarType,
    Type,
    arithmetic_dtype,
    common_dtype,
    f32,
    scalar,
    vector,
)

PYTHON_OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "pow": operator.pow,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
SYMBOLS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "floordiv": "//",
    "mod": "%",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "pow": "**",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_BITWISE = frozenset({"and", "or", "xor"})
_SHIFTS = frozenset({"shl", "shr"})


class Failure(Exception):
    """One error on its way to the statement that reports it."""

    def __init__(self, diagnostic: Diagnostic, kind: type[KernelError]) -> None:
        super().__init__(str(diagnostic))
        self.diagnostic = diagnostic
        self.kind = kind


class Suppressed(Exception):
    """A consequence of an error that was reported already."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotVar:
    """A variable that changes in a run-time loop: its value is in a slot."""

    slot: int
    type: Type
    weak: bool  # so far only literals were assigned
    owner: object  # the loop that needs the slot
    name: str


class Runtime:
    """The base of compile-time stand-ins for run-time things (views, tiles, the context)."""

    __slots__ = ()


def is_number(v: Any) -> bool:
    """Whether ``v`` is a Python number, whose type the other operand decides."""
    return isinstance(v, (int, float, np.number, np.bool_))


def plain_number(v: Any) -> Any:
    """A NumPy number as a Python number."""
    return v.item() if isinstance(v, np.generic) else v


def _is_atom(v: Any) -> bool:
    return isinstance(v, (Ref, Const))


def is_runtime(v: Any) -> bool:
    """Whether ``v`` is, or holds, something that is known only at run time."""
    if isinstance(v, (Ref, Const, Runtime, SlotVar)):
        return True
    if isinstance(v, (tuple, list)):
        return any(is_runtime(item) for item in v)
    return False


def is_record(v: Any) -> bool:
    """Whether ``v`` is a `typing.NamedTuple`, or the class of one: a tuple whose items have names."""
    kind = v if isinstance(v, type) else type(v)
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def tuple_like(v: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """The items as a tuple of the kind of ``v``: a record where ``v`` is one."""
    kind: Any = type(v)
    return kind._make(items) if is_record(v) else tuple(items)


def describe(v: Any) -> str:
    """A value's type, for errors."""
    if isinstance(v, (Ref, Const)):
        return v.type.describe()
    if isinstance(v, Runtime):
        return str(v)
    if isinstance(v, tuple):
        return f"a tuple of {len(v)}" if type(v) is tuple else f"a record {type(v).__name__}"
    return repr(v)


class Arithmetic:
    """Typed operations on atoms and literals."""

    def __init__(self) -> None:
        self.b = Builder()
        self.node: ast.AST = ast.Pass(lineno=1, col_offset=0)

    def fail(
        self, message: str, kind: type[KernelError] = KernelTypeError, node: ast.AST | None = None
    ) -> NoReturn:
        """Reports an error at ``node`` or at the node at hand."""
        raise NotImplementedError

    def guard(self, cond: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
        """Emits ``if not cond: raise``; the message gets the place in the source."""
        raise NotImplementedError

    def refuse(self, bad: Atom, exception: str, text: str, values: tuple[Atom, ...]) -> None:
        """Emits ``if bad: raise``; the message gets the place in the source."""
        raise NotImplementedError

    def active_lanes(self, width: int) -> Atom | None:
        """The mask of the vector loop's tail that is being compiled, where vectors have its width."""
        raise NotImplementedError

    # ***** types *****
    def type_of(self, v: Any) -> Type:
        """The type that a number or an atom has when it stands alone."""
        if isinstance(v, (Ref, Const)):
            return v.type
        v = plain_number(v)
        if isinstance(v, bool):
            return BOOL
        if isinstance(v, int):
            return INDEX
        if isinstance(v, float):
            return scalar(f32)
        self.fail(f"expected a number, got {describe(v)}")

    def unify(self, a: Type, a_weak: bool, b: Type, b_weak: bool) -> Type | None:
        """The type of a variable that takes values of both types, or None."""
        if a is b:
            return a
        if a_weak and not b_weak:
            a, b = b, a
            a_weak, b_weak = b_weak, a_weak
        if b_weak and not a_weak:  # a literal fits where its kind does
            fits = a.dtype.is_float or (
                b.dtype.kind != "f" and (a.dtype.kind == "b") == (b.dtype.kind == "b")
            )
            return a if fits else None
        if a_weak and b_weak:
            return scalar(f32) if {a.dtype.kind, b.dtype.kind} == {"i", "f"} else None
        dtype = common_dtype(a.dtype, b.dtype)
        if dtype is None or (a.width and b.width and a.width != b.width):
            return None
        return Type_of(dtype, max(a.width, b.width))

    # ***** conversions *****
    def literal(self, v: Any, type: Type) -> Const:
        """A Python number as a constant of ``type``."""
        v = plain_number(v)
        dtype = type.dtype
        if dtype.is_float:
            return self.b.const(float(v), type)
        if dtype.kind == "b":
            if not isinstance(v, (bool, int)):
                self.fail(f"a {dtype.name} cannot be {v!r}")
            return self.b.const(bool(v), type)
        if isinstance(v, float):
            if not math.isfinite(v) or v % 1 != 0:
                self.fail(
                    f"{v!r} is no {dtype.name}; convert the other operand with k.f32(...), or round the number"
                )
            v = int(v)
        low, high = (
            (-(1 << dtype.bits - 1), (1 << dtype.bits - 1))
            if dtype.kind == "i"
            else (0, 1 << dtype.bits)
        )
        if not low <= int(v) < high:
            self.fail(f"{v} does not fit into {dtype.name} ({low} … {high - 1})", KernelValueError)
        return self.b.const(int(v), type)

    def cast(self, v: Any, dtype: ScalarType, unchecked: bool = False) -> Atom:
        """Converts elements, as ``k.f32(x)`` does: floats round, floats to integers truncate and saturate."""
        if isinstance(v, SlotVar):
            v = self.b.read(v.slot, v.type)
        if not isinstance(v, (Ref, Const)):
            if not is_number(v):
                self.fail(f"cannot convert {describe(v)} to {dtype.name}")
            v = plain_number(v)
            if not dtype.is_float and isinstance(v, float):
                if not math.isfinite(v):
                    self.fail(f"{v!r} has no {dtype.name} value", KernelValueError)
                v = int(v)
            return self.literal(v, scalar(dtype))
        if v.type.dtype is dtype:
            return v
        if (
            isinstance(v, Const)
            and not isinstance(v.value, tuple)
            and dtype.is_float
            and v.type.dtype.is_float
        ):
            if v.type.dtype.bits <= dtype.bits:
                return self.b.const(v.value, v.type.with_dtype(dtype))
        return self.b.op("cast", (v,), v.type.with_dtype(dtype), "unchecked" if unchecked else None)

    def splat(self, v: Atom, width: int) -> Atom:
        """All lanes equal."""
        if isinstance(v, Const):
            return self.b.const(v.value, vector(v.type.dtype, width))
        return self.b.op("splat", (v,), vector(v.type.dtype, width))

    def coerce(self, v: Any, type: Type) -> Atom:
        """Converts a number or atom to ``type``; scalars fill vectors."""
        if isinstance(v, SlotVar):
            v = self.b.read(v.slot, v.type)
        if not isinstance(v, (Ref, Const)):
            if not is_number(v):
                self.fail(f"expected {type.describe()}, got {describe(v)}")
            return self.literal(v, type)
        if v.type is type:
            return v
        v = self.cast(v, type.dtype)
        if v.type.width == type.width:
            return v
        if v.type.width == 0:
            return self.splat(v, type.width)
        self.fail(f"expected {type.describe()}, got {v.type.describe()}")

    def as_index(self, v: Any) -> int | Atom:
        """An index: an int where it is known, else an ``i64`` scalar."""
        if isinstance(v, (int, np.integer)) and not isinstance(v, bool):
            return int(v)
        if isinstance(v, Const) and v.type.dtype.is_integer and v.type.width == 0:
            return int(v.value)
        if isinstance(v, Ref) and v.type.width == 0 and v.type.dtype.is_integer:
            return v if v.type is INDEX else self.b.op("cast", (v,), INDEX)
        self.fail(f"an index is an integer, got {describe(v)}")

    def widened(self, v: Any) -> Any:
        """The value as arithmetic takes it: bf16 and f16 as f32."""
        if isinstance(v, (Ref, Const)) and v.type.dtype.is_narrow_float:
            return self.cast(v, f32)
        return v

    def together(self, what: str, *values: Any) -> list[Atom]:
        """Operands of one type: literals take the type of the others, scalars fill vectors, smaller types widen."""
        dtype: ScalarType | None = None
        width = 0
        for v in values:
            if isinstance(v, (Ref, Const)):
                t = v.type
                if dtype is None:
                    dtype = t.dtype
                elif t.dtype is not dtype:
                    common = common_dtype(dtype, t.dtype)
                    if common is None:
                        self.mismatch(what, values)
                    dtype = common
                if t.width:
                    if width and width != t.width:
                        self.mismatch(what, values)
                    width = t.width
            elif not is_number(v):
                self.mismatch(what, values)
        if dtype is None:
            dtype = self.type_of(values[0]).dtype
            for v in values[1:]:
                if self.type_of(v).dtype.is_float:
                    dtype = f32
        if not dtype.is_float:
            for v in values:
                if isinstance(v, float):
                    self.fail(
                        f"{what}: {dtype.name} with the literal {v!r}; convert the integer, as in k.f32(x)"
                    )
        type = vector(dtype, width) if width else scalar(dtype)
        return [
            v if isinstance(v, (Ref, Const)) and v.type is type else self.coerce(v, type)
            for v in values
        ]

    def mismatch(self, what: str, values: tuple[Any, ...]) -> NoReturn:
        came = " and ".join(describe(v) for v in values)
        self.fail(
            f"{what} does not take {came}; equal types fit, or convert one of them, as in k.f32(x)"
        )

    # ***** operations *****
    def binary(self, op: str, a: Any, b: Any) -> Any:
        """A Python operator."""
        a_rt, b_rt = _is_atom(a), _is_atom(b)
        if not a_rt and not b_rt:
            return self._at_compile_time(op, a, b)
        a, b = plain_number(a), plain_number(b)
        symbol = SYMBOLS[op]
        if (a_rt and a.type.dtype.is_narrow_float) or (b_rt and b.type.dtype.is_narrow_float):
            a, b = self.widened(a), self.widened(b)
        if op == "pow":
            return self.power(a, b)
        if op in _SHIFTS:
            return self._shift(op, a, b)
        folded: Any = None
        if not b_rt and a.type.dtype.is_integer:
            folded = self._fold(op, a, b)
            if folded is not None:
                return folded
        elif not a_rt and op in ("add", "mul") and b.type.dtype.is_integer:
            folded = self._fold(op, b, a)
            if folded is not None:
                return folded
        x, y = self.together(f"'{symbol}'", a, b)
        dtype = x.type.dtype
        if op in COMPARISONS:
            return self.b.op(op, (x, y), x.type.with_dtype(BOOL.dtype))
        if op in _BITWISE:
            if dtype.is_float:
                self.fail(
                    f"'{symbol}' does not take {describe(a)} and {describe(b)}; integers or masks fit"
                )
            return self.b.op(op, (x, y), x.type)
        if dtype.kind == "b":
            self.fail(f"'{symbol}' does not take masks; convert them with k.cast or use k.select")
        if op == "div" and not dtype.is_float:
            self.fail(
                f"'/' does not take {describe(a)} and {describe(b)}; use '//', or convert with k.f32(...)"
            )
        if op in ("floordiv", "mod") and dtype.is_float:
            quotient = self.b.op("floor", (self.b.op("div", (x, y), x.type),), x.type)
            if op == "floordiv":
                return quotient
            return self.b.op("sub", (x, self.b.op("mul", (quotient, y), x.type)), x.type)
        if op in ("floordiv", "mod"):
            return self.integer_division(op, x, y)
        return self.b.op(op, (x, y), x.type)

    def integer_division(self, op: str, x: Atom, y: Atom) -> Atom:
        """``x // y`` or ``x % y`` of integers of one type."""
        raise NotImplementedError

    def _at_compile_time(self, op: str, a: Any, b: Any) -> Any:
        try:
            return PYTHON_OPS[op](a, b)
        except (TypeError, ValueError, ArithmeticError) as error:
            self.fail(f"'{SYMBOLS[op]}' on {describe(a)} and {describe(b)}: {error}")

    def _fold(self, op: str, a: Atom, b: Any) -> Any:
        """Identities on integers and divisions by powers of two."""
        if isinstance(b, bool) or not isinstance(b, int):
            return None
        if (b == 0 and op in ("add", "sub", "or", "xor")) or (b == 1 and op in ("mul", "floordiv")):
            return a
        if (
            op in ("floordiv", "mod")
            and b > 0
            and b & (b - 1) == 0
            and b.bit_length() < a.type.dtype.bits
        ):
            if op == "mod":
                return self.b.op("and", (a, self.literal(b - 1, a.type)), a.type)
            return self.b.op("shr", (a, self.literal(b.bit_length() - 1, a.type)), a.type)
        if op in ("floordiv", "mod") and b == 0:
            self.fail("division by zero", KernelValueError)
        return None

    def _shift(self, op: str, a: Any, b: Any) -> Atom:
        x, y = self.together(f"'{SYMBOLS[op]}'", a, b)
        if not x.type.dtype.is_integer:
            self.fail(
                f"'{SYMBOLS[op]}' does not take {describe(a)} and {describe(b)}; integers fit"
            )
        return self.b.op(op, (x, y), x.type)

    def power(self, a: Any, b: Any) -> Any:
        """``a ** b``: products where the exponent is a small known integer."""
        if (
            isinstance(b, int)
            and 0 <= b <= 16
            and isinstance(a, (Ref, Const))
            and a.type.dtype.kind != "b"
        ):
            result: Any = None
            square: Any = a
            while b:
                if b & 1:
                    result = square if result is None else self.binary("mul", result, square)
                b >>= 1
                if b:
                    square = self.binary("mul", square, square)
            return self.literal(1, a.type) if result is None else result
        return self.float_power(a, b)

    def float_power(self, a: Any, b: Any) -> Any:
        """``a ** b`` on floats."""
        raise NotImplementedError

    def unary(self, op: str, v: Any) -> Any:
        """``-x``, ``~x`` and ``+x``."""
        if not isinstance(v, (Ref, Const)):
            try:
                return {"neg": operator.neg, "not": operator.invert, "pos": operator.pos}[op](v)
            except TypeError as error:
                self.fail(str(error))
        v = self.widened(v)
        if op == "pos":
            return v
        if op == "not":
            if v.type.dtype.is_float:
                self.fail(f"'~' does not take {describe(v)}; integers or masks fit")
            return self.b.op("not", (v,), v.type)
        if v.type.dtype.kind == "b":
            self.fail("'-' does not take masks")
        return self.b.op("neg", (v,), v.type)

    def truth(self, v: Any) -> Any:
        """A condition: a Python bool, or a run-time ``bool`` scalar."""
        if isinstance(v, (Ref, Const)):
            if v.type.width:
                self.fail(
                    f"a condition is a scalar, got {describe(v)}; use k.select, k.any or k.all"
                )
            if v.type.dtype.kind != "b":
                return self.binary("ne", v, 0)
            return bool(v.value) if isinstance(v, Const) else v
        if isinstance(v, Runtime):
            self.fail(f"a condition is a bool, got {describe(v)}")
        return bool(v)


def Type_of(dtype: ScalarType, width: int) -> Type:
    """The interned type."""
    return vector(dtype, width) if width else scalar(dtype)


def is_pure(statements: list[Any]) -> bool:
    """Whether statements may run although their result is not needed."""
    traps = ("load", "masked_load", "gather", "masked_gather", "atomic_add", "floordiv", "mod")
    return all(isinstance(s, Let) and s.op not in traps for s in statements)


__all__ = [
    "Arithmetic",
    "Failure",
    "Runtime",
    "SlotVar",
    "Suppressed",
    "Type_of",
    "arithmetic_dtype",
]
