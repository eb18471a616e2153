"""Element-wise functions of scalars and vectors."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import builtins
from typing import Any

from max.kernel.errors import KernelNameError
from max.kernel.frontend.arithmetic import binary
from max.kernel.frontend.conversions import cast, literal, promote_together, widen_floats
from max.kernel.frontend.functions.table import Handler, HandlerTable, as_value
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import describe, is_number, is_runtime, plain_number
from max.kernel.language import lang
from max.kernel.types import BOOL, INDEX, f32, f64, scalar

_LIBM = frozenset(
    {
        "exp",
        "exp2",
        "fmod",
        "log",
        "log2",
        "log1p",
        "expm1",
        "tanh",
        "sin",
        "cos",
        "pow",
        "erf",
        "acos",
        "atanh",
    }
)


FUNCTIONS = HandlerTable()


# ***** arithmetic *****
@FUNCTIONS.emits(lang.fma)
def emit_fma(fe: Frontend, a: Any, b: Any, c: Any) -> Any:
    x, y, z = promote_together(
        fe, "k.fma", widen_floats(fe, a), widen_floats(fe, b), widen_floats(fe, c)
    )
    if not x.type.dtype.is_float:
        return binary(fe, "add", binary(fe, "mul", x, y), z)
    return fe.b.op("fma", (x, y, z), x.type)


def _extremum(op: str) -> Handler:
    """The handler of `k.min` or `k.max`."""

    def emit_extremum(fe: Frontend, *xs: Any) -> Any:
        if len(xs) == 1 and isinstance(xs[0], tuple):
            xs = xs[0]
        if not xs:
            fe.fail(f"k.{op} takes at least one operand")
        if not any(is_runtime(x) for x in xs):
            return getattr(builtins, op)(xs)
        result = xs[0]
        for x in xs[1:]:
            a, b = promote_together(fe, f"k.{op}", widen_floats(fe, result), widen_floats(fe, x))
            result = fe.b.op(op, (a, b), a.type)
        return result

    return emit_extremum


FUNCTIONS[lang.min] = FUNCTIONS[builtins.min] = _extremum("min")
FUNCTIONS[lang.max] = FUNCTIONS[builtins.max] = _extremum("max")


def _float_op(op: str, integers: bool = False) -> Handler:
    """The handler of a function of one float; with `integers` it also takes integers."""

    def emit_unary(fe: Frontend, x: Any) -> Any:
        if integers and not is_runtime(x):
            return plain_number(getattr(builtins, op)(x))
        x = widen_floats(fe, as_value(fe, x, f"k.{op}"))
        if not x.type.dtype.is_float:
            # integers are whole already
            if op in ("floor", "ceil", "trunc", "round") and x.type.dtype.is_integer:
                return x
            if not (integers and x.type.dtype.is_integer):
                fe.fail(f"k.{op} takes floats, got {describe(x)}; convert it, as in k.f32(x)")
            if x.type.dtype.kind == "u":
                return x  # its own absolute value
        return fe.b.op(op, (x,), x.type)

    return emit_unary


for _name in ("sqrt", "floor", "ceil", "trunc"):
    FUNCTIONS[getattr(lang, _name)] = _float_op(_name)
emit_rounded = FUNCTIONS[lang.round] = _float_op("round")
FUNCTIONS[lang.abs] = FUNCTIONS[builtins.abs] = _float_op("abs", integers=True)


@FUNCTIONS.emits(lang.copysign)
def emit_copysign(fe: Frontend, x: Any, sign: Any) -> Any:
    a, b = promote_together(fe, "k.copysign", widen_floats(fe, x), widen_floats(fe, sign))
    return fe.b.op("copysign", (a, b), a.type)


@FUNCTIONS.emits(lang.scale_by_power)
def emit_scale_by_power(fe: Frontend, x: Any, n: Any) -> Any:
    a, b = promote_together(fe, "k.scale_by_power", x, n)
    return fe.b.op("scale", (a, b), a.type)


@FUNCTIONS.emits(lang.isnan)
def emit_isnan(fe: Frontend, x: Any) -> Any:
    x = widen_floats(fe, as_value(fe, x, "k.isnan"))
    mask = x.type.with_dtype(BOOL.dtype)
    # only NaN differs from itself
    return fe.b.op("ne", (x, x), mask) if x.type.dtype.is_float else fe.b.const(False, mask)


@FUNCTIONS.emits(lang.isinf)
def emit_isinf(fe: Frontend, x: Any) -> Any:
    x = widen_floats(fe, as_value(fe, x, "k.isinf"))
    mask = x.type.with_dtype(BOOL.dtype)
    if not x.type.dtype.is_float:
        return fe.b.const(False, mask)
    return fe.b.op("eq", (fe.b.op("abs", (x,), x.type), literal(fe, float("inf"), x.type)), mask)


def _bit_count(op: str) -> Handler:
    """The handler of a function that counts bits of an integer."""

    def emit_bits(fe: Frontend, x: Any) -> Any:
        x = as_value(fe, x, f"k.{op}")
        if not x.type.dtype.is_integer:
            fe.fail(f"k.{op} takes integers, got {describe(x)}")
        return fe.b.op(op, (x,), x.type)

    return emit_bits


FUNCTIONS[lang.popcount] = _bit_count("popcount")
FUNCTIONS[lang.count_leading_zeros] = _bit_count("ctlz")
FUNCTIONS[lang.count_trailing_zeros] = _bit_count("cttz")


@FUNCTIONS.emits(lang.ceildiv)
def emit_ceildiv(fe: Frontend, a: Any, b: Any) -> Any:
    return binary(fe, "floordiv", binary(fe, "add", a, binary(fe, "sub", b, 1)), b)


@FUNCTIONS.emits(lang.libm)
def emit_libm(fe: Frontend, name: Any, *xs: Any) -> Any:
    """A function of the C library in float64, lane by lane."""
    if name not in _LIBM:
        fe.fail(f"k.libm has {', '.join(sorted(_LIBM))}, got {name!r}", KernelNameError)
    atoms = promote_together(fe, "k.libm", *(cast(fe, x, f64) for x in xs))
    if not atoms[0].type.is_vector:
        return fe.b.op("libm", tuple(atoms), atoms[0].type, name)
    width = atoms[0].type.width
    result: Any = fe.b.const(0.0, atoms[0].type)
    for lane in range(width):
        at = fe.b.const(lane, INDEX)
        args = tuple(fe.b.op("extract", (a, at), scalar(f64)) for a in atoms)
        result = fe.b.op(
            "insert", (result, fe.b.op("libm", args, scalar(f64), name), at), result.type
        )
    return result


@FUNCTIONS.emits(lang.floating)
def emit_floating(fe: Frontend, x: Any) -> Any:
    """A value as a float: numbers become float32, narrow floats are widened."""
    if is_number(x):
        return literal(fe, float(x), scalar(f32))
    x = widen_floats(fe, as_value(fe, x, "this function"))
    if not x.type.dtype.is_float:
        fe.fail(f"expected a float, got {describe(x)}; convert it, as in k.f32(x)")
    return x
