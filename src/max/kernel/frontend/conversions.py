"""Types of values, conversions and promotion."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
import math
from typing import Any, NoReturn

import numpy as np

from max.kernel.errors import KernelIndexError, KernelValueError
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import RangeValue, SlotVar, describe, is_number, plain_number
from max.kernel.ir.nodes import Atom, Const, Ref
from max.kernel.language.limits import unroll_error
from max.kernel.language.values import convert
from max.kernel.types import (
    BOOL,
    INDEX,
    ScalarType,
    SIMDAnnotation,
    Type,
    common_dtype,
    f32,
    scalar,
    vector,
)


# ***** types *****
def type_of(fe: Frontend, v: Any) -> Type:
    """The type of an atom, or the default type of a number."""
    if isinstance(v, (Ref, Const)):
        return v.type
    v = plain_number(v)
    if isinstance(v, bool):
        return BOOL
    if isinstance(v, int):
        return INDEX
    if isinstance(v, float):
        return scalar(f32)
    fe.fail(f"expected a number, got {describe(v)}")


def unify(fe: Frontend, a: Type, a_weak: bool, b: Type, b_weak: bool) -> Type | None:
    """The type of a variable that holds values of both types, or None; weak types are those of literals."""
    if a is b:
        return a
    if a_weak and not b_weak:
        a, b = b, a
        a_weak, b_weak = b_weak, a_weak
    # from here on only the second may be weak, or both are
    if b_weak and not a_weak:  # a literal takes the other type if its kind allows that
        fits = a.dtype.is_float or (
            b.dtype.kind != "f" and (a.dtype.kind == "b") == (b.dtype.kind == "b")
        )
        return a if fits else None
    # two literals of different kinds, such as 0 before a loop and 0.5 in it
    if a_weak and b_weak:
        return scalar(f32) if {a.dtype.kind, b.dtype.kind} == {"i", "f"} else None
    dtype = common_dtype(a.dtype, b.dtype)
    if dtype is None or (a.width and b.width and a.width != b.width):
        return None
    return type_of_lanes(dtype, max(a.width, b.width))


# ***** conversions *****
def literal(fe: Frontend, v: Any, type: Type) -> Const:
    """Converts a Python number to a constant of ``type``."""
    v = plain_number(v)
    dtype = type.dtype
    if dtype.is_float:
        return fe.b.const(float(v), type)
    if dtype.kind == "b":
        if not isinstance(v, (bool, int)):
            fe.fail(f"a {dtype.name} cannot be {v!r}")
        return fe.b.const(bool(v), type)
    if isinstance(v, float):
        if not math.isfinite(v) or v % 1 != 0:
            fe.fail(
                f"{v!r} is not a {dtype.name}; convert the other operand with k.f32(...), or round the number"
            )
        v = int(v)
    low, high = (
        (-(1 << dtype.bits - 1), (1 << dtype.bits - 1))
        if dtype.kind == "i"
        else (0, 1 << dtype.bits)
    )
    if not low <= int(v) < high:
        fe.fail(f"{v} does not fit into {dtype.name} ({low} … {high - 1})", KernelValueError)
    return fe.b.const(int(v), type)


def cast(fe: Frontend, v: Any, dtype: ScalarType, unchecked: bool = False) -> Atom:
    """Converts elements, as ``k.f32(x)``: floats are rounded; floats to integers truncate and saturate."""
    if isinstance(v, SlotVar):
        v = fe.b.read(v.slot, v.type)
    if not isinstance(v, (Ref, Const)):
        if not is_number(v):
            fe.fail(f"cannot convert {describe(v)} to {dtype.name}")
        v = plain_number(v)
        if not dtype.is_float and isinstance(v, float):
            if not math.isfinite(v):
                fe.fail(f"{v!r} has no {dtype.name} value", KernelValueError)
            v = int(v)  # truncates, as at run time
        return literal(fe, v, scalar(dtype))
    if v.type.dtype is dtype:
        return v
    if (
        isinstance(v, Const)
        and not isinstance(v.value, tuple)
        and dtype.is_float
        and v.type.dtype.is_float
    ):
        if v.type.dtype.bits <= dtype.bits:
            # a constant keeps all digits that were written; its type rounds them
            return fe.b.const(
                float(convert(float(v.value), v.type.dtype)), v.type.with_dtype(dtype)
            )
    return fe.b.op("cast", (v,), v.type.with_dtype(dtype), "unchecked" if unchecked else None)


def splat(fe: Frontend, v: Atom, width: int) -> Atom:
    """A vector with ``v`` in all lanes."""
    if isinstance(v, Const):
        return fe.b.const(v.value, vector(v.type.dtype, width))
    return fe.b.op("splat", (v,), vector(v.type.dtype, width))


def coerce(fe: Frontend, v: Any, type: Type) -> Atom:
    """Converts a number or atom to ``type``; scalars are broadcast to vectors."""
    if isinstance(v, SlotVar):
        v = fe.b.read(v.slot, v.type)
    if not isinstance(v, (Ref, Const)):
        if not is_number(v):
            fe.fail(f"expected {type.describe()}, got {describe(v)}")
        return literal(fe, v, type)
    if v.type is type:
        return v
    # the element type first: one conversion of the scalar, not one per lane
    v = cast(fe, v, type.dtype)
    if v.type.width == type.width:
        return v
    if v.type.width == 0:
        return splat(fe, v, type.width)
    fe.fail(f"expected {type.describe()}, got {v.type.describe()}")


def as_index(fe: Frontend, v: Any) -> int | Atom:
    """Converts an index: to an int if it is known at compile time, else to an ``i64`` scalar."""
    if isinstance(v, (int, np.integer)) and not isinstance(v, bool):
        return int(v)
    if isinstance(v, Const) and v.type.dtype.is_integer and v.type.width == 0:
        return int(v.value)
    if isinstance(v, Ref) and v.type.width == 0 and v.type.dtype.is_integer:
        return v if v.type is INDEX else fe.b.op("cast", (v,), INDEX)
    fe.fail(f"an index is an integer, got {describe(v)}")


def widen_floats(fe: Frontend, v: Any) -> Any:
    """Converts narrow floats to f32, in which they are computed."""
    if isinstance(v, (Ref, Const)) and v.type.dtype.is_narrow_float:
        return cast(fe, v, f32)
    return v


def promote_together(fe: Frontend, op: str, *values: Any) -> list[Atom]:
    """Promotes operands to one type: literals take the others' type, scalars are broadcast, narrower types widen."""
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
                    mismatch(fe, op, values)
                dtype = common
            if t.width:
                if width and width != t.width:
                    mismatch(fe, op, values)
                width = t.width
        elif not is_number(v):
            mismatch(fe, op, values)
    # literals only: f32 if one of them is a float
    if dtype is None:
        dtype = type_of(fe, values[0]).dtype
        for v in values[1:]:
            if type_of(fe, v).dtype.is_float:
                dtype = f32
    if not dtype.is_float:
        for v in values:
            if isinstance(v, float):
                fe.fail(
                    f"{op}: {dtype.name} with the literal {v!r}; convert the integer, as in k.f32(x)"
                )
    type = vector(dtype, width) if width else scalar(dtype)
    return [
        v if isinstance(v, (Ref, Const)) and v.type is type else coerce(fe, v, type) for v in values
    ]


def mismatch(fe: Frontend, op: str, values: tuple[Any, ...]) -> NoReturn:
    """Reports operands without a common type."""
    operands = " and ".join(describe(v) for v in values)
    fe.fail(
        f"{op} does not take {operands}; equal types fit, or convert one of them, as in k.f32(x)"
    )


def loose_type(fe: Frontend, v: Any) -> tuple[Type, bool]:
    """The type of a value, and whether it is weak: that of a literal."""
    if isinstance(v, SlotVar):
        return v.type, v.weak
    return type_of(fe, v), not isinstance(v, (Ref, Const))


def sequence(fe: Frontend, value: Any, node: ast.AST) -> tuple[Any, ...]:
    """The items of a sequence that is known at compile time."""
    fe.node = node
    if isinstance(value, RangeValue):
        static = value.static()
        if static is None:
            fe.fail("the bounds of an unrolled range must be known at compile time")
        value = static
    if isinstance(value, range) and (error := unroll_error(value)) is not None:
        fe.fail(error, KernelValueError)
    if isinstance(value, (tuple, list, range, dict, zip, enumerate, reversed, str, frozenset)):
        return tuple(value)
    fe.fail(f"expected a sequence known at compile time, got {describe(value)}")


def extract(fe: Frontend, v: Any, index: Any) -> Any:
    """``v[i]``: one lane."""
    if not v.type.is_vector:
        fe.fail(f"{describe(v)} has no lanes to index")
    i = as_index(fe, index)
    if isinstance(i, int) and not 0 <= i < v.type.width:
        fe.fail(f"lane {i} out of range for {describe(v)}", KernelIndexError)
    return fe.b.op("extract", (v, fe.b.index(i)), type_of_lanes(v.type.dtype, 0))


def type_of_lanes(dtype: ScalarType, width: int) -> Type:
    """The vector type of ``width`` lanes, or the scalar type for 0."""
    return vector(dtype, width) if width else scalar(dtype)


def convert_annotated(fe: Frontend, value: Any, annotation: Any, name: str) -> Any:
    """Converts a literal to an annotated type, or checks the type of another value."""
    if isinstance(annotation, ScalarType):
        type: Type = scalar(annotation)
    elif isinstance(annotation, SIMDAnnotation):
        type = vector(annotation.dtype, annotation.width)
    else:
        return value
    if isinstance(value, (Ref, Const)) and value.type is not type:
        # only a broadcast is left to do: other types are not converted
        if value.type.dtype is not type.dtype or value.type.width:
            fe.fail(f"{name} is {type.describe()}, got {describe(value)}")
    return coerce(fe, value, type)
