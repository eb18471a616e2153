"""Operators: arithmetic, comparisons, shifts and truth of compile-time numbers and atoms."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from max.kernel.errors import KernelValueError
from max.kernel.frontend.conversions import literal, promote_together, widen_floats
from max.kernel.frontend.division import divide
from max.kernel.frontend.inlining import call_inline
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import Runtime, describe, plain_number
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language import mathlib
from max.kernel.language.limits import MAX_INT_BITS, MAX_UNROLL
from max.kernel.types import BOOL

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


def _is_atom(v: Any) -> bool:
    return isinstance(v, (Ref, Const))


# ***** operations *****
def binary(fe: Frontend, op: str, a: Any, b: Any) -> Any:
    """Evaluates a Python operator: at compile time if both operands are known, else as an op of the IR."""
    a_rt, b_rt = _is_atom(a), _is_atom(b)
    if not a_rt and not b_rt:
        return at_compile_time(fe, op, a, b)
    a, b = plain_number(a), plain_number(b)
    symbol = SYMBOLS[op]
    # narrow floats have no arithmetic of their own
    if (a_rt and a.type.dtype.is_narrow_float) or (b_rt and b.type.dtype.is_narrow_float):
        a, b = widen_floats(fe, a), widen_floats(fe, b)
    if op == "pow":
        return power(fe, a, b)
    if op in _SHIFTS:
        return _shift(fe, op, a, b)
    folded: Any = None
    if not b_rt and a.type.dtype.is_integer:
        folded = _fold(fe, op, a, b)
        if folded is not None:
            return folded
    # these two commute: the literal may stand on the left
    elif not a_rt and op in ("add", "mul") and b.type.dtype.is_integer:
        folded = _fold(fe, op, b, a)
        if folded is not None:
            return folded
    x, y = promote_together(fe, f"'{symbol}'", a, b)
    dtype = x.type.dtype
    if op in COMPARISONS:
        return fe.b.op(op, (x, y), x.type.with_dtype(BOOL.dtype))
    if op in _BITWISE:
        if dtype.is_float:
            fe.fail(
                f"'{symbol}' does not take {describe(a)} and {describe(b)}; integers or masks fit"
            )
        return fe.b.op(op, (x, y), x.type)
    if dtype.kind == "b":
        fe.fail(f"'{symbol}' does not take masks; convert them with k.cast or use k.select")
    if op == "div" and not dtype.is_float:
        fe.fail(
            f"'/' does not take {describe(a)} and {describe(b)}; use '//', or convert with k.f32(...)"
        )
    if op in ("floordiv", "mod") and dtype.is_float:
        # as in Python: the quotient is rounded down, the remainder has the sign of the divisor
        quotient = fe.b.op("floor", (fe.b.op("div", (x, y), x.type),), x.type)
        if op == "floordiv":
            return quotient
        return fe.b.op("sub", (x, fe.b.op("mul", (quotient, y), x.type)), x.type)
    if op in ("floordiv", "mod"):
        return divide(fe, op, x, y)
    return fe.b.op(op, (x, y), x.type)


def at_compile_time(fe: Frontend, op: str, a: Any, b: Any) -> Any:
    """Applies a Python operator to values known at compile time."""
    _check_size(fe, op, a, b)
    try:
        return PYTHON_OPS[op](a, b)
    except ZeroDivisionError:
        fe.fail("division by zero", KernelValueError)
    except (TypeError, ValueError, ArithmeticError) as error:
        fe.fail(f"'{SYMBOLS[op]}' on {describe(a)} and {describe(b)}: {error}")


def _check_size(fe: Frontend, op: str, a: Any, b: Any) -> None:
    """Fails for an integer or a sequence that is too large to be computed."""
    # the sequence or the larger number may be on either side
    if op == "mul" and isinstance(a, int):
        a, b = b, a
    if not isinstance(b, int):
        return
    if op == "mul" and isinstance(a, (str, tuple, list)):
        if len(a) * b > MAX_UNROLL:
            fe.fail(
                f"'*': a {type(a).__name__} of {len(a)} items times {b}; expected at most {MAX_UNROLL} items",
                KernelValueError,
            )
    elif isinstance(a, int) and op in ("pow", "shl", "mul"):
        # Python would compute it now, whatever memory and time that takes
        bits = a.bit_length()
        bits = bits + b if op == "shl" else bits * b if op == "pow" else bits + b.bit_length()
        is_small = a == 0 or (op == "pow" and abs(a) == 1)
        if b > 0 and not is_small and bits > MAX_INT_BITS:
            fe.fail(
                f"'{SYMBOLS[op]}' on integers of {a.bit_length()} and {b.bit_length()} bits: the result has more than "
                f"{MAX_INT_BITS} bits",
                KernelValueError,
            )


def _fold(fe: Frontend, op: str, a: Atom, b: Any) -> Any:
    """Folds integer identities, and divisions by powers of two into shifts and masks; None if nothing applies."""
    if isinstance(b, bool) or not isinstance(b, int):
        return None
    if (b == 0 and op in ("add", "sub", "or", "xor")) or (b == 1 and op in ("mul", "floordiv")):
        return a
    if (
        # b is a power of two that a signed type of these bits holds
        op in ("floordiv", "mod")
        and b > 0
        and b & (b - 1) == 0
        and b.bit_length() < a.type.dtype.bits
    ):
        if op == "mod":
            return fe.b.op("and", (a, literal(fe, b - 1, a.type)), a.type)
        # an arithmetic shift rounds down, as // does, for negative numbers too
        return fe.b.op("shr", (a, literal(fe, b.bit_length() - 1, a.type)), a.type)
    if op in ("floordiv", "mod") and b == 0:
        fe.fail("division by zero", KernelValueError)
    return None


def _shift(fe: Frontend, op: str, a: Any, b: Any) -> Atom:
    x, y = promote_together(fe, f"'{SYMBOLS[op]}'", a, b)
    if not x.type.dtype.is_integer:
        fe.fail(f"'{SYMBOLS[op]}' does not take {describe(a)} and {describe(b)}; integers fit")
    return fe.b.op(op, (x, y), x.type)


def power(fe: Frontend, a: Any, b: Any) -> Any:
    """``a ** b``: repeated squaring for exponents of 0 to 16 known at compile time."""
    if (
        isinstance(b, int)
        and 0 <= b <= 16
        and isinstance(a, (Ref, Const))
        and a.type.dtype.kind != "b"
    ):
        result: Any = None
        square: Any = a
        # `square` is a to the power of two that this bit stands for
        while b:
            if b & 1:
                result = square if result is None else binary(fe, "mul", result, square)
            b >>= 1
            # the square after the highest bit has no use, and may overflow
            if b:
                square = binary(fe, "mul", square, square)
        return literal(fe, 1, a.type) if result is None else result
    return call_inline(fe, mathlib.pow, [a, b], {})


def unary(fe: Frontend, op: str, v: Any) -> Any:
    """``-x``, ``~x`` and ``+x``."""
    if op == "not" and isinstance(v, bool):
        fe.fail(f"'~' of {v} is {-1 - v} in Python, which is true; use not")
    if not isinstance(v, (Ref, Const)):
        try:
            return {"neg": operator.neg, "not": operator.invert, "pos": operator.pos}[op](v)
        except TypeError as error:
            fe.fail(str(error))
    v = widen_floats(fe, v)
    if op == "pos":
        return v
    if op == "not":
        if v.type.dtype.is_float:
            fe.fail(f"'~' does not take {describe(v)}; integers or masks fit")
        return fe.b.op("not", (v,), v.type)
    if v.type.dtype.kind == "b":
        fe.fail("'-' does not take masks")
    return fe.b.op("neg", (v,), v.type)


def truth(fe: Frontend, v: Any) -> Any:
    """Converts a value to a condition: a Python bool, or a run-time ``bool`` scalar."""
    if isinstance(v, (Ref, Const)):
        if v.type.width:
            fe.fail(f"a condition is a scalar, got {describe(v)}; use k.select, k.any or k.all")
        if v.type.dtype.kind != "b":
            return binary(fe, "ne", v, 0)
        return bool(v.value) if isinstance(v, Const) else v
    if isinstance(v, Runtime):
        fe.fail(f"a condition is a bool, got {describe(v)}")
    return bool(v)
