"""Functions of the bits of integers and floats (`max.experimental.tensors.bits`)."""

from __future__ import annotations

from typing import Any

from max.experimental import functional as F
from max.experimental.array_api.manipulation import pair_of
from max.experimental.tensor import Tensor
from max.experimental.tensors import bits

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

_AND, _OR, _XOR = (F.functional(op) for op in (bits.bitwise_and, bits.bitwise_or, bits.bitwise_xor))
_LEFT, _RIGHT = F.functional(bits.bitwise_left_shift), F.functional(bits.bitwise_right_shift)
_INVERT = F.functional(bits.bitwise_invert)
_WORD, _FLOAT = F.functional(bits.word_of), F.functional(bits.float_of)


def bitwise_and(x1: Any, x2: Any, /) -> Tensor:
    """The bits that two integers share; of bools `logical_and`."""
    return _AND(*pair_of("bitwise_and", x1, x2))


def bitwise_or(x1: Any, x2: Any, /) -> Tensor:
    """The bits of either of two integers; of bools `logical_or`."""
    return _OR(*pair_of("bitwise_or", x1, x2))


def bitwise_xor(x1: Any, x2: Any, /) -> Tensor:
    """The bits in which two integers differ; of bools `logical_xor`."""
    return _XOR(*pair_of("bitwise_xor", x1, x2))


def bitwise_invert(x: Tensor, /) -> Tensor:
    """All bits of integers inverted; of bools `logical_not`."""
    return _INVERT(x)


def bitwise_left_shift(x1: Any, x2: Any, /) -> Tensor:
    """``x1 << x2``; 0 where `x2` is the number of bits or more, or negative."""
    return _LEFT(*pair_of("bitwise_left_shift", x1, x2))


def bitwise_right_shift(x1: Any, x2: Any, /) -> Tensor:
    """``x1 >> x2``, which keeps the sign; all bits are the sign where `x2` is their number or more, or negative."""
    return _RIGHT(*pair_of("bitwise_right_shift", x1, x2))


def signbit(x: Tensor, /) -> Tensor:
    """Whether the sign bit is set, which -0.0 and some NaNs have."""
    return _WORD("signbit", x) < 0


def copysign(x1: Any, x2: Any, /) -> Tensor:
    """The magnitude of `x1` with the sign of `x2`."""
    x1, x2 = pair_of("copysign", x1, x2)
    # all bits but the sign
    low = (1 << (x1.dtype.size_in_bits - 1)) - 1
    first, second = _WORD("copysign", x1), _WORD("copysign", x2)
    return _FLOAT(bitwise_or(bitwise_and(first, low), bitwise_and(second, ~low)), x1.dtype)


def nextafter(x1: Any, x2: Any, /) -> Tensor:
    """The next float from `x1` in the direction of `x2`."""
    x1, x2 = pair_of("nextafter", x1, x2)
    word = _WORD("nextafter", x1)
    # floats of one sign are ordered as their bits
    away = F.equal(x1 > 0, x2 > x1)
    step = F.where(away, Tensor.ones_like(word.type), Tensor.full_like(word.type, -1))
    # from 0: the least subnormal, with the sign of x2
    least = bitwise_or(bitwise_and(_WORD("nextafter", x2), -1 << (x1.dtype.size_in_bits - 1)), 1)
    stepped = _FLOAT(F.where(F.equal(x1, 0), least, word + step), x1.dtype)
    result = F.where(F.equal(x1, x2), x2, stepped)
    return F.where(F.logical_or(F.is_nan(x1), F.is_nan(x2)), x1 + x2, result)
