"""Element-wise ops of one operand."""

from __future__ import annotations

from max import mlir
from max.dtype import DType
from max.graph.ops.staging.promotion import cast_to
from max.graph.ops.staging.stage import as_tensor, stage
from max.graph.value import StrongTensorValueLike, TensorValue, TensorValueLike

__all__ = [
    "abs",
    "acos",
    "atanh",
    "cast",
    "ceil",
    "cos",
    "erf",
    "exp",
    "floor",
    "gelu",
    "is_inf",
    "is_nan",
    "log",
    "log1p",
    "logical_not",
    "negate",
    "relu",
    "round",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "tanh",
    "trunc",
]


def _unary(op: str, x: TensorValueLike) -> TensorValue:
    return stage(op, (as_tensor(x),))


def _test(op: str, x: TensorValueLike) -> TensorValue:
    tensor = as_tensor(x)
    if not tensor.dtype.is_float():
        # integers are never NaN or infinite: the result is false
        return stage("not_equal", (tensor, tensor))
    return stage(op, (tensor,))


def logical_not(x: TensorValueLike) -> TensorValue:
    """``not x``, element by element.

    Args:
        x: The operand, bool.
    """
    return _unary("not", x)


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
        x: The operand, of a floating-point type. Values outside of [-1, 1] are clamped: the result of 1.5 is 0.
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
