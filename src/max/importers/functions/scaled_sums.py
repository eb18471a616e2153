"""Floats that are sums of integers times factors, such as the result of a convolution of codes.

A quantization divides them by its scale. The factors are divided instead, when the model is imported: an element then
takes a product and no division. A result may be rounded to the next code where the quotient lies between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.functions.convolutions import Pairs
from max.importers.functions.integer_products import (
    Quantized,
    convolved_sums,
    left_codes,
    quantized_of,
    usual_scale,
)
from max.importers.values import Imported

__all__ = ["ScaledSum", "add_scaled", "divide_scaled", "scaled_convolution"]

_MOST_TERMS = 2

Term = tuple[TensorValue, npt.NDArray[Any]]
"""Integers, and their factors in float32, which broadcast with them."""


@dataclass(frozen=True)
class ScaledSum:
    """What a tensor of float32 is the sum of."""

    terms: tuple[Term, ...]


def _terms(value: Imported) -> tuple[Term, ...] | None:
    if isinstance(value.source, ScaledSum):
        return value.source.terms
    found = left_codes(value)
    if found is None:
        return None
    codes, zero, _ = found
    assert isinstance(value.source, Quantized)
    scale = usual_scale(value.source.scale)
    if scale is None:
        return None
    moved = ops.cast(codes.tensor, DType.int32) - (zero - codes.shift)
    return ((moved, np.array(scale, np.float32)),)


def scaled_convolution(
    image: Imported,
    filters: Imported,
    bias: Imported | None,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    groups: int,
) -> Imported | None:
    """The convolution of a tensor and a filter that were dequantized, with the codes of a bias; None: another form."""
    source = quantized_of(image)
    scale = None if source is None else usual_scale(source.scale)
    if scale is None:
        return None
    factor = np.float32(scale)
    bias_of = None if bias is None else lambda scales: _bias_codes(bias, scales * factor)
    found = convolved_sums(image, filters, strides, dilations, pairs, groups, bias_of)
    if found is None:
        return None
    total, factors = found[0], found[1] * factor
    value = ops.cast(total, DType.float32) * ops.constant(factors)
    return Imported(value, source=ScaledSum(((total, factors),)))


def _bias_codes(bias: Imported, factors: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """The codes of a bias that was dequantized by the factors of the sums, as quantizers write it; else None."""
    source = quantized_of(bias)
    if source is None or source.codes.numbers is None or source.codes.dtype is not DType.int32:
        return None
    zero = None if source.zero is None else source.zero.numbers
    if source.zero is not None and (zero is None or zero.any()):
        return None
    scale = source.scale.numbers
    if scale is None or scale.dtype != np.float32 or source.codes.rank != 1:
        return None
    # a product that was rounded another way
    same = scale.size in (1, source.codes.numbers.size) and np.allclose(
        scale.reshape(-1), factors.reshape(-1), rtol=1e-6, atol=0
    )
    return source.codes.numbers if same else None


def add_scaled(x: Imported, y: Imported) -> ScaledSum | None:
    """What the sum of two tensors is the sum of; None if they are not both made of integers."""
    first, second = _terms(x), _terms(y)
    if first is None or second is None or len(first) + len(second) > _MOST_TERMS:
        return None
    return ScaledSum((*first, *second))


def divide_scaled(value: Imported, divisor: Imported) -> TensorValue | None:
    """The quotient of a tensor and one number, by products of integers; None if it is not made of integers."""
    number = usual_scale(divisor)
    terms = None if number is None or divisor.dtype is not DType.float32 else _terms(value)
    if terms is None or number is None:
        return None
    total: TensorValue | None = None
    for integers, factors in terms:
        quotients = (factors.astype(np.float64) / number).astype(np.float32)
        if not np.isfinite(quotients).all():
            return None
        part = ops.cast(integers, DType.float32) * ops.constant(quotients)
        total = part if total is None else total + part
    return total
