"""Element-wise ops: operands of equal shape and, except for `select` and `cast`, equal dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from max.dtype import DType
from max.mlir.operation import OPS, Attrs, Infer, OpSpec, Types, define, same_device, tensor
from max.mlir.types import TensorType, dtype_text

Accepts = Callable[[DType], bool]


def _is_float(dtype: DType) -> bool:
    return dtype.is_float()


def _is_number(dtype: DType) -> bool:
    return dtype is not DType.bool


def _is_bool(dtype: DType) -> bool:
    return dtype is DType.bool


def _is_integer(dtype: DType) -> bool:
    return dtype.is_integral()


def _is_any(dtype: DType) -> bool:
    return True


_DESCRIPTIONS: dict[Accepts, str] = {
    _is_float: "a floating-point type",
    _is_number: "a number",
    _is_bool: "bool",
    _is_any: "any type",
}


def _check_dtype(op: str, types: list[TensorType], accepts: Accepts) -> None:
    for index, t in enumerate(types):
        if not accepts(t.dtype):
            raise TypeError(
                f"{op}: operand {index} has dtype {t.dtype.name}, expected {_DESCRIPTIONS[accepts]}"
            )


def _check_equal_shapes(op: str, types: list[TensorType]) -> None:
    """Checks that the operands have one shape and one device."""
    first = types[0]
    for index, t in enumerate(types[1:], 1):
        if t.shape != first.shape:
            raise ValueError(
                f"{op}: operand {index} is {t.short}, operand 0 is {first.short}; element-wise "
                "operands have equal shapes (broadcast_to)"
            )
    same_device(op, types)


def _unary(op: str, accepts: Accepts, to_bool: bool = False) -> Infer:
    """The rule of an op on one operand: its type, or bool of its shape."""

    def infer(types: Types, attrs: Attrs) -> Types:
        x = tensor(op, types, 0)
        _check_dtype(op, [x], accepts)
        return (x.with_dtype(DType.bool) if to_bool else x,)

    return infer


def _binary(op: str, accepts: Accepts, to_bool: bool = False) -> Infer:
    """The rule of an op on two operands of equal type: that type, or bool of its shape."""

    def infer(types: Types, attrs: Attrs) -> Types:
        x, y = tensor(op, types, 0), tensor(op, types, 1)
        # most often both operands share one type object
        if x is not y:
            if x.dtype is not y.dtype:
                raise TypeError(
                    f"{op}: the operands are {dtype_text(x.dtype)} and {dtype_text(y.dtype)}, "
                    "expected one dtype (cast)"
                )
            _check_equal_shapes(op, [x, y])
        _check_dtype(op, [x], accepts)
        return (x.with_dtype(DType.bool) if to_bool else x,)

    return infer


_ELEMENTWISE = OpSpec("", (1, 1), 1, elementwise=True)

UNARY_FLOAT = (
    *("exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos", "acos", "atanh", "erf"),
    *("floor", "ceil", "round", "trunc", "sigmoid", "silu"),
)
UNARY_NUMBER = ("abs", "neg", "relu")
UNARY_TEST = ("is_nan", "is_inf")
BINARY_NUMBER = ("add", "sub", "mul", "div", "mod", "pow", "max", "min")
BINARY_FLOAT = ("floor_div",)
BINARY_BOOL = ("and", "or", "xor")
BINARY_INTEGER = ("bit_and", "bit_or", "bit_xor", "shift_left", "shift_right")
COMPARISON_NUMBER = ("greater", "greater_equal")
COMPARISON_ANY = ("equal", "not_equal")


CHEAP = frozenset(
    {
        *("add", "sub", "mul", "neg", "abs", "max", "min", "relu", "not"),
        *(*BINARY_BOOL, *BINARY_INTEGER, *COMPARISON_NUMBER, *COMPARISON_ANY),
    }
)  # fmt: skip
"""Ops that cost less than a load of their operands."""
DIVISIONS = frozenset({"div", "mod"})
"""Ops that raise for divisors of integers that are constants in a kernel."""


def _define(names: tuple[str, ...], arity: int, infer: Callable[[str], Infer], doc: str) -> None:
    for name in names:
        define(
            replace(
                _ELEMENTWISE,
                name=f"mo.{name}",
                operands=(arity, arity),
                infer=infer(name),
                cheap=name in CHEAP,
                may_raise=name in DIVISIONS,
                takes="x, y" if arity == 2 else "x",
                doc=doc,
            )
        )


_NUMBERS = (
    "on numbers: `div` is true division on floats, floor division on integers; `mod` has the sign "
    "of y; integers by 0 give 0, the least one by -1 wraps"
)
_BITS = (
    "on integers; a shift that is negative, or at least the width, leaves 0, or the sign of a "
    "shift to the right"
)
_define(UNARY_FLOAT, 1, lambda op: _unary(op, _is_float), "on floats")
_define(UNARY_NUMBER, 1, lambda op: _unary(op, _is_number), "on numbers")
_define(UNARY_TEST, 1, lambda op: _unary(op, _is_float, to_bool=True), "on floats; bool results")
_define(("not",), 1, lambda op: _unary(op, _is_bool), "on bool")
_define(BINARY_NUMBER, 2, lambda op: _binary(op, _is_number), _NUMBERS)
_define(
    BINARY_FLOAT,
    2,
    lambda op: _binary(op, _is_float),
    "on floats: the greatest integer not above the exact quotient",
)
_define(BINARY_BOOL, 2, lambda op: _binary(op, _is_bool), "on bool")
_define(BINARY_INTEGER, 2, lambda op: _binary(op, _is_integer), _BITS)
_define(
    COMPARISON_NUMBER,
    2,
    lambda op: _binary(op, _is_number, to_bool=True),
    "on numbers; bool results",
)
_define(
    COMPARISON_ANY,
    2,
    lambda op: _binary(op, _is_any, to_bool=True),
    "on any dtype; bool results",
)

GELU_APPROXIMATIONS = ("none", "tanh", "quick")


def _infer_gelu(types: Types, attrs: Attrs) -> Types:
    """The operand's type; `approximate` must be known."""
    if attrs["approximate"] not in GELU_APPROXIMATIONS:
        raise ValueError(
            f"gelu: approximate is {attrs['approximate']!r}, "
            f"expected one of {', '.join(GELU_APPROXIMATIONS)}"
        )
    return _unary("gelu", _is_float)(types, attrs)


define(
    replace(
        _ELEMENTWISE,
        name="mo.gelu",
        attributes={"approximate": str},
        infer=_infer_gelu,
        takes="x",
        doc="`approximate` = none, tanh, quick",
    )
)


def _check_cast(operands: Types, results: Types, attrs: Attrs) -> None:
    x, y = tensor("cast", operands, 0), tensor("cast", results, 0)
    if x.with_dtype(y.dtype) != y:
        raise ValueError(f"cast: {x.short} to {y.short} changes more than the dtype")


CastOp = define(
    replace(
        _ELEMENTWISE,
        name="mo.cast",
        check=_check_cast,
        cheap=True,
        takes="x",
        doc="to the result's dtype (float to int truncates and saturates, NaN gives 0)",
    )
)


def _infer_select(types: Types, attrs: Attrs) -> Types:
    """The type of x and y, which must be equal, as must the shape of the condition."""
    condition, x, y = (tensor("where", types, i) for i in range(3))
    if condition.dtype is not DType.bool:
        raise TypeError(f"where: the condition has dtype {condition.dtype.name}, expected bool")
    if x.dtype is not y.dtype:
        raise TypeError(
            f"where: the branches are {dtype_text(x.dtype)} and {dtype_text(y.dtype)}, "
            "expected one dtype (cast)"
        )
    _check_equal_shapes("where", [condition, x, y])
    return (x,)


SelectOp = define(
    replace(
        _ELEMENTWISE,
        name="mo.select",
        operands=(3, 3),
        infer=_infer_select,
        cheap=True,
        takes="cond, x, y",
        doc="x where cond is true, y elsewhere",
    )
)

# ops that passes name
AbsOp = OPS["mo.abs"]
AddOp = OPS["mo.add"]
AndOp = OPS["mo.and"]
DivOp = OPS["mo.div"]
EqualOp = OPS["mo.equal"]
GreaterOp = OPS["mo.greater"]
GreaterEqualOp = OPS["mo.greater_equal"]
IsNanOp = OPS["mo.is_nan"]
MaxOp = OPS["mo.max"]
MinOp = OPS["mo.min"]
MulOp = OPS["mo.mul"]
NegOp = OPS["mo.neg"]
NotOp = OPS["mo.not"]
NotEqualOp = OPS["mo.not_equal"]
OrOp = OPS["mo.or"]
PowOp = OPS["mo.pow"]
RoundOp = OPS["mo.round"]
RsqrtOp = OPS["mo.rsqrt"]
SqrtOp = OPS["mo.sqrt"]
SubOp = OPS["mo.sub"]
