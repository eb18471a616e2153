"""Element-wise ops. Operands of binary ops are promoted to one dtype and broadcast to one shape."""

from __future__ import annotations

from collections.abc import Sequence

from max import mlir
from max.dtype import DType
from max.graph.ops._stage import as_tensor, stage
from max.graph.ops.promotion import cast_to, is_weak, promoted
from max.graph.value import StrongTensorValueLike, TensorValue, TensorValueLike
from max.mlir.dims import DimExpr

__all__ = [
    "abs",
    "acos",
    "add",
    "atanh",
    "cast",
    "ceil",
    "cos",
    "div",
    "equal",
    "erf",
    "exp",
    "floor",
    "floor_div",
    "gelu",
    "greater",
    "greater_equal",
    "is_inf",
    "is_nan",
    "log",
    "log1p",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "mod",
    "mul",
    "negate",
    "not_equal",
    "pow",
    "relu",
    "round",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "sub",
    "tanh",
    "trunc",
    "where",
]


def broadcast_shapes(op: str, shapes: Sequence[tuple[DimExpr, ...]]) -> tuple[DimExpr, ...]:
    """The common shape of `shapes` under NumPy's broadcasting rules.

    Raises:
        ValueError: Two dimensions differ and neither is 1.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(len(shape) for shape in shapes)
    result: list[DimExpr] = []
    for axis in range(-rank, 0):
        size = DimExpr.constant(1)
        for shape in shapes:
            if -axis > len(shape):
                continue
            dim = shape[axis]
            if size == 1:
                size = dim
            elif dim not in (size, 1):
                texts = " and ".join(mlir.dims_text(s) for s in shapes)
                symbolic = not (dim.is_static and size.is_static)
                raise ValueError(
                    f"{op}: the shapes {texts} do not broadcast: axis {axis} is {size} and {dim}; "
                    "dimensions must be equal or 1"
                    + (" (state what is equal with rebind)" if symbolic else "")
                )
        result.append(size)
    return tuple(result)


def broadcast_all(op: str, tensors: Sequence[TensorValue]) -> list[TensorValue]:
    """Broadcasts tensors to their common shape.

    Raises:
        ValueError: The shapes do not broadcast.
    """
    types = [t.mlir_type for t in tensors]
    shape = types[0].shape
    if all(t.shape == shape for t in types):
        return list(tensors)
    shape = broadcast_shapes(op, [t.shape for t in types])
    return [
        x if t.shape == shape else stage("broadcast_to", (x,), None, t.with_shape(shape))
        for x, t in zip(tensors, types, strict=True)
    ]


def _unary(op: str, x: TensorValueLike) -> TensorValue:
    return stage(op, (as_tensor(x),))


_OF_BOOLS = {"mul": "and", "max": "or", "min": "and"}
"""The logical op that computes an arithmetic op on bools."""


def _binary(op: str, name: str, lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    operands = broadcast_all(name, promoted(name, lhs, rhs))
    if op in _OF_BOOLS and operands[0].dtype is DType.bool:
        op = _OF_BOOLS[op]
    return stage(op, operands)


def _test(op: str, x: TensorValueLike) -> TensorValue:
    tensor = as_tensor(x)
    if not tensor.dtype.is_float():
        # no integer is NaN or infinite: false everywhere
        return stage("not_equal", (tensor, tensor))
    return stage(op, (tensor,))


def add(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs + rhs``, element by element.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.

    Returns:
        A tensor of the common shape and the promoted dtype (see `max.graph.ops.promotion`). Integers wrap around.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The operands are bool, or no dtype fits both.
    """
    return _binary("add", "add", lhs, rhs)


def sub(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs - rhs``, element by element; operands as of `add`.

    Args:
        lhs: The left operand.
        rhs: The right operand.
    """
    return _binary("sub", "sub", lhs, rhs)


def mul(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs * rhs``, element by element; operands as of `add`, and bools, for which it is ``and``.

    Args:
        lhs: The left operand.
        rhs: The right operand.
    """
    return _binary("mul", "mul", lhs, rhs)


def div(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs / rhs``, true division: integers are divided as floats.

    Args:
        lhs: The dividend.
        rhs: The divisor; broadcasts with the dividend.

    Returns:
        The quotient, of the promoted dtype if that is a float, else float64.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The operands are bool, or no dtype fits both.
    """
    if is_weak(lhs) != is_weak(rhs):
        lhs, rhs = _floating(lhs), _floating(rhs)
    x, y = promoted("div", lhs, rhs)
    return stage("div", broadcast_all("div", (_float_tensor(x), _float_tensor(y))))


def _floating(value: TensorValueLike) -> TensorValueLike:
    """Casts a tensor of integers to float64; other operands are unchanged."""
    return value if is_weak(value) else _float_tensor(as_tensor(value))


def _float_tensor(x: TensorValue) -> TensorValue:
    if not x.dtype.is_integral():
        return x
    return cast_to(x, DType.float64)


def floor_div(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs // rhs``: the greatest integer that is not above the exact quotient; operands as of `add`.

    Args:
        lhs: The dividend.
        rhs: The divisor. Integer division by 0 gives 0; of floats the quotient by 0 is infinite or NaN.
    """
    x, y = broadcast_all("floor_div", promoted("floor_div", lhs, rhs))
    return stage("floor_div" if x.dtype.is_float() else "div", (x, y))


def mod(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs % rhs``, with the sign of `rhs`; operands as of `add`.

    Args:
        lhs: The dividend.
        rhs: The divisor. An integer remainder by 0 is 0.
    """
    return _binary("mod", "mod", lhs, rhs)


def pow(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs ** rhs``, element by element; operands as of `add`.

    Args:
        lhs: The base.
        rhs: The exponent.
    """
    return _binary("pow", "pow", lhs, rhs)


def equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs == rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("equal", "equal", lhs, rhs)


def not_equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs != rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("not_equal", "not_equal", lhs, rhs)


def greater(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs > rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("greater", "greater", lhs, rhs)


def greater_equal(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs >= rhs``, element by element; bool.

    Args:
        lhs: The left operand.
        rhs: The right operand; broadcasts with the left.
    """
    return _binary("greater_equal", "greater_equal", lhs, rhs)


def logical_and(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs and rhs``, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("and", "logical_and", lhs, rhs)


def logical_or(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """``lhs or rhs``, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("or", "logical_or", lhs, rhs)


def logical_xor(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """Whether exactly one of `lhs` and `rhs` is true, element by element.

    Args:
        lhs: The left operand, bool.
        rhs: The right operand, bool; broadcasts with the left.
    """
    return _binary("xor", "logical_xor", lhs, rhs)


def logical_not(x: TensorValueLike) -> TensorValue:
    """``not x``, element by element.

    Args:
        x: The operand, bool.
    """
    return _unary("not", x)


def maximum(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The element-wise maximum; ``or`` for bools."""
    return _binary("max", "max", lhs, rhs)


def minimum(lhs: TensorValueLike, rhs: TensorValueLike) -> TensorValue:
    """The element-wise minimum; ``and`` for bools."""
    return _binary("min", "min", lhs, rhs)


def where(condition: TensorValueLike, x: TensorValueLike, y: TensorValueLike) -> TensorValue:
    """``x`` where the condition is true, else ``y``, element by element.

    Args:
        condition: The condition, bool.
        x: The values for a true condition.
        y: The values for a false condition. All three broadcast.

    Returns:
        A tensor of the common shape and of the promoted dtype of `x` and `y`.

    Raises:
        ValueError: The shapes do not broadcast.
        TypeError: The condition is not bool, or no dtype fits both branches.
    """
    then, other = promoted("where", x, y)
    return stage("select", broadcast_all("where", (as_tensor(condition), then, other)))


def cast(x: StrongTensorValueLike, dtype: DType) -> TensorValue:
    """Converts the elements to another dtype.

    Floats become integers by truncation and saturate at the limits of the type; NaN becomes 0.

    Args:
        x: The tensor.
        dtype: The new element type.

    Returns:
        A tensor of equal shape; `x` itself if it has the dtype already.

    Raises:
        TypeError: `dtype` is not a `DType`.
    """
    if not isinstance(dtype, DType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"cast: the dtype is {dtype!r}, expected a DType")
    return cast_to(as_tensor(x), dtype)


def gelu(x: TensorValueLike, approximate: str = "none") -> TensorValue:
    """The Gaussian error linear unit, ``x * P(X <= x)`` for a standard normal X.

    Args:
        x: The operand, of a floating-point type.
        approximate: ``none`` (by erf), ``tanh``: ``0.5 x (1 + tanh(0.7978845608 (x + 0.044715 x³)))``,
            or ``quick``: ``x sigmoid(1.702 x)``.

    Raises:
        ValueError: The approximation is unknown.
        TypeError: The operand is not of a floating-point type.
    """
    if approximate not in mlir.GELU_APPROXIMATIONS:
        raise ValueError(
            f"gelu: approximate is {approximate!r}, expected one of "
            f"{', '.join(mlir.GELU_APPROXIMATIONS)}"
        )
    return stage("gelu", (as_tensor(x),), {"approximate": approximate})


def abs(x: TensorValueLike) -> TensorValue:
    """The absolute value, element by element.

    Args:
        x: The operand, a number type.
    """
    return _unary("abs", x)


def negate(x: TensorValueLike) -> TensorValue:
    """``-x``, element by element.

    Args:
        x: The operand, a number type.
    """
    return _unary("neg", x)


def relu(x: TensorValueLike) -> TensorValue:
    """``max(x, 0)``, element by element.

    Args:
        x: The operand, a number type.
    """
    return _unary("relu", x)


def exp(x: TensorValueLike) -> TensorValue:
    """The exponential, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("exp", x)


def log(x: TensorValueLike) -> TensorValue:
    """The natural logarithm, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("log", x)


def log1p(x: TensorValueLike) -> TensorValue:
    """``log(1 + x)``, accurate for small `x`, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("log1p", x)


def sqrt(x: TensorValueLike) -> TensorValue:
    """The square root, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("sqrt", x)


def rsqrt(x: TensorValueLike) -> TensorValue:
    """``1 / sqrt(x)``, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("rsqrt", x)


def tanh(x: TensorValueLike) -> TensorValue:
    """The hyperbolic tangent, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("tanh", x)


def sin(x: TensorValueLike) -> TensorValue:
    """The sine, element by element.

    Args:
        x: The operand in radians, of a floating-point type.
    """
    return _unary("sin", x)


def cos(x: TensorValueLike) -> TensorValue:
    """The cosine, element by element.

    Args:
        x: The operand in radians, of a floating-point type.
    """
    return _unary("cos", x)


def acos(x: TensorValueLike) -> TensorValue:
    """The inverse cosine in radians, 0 to π, element by element.

    Args:
        x: The operand, of a floating-point type; clamped to [-1, 1].
    """
    return _unary("acos", x)


def atanh(x: TensorValueLike) -> TensorValue:
    """The inverse hyperbolic tangent, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("atanh", x)


def erf(x: TensorValueLike) -> TensorValue:
    """The error function, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("erf", x)


def floor(x: TensorValueLike) -> TensorValue:
    """The greatest integer not above `x`, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("floor", x)


def ceil(x: TensorValueLike) -> TensorValue:
    """The smallest integer not below `x`, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("ceil", x)


def round(x: TensorValueLike) -> TensorValue:
    """The nearest integer, ties to even, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("round", x)


def trunc(x: TensorValueLike) -> TensorValue:
    """The integer part, rounded toward zero, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("trunc", x)


def sigmoid(x: TensorValueLike) -> TensorValue:
    """``1 / (1 + exp(-x))``, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("sigmoid", x)


def silu(x: TensorValueLike) -> TensorValue:
    """``x * sigmoid(x)``, element by element.

    Args:
        x: The operand, of a floating-point type.
    """
    return _unary("silu", x)


def is_nan(x: TensorValueLike) -> TensorValue:
    """Whether an element is NaN; bool.

    Args:
        x: The operand; false for integers.
    """
    return _test("is_nan", x)


def is_inf(x: TensorValueLike) -> TensorValue:
    """Whether an element is positive or negative infinity; bool.

    Args:
        x: The operand; false for integers.
    """
    return _test("is_inf", x)
