"""Element-wise ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from max._interpreter.core import Array, Frame, implements, widen
from max.dtype import DType
from max.dtype.rounding import convert_rounding_once
from max.mlir import MoOp
from max.mlir.types import ShapedType

# NumPy has no erf
_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """The error function."""
    return np.asarray(_erf(x.astype(np.float64)), np.float64).reshape(x.shape).astype(x.dtype)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, without overflow."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + decay), decay / (1 + decay)).astype(x.dtype)


_UNARY: dict[str, Callable[[Array], Array]] = {
    "abs": np.abs,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "acos": lambda x: np.arccos(np.clip(x, -1, 1)),
    "atanh": np.arctanh,
    "erf": erf,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "trunc": np.trunc,
    # -0 and NaN stay
    "relu": lambda x: np.where(x < 0, x.dtype.type(0), x),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "not": np.logical_not,
    "is_nan": np.isnan,
    "is_inf": np.isinf,
}


def _pow(x: Array, y: Array) -> Array:
    if x.dtype.kind not in "iu":
        # NumPy takes the square root for one power of 0.5: of -0.0 and -inf it is not C's pow
        root = (y == 0.5) & ((x == 0) | np.isinf(x))
        return np.where(root, np.abs(x), np.power(x, y))
    if x.dtype.kind == "u":
        return np.power(x, y)
    # negative exponents: NumPy raises for integers; the quotient truncates to 0 unless x is 1 or -1
    power = np.power(x, np.maximum(y, 0))
    sign = np.where(np.mod(y, 2) == 0, 1, -1)
    reciprocal = np.where(x == 1, 1, np.where(x == -1, sign, 0))
    return np.where(y >= 0, power, reciprocal).astype(x.dtype)


def _div(x: Array, y: Array) -> Array:
    return np.floor_divide(x, y) if x.dtype.kind in "iu" else np.divide(x, y)


def _shift_bits(x: Array, y: Array, left: bool) -> Array:
    """Shifts by less than 0, or by the width or more, move all bits out."""
    bits = x.dtype.itemsize * 8
    inside = (y >= 0) & (y < bits)
    amount = np.where(inside, y, 0).astype(x.dtype)
    shifted = np.left_shift(x, amount) if left else np.right_shift(x, amount)
    rest = np.zeros_like(x) if left or x.dtype.kind == "u" else np.where(x < 0, -1, 0)
    return np.where(inside, shifted, rest).astype(x.dtype)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _div,
    "floor_div": np.floor_divide,
    "mod": np.mod,
    "pow": _pow,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
    "shift_left": lambda x, y: _shift_bits(x, y, True),
    "shift_right": lambda x, y: _shift_bits(x, y, False),
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
}


def _unary(function: Callable[[Array], Array]) -> Callable[..., Array]:
    def evaluate(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
        return np.asarray(function(widen(operands[0])))

    return evaluate


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def evaluate(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
        return np.asarray(function(widen(operands[0]), widen(operands[1])))

    return evaluate


for _name, _function in _UNARY.items():
    implements(_name)(_unary(_function))
for _name, _function in _BINARY.items():
    implements(_name)(_binary(_function))


@implements("gelu")
def _gelu(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = widen(operands[0])
    match op.attr("approximate"):
        case "tanh":
            # both approximations are of Hendrycks and Gimpel, 2016
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return (0.5 * x * (1 + np.tanh(inner))).astype(x.dtype)
        case "quick":
            return x * sigmoid(x * x.dtype.type(1.702))
        case _:
            return (0.5 * x * (1 + erf((x / math.sqrt(2)).astype(x.dtype)))).astype(x.dtype)


def _to_integers(x: Array, dtype: np.dtype[Any]) -> Array:
    """Truncates floats and saturates them at the limits of the dtype; NaN becomes 0."""
    info = np.iinfo(dtype)
    # the exclusive upper limit: a power of two, which float64 represents, unlike the maximum of 64 bits
    low, high = float(info.min), 2.0 ** (info.bits - (dtype.kind == "i"))
    truncated = np.trunc(x.astype(np.float64))
    in_range = (truncated >= low) & (truncated < high)
    result: Array = np.where(in_range, truncated, 0).astype(dtype)
    result[truncated >= high] = info.max
    result[truncated < low] = info.min
    return result


@implements("cast")
def _cast(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    x = operands[0]
    target = op.results[0].type
    assert isinstance(target, ShapedType)
    if target.dtype is DType.bool:
        return widen(x) != 0
    if target.dtype.is_integral() and x.dtype.kind not in "biu":
        return _to_integers(widen(x), target.dtype.to_numpy())
    return convert_rounding_once(x, target.dtype.to_numpy())


@implements("select")
def _select(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Array:
    return np.where(*operands)
