"""Element-wise functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.creation import full_like, zeros_like
from max.experimental.array_api.data_types import UNSIGNED, astype
from max.experimental.array_api.manipulation import pair_of
from max.experimental.tensor import Tensor

__all__ = [
    "abs",
    "acos",
    "add",
    "atanh",
    "ceil",
    "clip",
    "conj",
    "cos",
    "divide",
    "equal",
    "exp",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "sin",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]


def _same_kind(name: str, op: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of one tensor that leaves integers as they are."""

    def on_tensor(x: Tensor, /) -> Tensor:
        return op(x) if x.dtype.is_float() else x

    on_tensor.__name__ = on_tensor.__qualname__ = name
    on_tensor.__doc__ = f"`max.graph.ops.{name}` of floats; integers stay as they are."
    return on_tensor


abs, exp, log, log1p, sqrt = F.abs, F.exp, F.log, F.log1p, F.sqrt
cos, sin, tanh, atanh = F.cos, F.sin, F.tanh, F.atanh
negative = F.negate
floor, round, trunc = (_same_kind(n, getattr(F, n)) for n in ("floor", "round", "trunc"))
add, subtract, multiply, divide, pow = F.add, F.sub, F.mul, F.div, F.pow
equal, not_equal, greater, greater_equal = F.equal, F.not_equal, F.greater, F.greater_equal
logical_and, logical_or, logical_xor, logical_not = (
    F.logical_and,
    F.logical_or,
    F.logical_xor,
    F.logical_not,
)


def acos(x: Tensor, /) -> Tensor:
    """The arc cosine; NaN outside of -1 to 1."""
    # the op clamps
    return F.where(F.abs(x) > 1, full_like(x, math.nan), F.acos(x))


def remainder(x1: Any, x2: Any, /) -> Tensor:
    """The remainder of a division, with the sign of `x2`, which a zero has too."""
    return F.mod(*pair_of("remainder", x1, x2))


def floor_divide(x1: Any, x2: Any, /) -> Tensor:
    """The greatest integer that is not above ``x1 / x2``, which is not rounded first; NaN of an infinite `x1`."""
    return F.floor_div(*pair_of("floor_divide", x1, x2))


def less(x1: Any, x2: Any, /) -> Tensor:
    """``x1 < x2``."""
    return F.greater(x2, x1)


def less_equal(x1: Any, x2: Any, /) -> Tensor:
    """``x1 <= x2``."""
    return F.greater_equal(x2, x1)


def maximum(x1: Any, x2: Any, /) -> Tensor:
    """The greater of two elements; NaN where one is."""
    return F.max(x1, x2)


def minimum(x1: Any, x2: Any, /) -> Tensor:
    """The smaller of two elements; NaN where one is."""
    return F.min(x1, x2)


def positive(x: Tensor, /) -> Tensor:
    """The elements."""
    return +x


def conj(x: Tensor, /) -> Tensor:
    """The complex conjugates, which of real numbers are the numbers."""
    return _numeric("conj", x)


def real(x: Tensor, /) -> Tensor:
    """The real parts, which of real numbers are the numbers."""
    return _numeric("real", x)


def imag(x: Tensor, /) -> Tensor:
    """The imaginary parts, which of real numbers are 0."""
    return zeros_like(_numeric("imag", x))


def _numeric(name: str, x: Tensor) -> Tensor:
    if x.dtype is DType.bool:
        raise TypeError(f"{name}: the operand is bool, expected numbers")
    return x


def square(x: Tensor, /) -> Tensor:
    """``x * x``."""
    return x * x


def reciprocal(x: Tensor, /) -> Tensor:
    """``1 / x``."""
    return 1 / x


def ceil(x: Tensor, /) -> Tensor:
    """The smallest integers that are not smaller; integers stay as they are."""
    return -F.floor(-x) if x.dtype.is_float() else x


def sign(x: Tensor, /) -> Tensor:
    """-1, 0 or 1; NaN of NaN."""
    zero = zeros_like(x)
    signs = (x > zero).cast(x.dtype)
    signs = signs - (zero > x).cast(x.dtype) if x.dtype not in UNSIGNED else signs
    return F.where(F.is_nan(x), x, signs) if x.dtype.is_float() else signs


def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """The elements, not below `min` and not above `max`."""
    dtype = x.dtype
    x = x if min is None else F.max(x, min)
    x = x if max is None else F.min(x, max)
    return astype(x, dtype, copy=False)


def isnan(x: Tensor, /) -> Tensor:
    """Whether elements are NaN."""
    return F.is_nan(x) if x.dtype.is_float() else full_like(x, False, dtype=DType.bool)


def isinf(x: Tensor, /) -> Tensor:
    """Whether elements are infinite."""
    return F.is_inf(x) if x.dtype.is_float() else full_like(x, False, dtype=DType.bool)


def isfinite(x: Tensor, /) -> Tensor:
    """Whether elements are neither NaN nor infinite."""
    return ~(isnan(x) | isinf(x))


def log2(x: Tensor, /) -> Tensor:
    """The logarithm to base 2."""
    return F.log(x) * (1 / math.log(2))


def log10(x: Tensor, /) -> Tensor:
    """The logarithm to base 10."""
    return F.log(x) * (1 / math.log(10))


def logaddexp(x1: Any, x2: Any, /) -> Tensor:
    """``log(exp(x1) + exp(x2))``, without overflow."""
    x1, x2 = pair_of("logaddexp", x1, x2)
    top, apart = F.max(x1, x2), F.abs(x1 - x2)
    # infinities of one sign have no difference
    same = F.equal(x1, x2)
    return top + F.log1p(F.exp(-F.where(same, zeros_like(apart), apart)))


def tan(x: Tensor, /) -> Tensor:
    """The tangent."""
    return F.sin(x) / F.cos(x)


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    """Elements of `x1` where the condition holds, else of `x2`."""
    return F.where(condition, x1, x2)
