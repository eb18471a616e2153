"""One node of a region as an expression of the kernel language.

Floats of 16 bits or fewer are computed in f32, other types in their own. ``round_to`` rounds a value to its dtype. A
value is a vector if it varies along the vectorized axis, else a scalar; the caller splats scalars that meet vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from max.dtype import DType

__all__ = [
    "KERNEL_NAME",
    "cast",
    "combine",
    "compute_dtype",
    "expression",
    "identity",
    "literal",
    "loaded_text",
    "register_expression",
    "rounded_text",
    "has_expression",
]

KERNEL_NAME: dict[DType, str] = {
    DType.bool: "bool", DType.int8: "i8", DType.int16: "i16", DType.int32: "i32", DType.int64: "i64",
    DType.uint8: "u8", DType.uint16: "u16", DType.uint32: "u32", DType.uint64: "u64",
    DType.float8_e4m3fn: "f8e4m3fn", DType.float8_e4m3fnuz: "f8e4m3fnuz",
    DType.float8_e5m2: "f8e5m2", DType.float8_e5m2fnuz: "f8e5m2fnuz",
    DType.float4_e2m1fn: "f4e2m1fn", DType.float6_e2m3fn: "f6e2m3fn", DType.float6_e3m2fn: "f6e3m2fn",
    DType.float16: "f16", DType.bfloat16: "bf16", DType.float32: "f32", DType.float64: "f64",
}  # fmt: skip
"""The kernel language's names of its element types."""


def compute_dtype(dtype: DType) -> DType:
    """The type in which values of `dtype` are computed inside a region."""
    return DType.float32 if dtype.is_float() and dtype is not DType.float64 else dtype


def literal(value: float | int | bool, dtype: DType) -> str:
    """A scalar constant of the compute type of `dtype`."""
    name = KERNEL_NAME[compute_dtype(dtype)]
    if dtype is DType.bool:
        return f"k.bool({bool(value)})"
    if not dtype.is_float():
        return f"k.{name}({int(value)})"
    number = float(value)
    if math.isnan(number):
        return f"k.{name}(nan)"
    if math.isinf(number):
        return f"k.{name}({'-' if number < 0 else ''}inf)"
    # the shortest text that is read as the same number
    return f"k.{name}({number!r})"


def identity(reduction: str, dtype: DType) -> str:
    """The identity element of a reduction, as a scalar."""
    if reduction in ("reduce_sum", "reduce_mul"):
        return literal(reduction == "reduce_mul", dtype)  # 1 or 0
    greatest = reduction == "reduce_max"
    if dtype.is_float():
        return literal(-math.inf if greatest else math.inf, dtype)
    if dtype is DType.bool:
        return literal(not greatest, dtype)
    bits = dtype.size_in_bits
    low, high = (
        (0, (1 << bits) - 1)
        if dtype.is_unsigned_integral()
        else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    )
    return literal(low if greatest else high, dtype)


def combine(reduction: str, x: str, y: str) -> str:
    """One step of a reduction, with accumulator `x` and element `y`."""
    # max and min test their first argument for NaN: the element, not the accumulator, which is on the dependency chain
    if reduction in ("reduce_sum", "reduce_mul"):
        return f"{x} {'+' if reduction == 'reduce_sum' else '*'} {y}"
    return f"k.{reduction.removeprefix('reduce_')}({y}, {x})"


Writer = Callable[[DType, str, Sequence[str]], str]
"""``(compute type, the node's attribute, operands) -> text``"""


def _call(name: str) -> Writer:
    return lambda dtype, attr, args: f"{name}({', '.join(args)})"


def _infix(symbol: str) -> Writer:
    return lambda dtype, attr, args: f"{args[0]} {symbol} {args[1]}"


def _by_kind(floats: Writer, integers: Writer) -> Writer:
    return lambda dtype, attr, args: (floats if dtype.is_float() else integers)(dtype, attr, args)


def _integer_pow(dtype: DType, attr: str, args: Sequence[str]) -> str:
    kind = "signed" if dtype.is_signed_integral() else "unsigned"
    return f"fn.{kind}_pow({', '.join(args)})"


_GELU = {"none": "gelu", "tanh": "gelu_tanh", "quick": "gelu_quick"}
_FUNCTIONS = (
    *("abs", "exp", "log", "log1p", "sqrt", "rsqrt", "tanh", "sin", "cos", "atanh", "erf"),
    *("sigmoid", "silu", "max", "min", "select"),
)
"""Ops with the same name in the kernel language."""

_TABLE: dict[str, Writer] = {
    **{name: _call(f"k.{name}") for name in _FUNCTIONS},
    **{
        # integers are whole already
        name: _by_kind(_call(f"k.{name}"), lambda dtype, attr, args: args[0])
        for name in ("floor", "ceil", "round", "trunc")
    },
    "neg": lambda dtype, attr, args: f"-{args[0]}",
    "not": lambda dtype, attr, args: f"~{args[0]}",
    "relu": lambda dtype, attr, args: f"k.max({args[0]}, 0)",
    "gelu": lambda dtype, attr, args: f"fn.{_GELU[attr]}({args[0]})",
    "fma": _call("k.fma"),
    "acos": _call("fn.acos"),
    "is_nan": _call("k.isnan"),
    "is_inf": _call("k.isinf"),
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _by_kind(_infix("/"), _call("fn.floor_div")),
    "floor_div": _call("fn.floor_divide"),
    "mod": _by_kind(_call("fn.floor_mod"), _call("fn.integer_mod")),
    "pow": _by_kind(_call("k.pow"), _integer_pow),
    "and": _infix("&"),
    "or": _infix("|"),
    "xor": _infix("^"),
    "bit_and": _infix("&"),
    "bit_or": _infix("|"),
    "bit_xor": _infix("^"),
    "shift_left": _call("fn.shift_left"),
    "shift_right": _call("fn.shift_right"),
    "equal": _infix("=="),
    "not_equal": _infix("!="),
    "greater": _infix(">"),
    "greater_equal": _infix(">="),
}


def register_expression(op: str, writer: Writer) -> None:
    """Adds an element-wise op to the code generator.

    Args:
        op: The op without its dialect, such as ``log2``.
        writer: Writes its expression; floats of 16 bits or fewer are f32 there.

    Raises:
        ValueError: The code generator has the op.
    """
    if has_expression(op):
        raise ValueError(f"the code generator has an expression for {op!r}")
    _TABLE[op] = writer


def expression(op: str, attr: str, operand_dtype: DType, args: Sequence[str]) -> str:
    """The text of ``op(args)``.

    Args:
        op: The node's op, a `mo` op without its dialect.
        attr: The node's attribute.
        operand_dtype: The element type of the first operand; no text of a select depends on that of its condition.
        args: The operands, names of one element type and shape.

    Raises:
        KeyError: The code generator has no such op.
    """
    return _TABLE[op](compute_dtype(operand_dtype), attr, args)


def cast(text: str, source: DType, target: DType) -> str:
    """A conversion between compute types; ``text`` itself if they are equal."""
    # a node `round_to` rounds to a narrow type: a cast between narrow floats is no conversion
    source, target = compute_dtype(source), compute_dtype(target)
    if source is target:
        return text
    # NaN becomes true, as in NumPy
    if target is DType.bool:
        return f"{text} != 0"
    return f"k.cast({text}, k.{KERNEL_NAME[target]})"


def rounded_text(text: str, dtype: DType) -> str:
    """A value of the compute type of `dtype`, rounded to `dtype`."""
    return f"k.cast({text}, k.{KERNEL_NAME[dtype]})"


def loaded_text(text: str, dtype: DType) -> str:
    """A value of type `dtype`, converted to the compute type of `dtype`."""
    target = compute_dtype(dtype)
    return text if target is dtype else f"k.cast({text}, k.{KERNEL_NAME[target]})"


def has_expression(op: str) -> bool:
    """Whether the code generator has the op."""
    return op in _TABLE or op in ("cast", "cast_within", "round_to")
