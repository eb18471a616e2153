"""Functions of the bits of integers and floats: a kernel of the kernel language, as no op of the graph API has them."""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max.dtype import DType
from max.experimental import functional as F
from max.experimental.array_api.operands import pair_of
from max.experimental.tensor import Tensor
from max.graph import TensorType, TensorValue, ops

__all__ = [
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "copysign",
    "nextafter",
    "signbit",
]

_KERNEL = "max.array_api.bits"
_WORDS = {DType.float32: DType.int32, DType.float64: DType.int64}


@k.register(_KERNEL)
def _bits(out: k.Output, x: k.Input, y: k.Input, ctx: k.Context, *, kind: str) -> None:
    for i in ctx.parallel(out.shape[0]):
        if kind == "and":
            out[i] = x[i] & y[i]
        elif kind == "or":
            out[i] = x[i] | y[i]
        elif kind == "xor":
            out[i] = x[i] ^ y[i]
        elif kind == "left":
            out[i] = x[i] << y[i]
        elif kind == "right":
            out[i] = x[i] >> y[i]
        else:  # the bits of a float
            out[i] = k.bitcast(x[i], out.dtype)


@k.register(_KERNEL + ".float")
def _float_of(out: k.Output, x: k.Input, ctx: k.Context) -> None:
    for i in ctx.parallel(out.shape[0]):
        out[i] = k.bitcast(x[i], out.dtype)


@F.functional
def _stage(x: TensorValue, y: TensorValue, kind: str, dtype: DType) -> TensorValue:
    x, y = ops.reshape(x, (-1,)), ops.reshape(y, (-1,))
    result = TensorType(dtype, x.shape, x.device)
    return ops.custom(_KERNEL, x.device, [x, y], [result], {"kind": kind})[0].tensor


@F.functional
def _stage_float(x: TensorValue, dtype: DType) -> TensorValue:
    flat = ops.reshape(x, (-1,))
    result = TensorType(dtype, flat.shape, x.device)
    return ops.custom(_KERNEL + ".float", x.device, [flat], [result])[0].tensor


def _of_integers(name: str, kind: str, x1: Any, x2: Any) -> Tensor:
    x1, x2 = pair_of(name, x1, x2)
    if not x1.dtype.is_integral():
        raise TypeError(f"{name}: the operands are {x1.dtype.name}, expected integers")
    return _stage(x1, x2, kind, x1.dtype).reshape(list(x1.shape))


def bitwise_and(x1: Any, x2: Any, /) -> Tensor:
    """The bits that two integers share; of bools `logical_and`."""
    if _are_bools(x1, x2):
        return F.logical_and(x1, x2)
    return _of_integers("bitwise_and", "and", x1, x2)


def bitwise_or(x1: Any, x2: Any, /) -> Tensor:
    """The bits of either of two integers; of bools `logical_or`."""
    if _are_bools(x1, x2):
        return F.logical_or(x1, x2)
    return _of_integers("bitwise_or", "or", x1, x2)


def bitwise_xor(x1: Any, x2: Any, /) -> Tensor:
    """The bits in which two integers differ; of bools `logical_xor`."""
    if _are_bools(x1, x2):
        return F.logical_xor(x1, x2)
    return _of_integers("bitwise_xor", "xor", x1, x2)


def bitwise_invert(x: Tensor, /) -> Tensor:
    """All bits of integers inverted; of bools `logical_not`."""
    if x.dtype is DType.bool:
        return F.logical_not(x)
    ones = -1 if x.dtype.is_signed_integral() else (1 << x.dtype.size_in_bits) - 1
    return _of_integers("bitwise_invert", "xor", x, ones)


def bitwise_left_shift(x1: Any, x2: Any, /) -> Tensor:
    """``x1 << x2``; the number of places is less than that of the bits."""
    return _of_integers("bitwise_left_shift", "left", x1, x2)


def bitwise_right_shift(x1: Any, x2: Any, /) -> Tensor:
    """``x1 >> x2``, which keeps the sign; the number of places is less than that of the bits."""
    return _of_integers("bitwise_right_shift", "right", x1, x2)


def _are_bools(*operands: Any) -> bool:
    return all(isinstance(x, bool) or getattr(x, "dtype", None) is DType.bool for x in operands)


def signbit(x: Tensor, /) -> Tensor:
    """Whether the sign bit is set, which -0.0 and some NaNs have."""
    return _word("signbit", x) < 0


def copysign(x1: Any, x2: Any, /) -> Tensor:
    """The magnitude of `x1` with the sign of `x2`."""
    x1, x2 = pair_of("copysign", x1, x2)
    low = (1 << (x1.dtype.size_in_bits - 1)) - 1
    first, second = _word("copysign", x1), _word("copysign", x2)
    return _float(bitwise_or(bitwise_and(first, low), bitwise_and(second, ~low)), x1.dtype)


def nextafter(x1: Any, x2: Any, /) -> Tensor:
    """The next float from `x1` in the direction of `x2`."""
    x1, x2 = pair_of("nextafter", x1, x2)
    word = _word("nextafter", x1)
    # floats of one sign are ordered as their bits
    away = F.equal(x1 > 0, x2 > x1)
    step = F.where(away, Tensor.ones_like(word.type), Tensor.full_like(word.type, -1))
    least = bitwise_or(bitwise_and(_word("nextafter", x2), -1 << (x1.dtype.size_in_bits - 1)), 1)
    stepped = _float(F.where(F.equal(x1, 0), least, word + step), x1.dtype)
    result = F.where(F.equal(x1, x2), x2, stepped)
    return F.where(F.logical_or(F.is_nan(x1), F.is_nan(x2)), x1 + x2, result)


def _word(name: str, x: Tensor) -> Tensor:
    """The bits of a float as an integer."""
    if x.dtype not in _WORDS:
        raise TypeError(f"{name}: the operand is {x.dtype.name}, expected float32 or float64")
    return _stage(x, x, "word", _WORDS[x.dtype]).reshape(list(x.shape))


def _float(word: Tensor, dtype: DType) -> Tensor:
    return _stage_float(word, dtype).reshape(list(word.shape))
