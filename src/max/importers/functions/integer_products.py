"""Products and convolutions of codes with constant weights, as integers.

A code less its zero point times a weight is an integer, and so is their sum; a scale makes it a float once. Codes are
signed bytes here: unsigned ones less 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.graph import TensorValue, ops
from max.importers.functions.convolutions import Pairs
from max.importers.functions.indexing import pad_axes
from max.importers.values import Imported

Array = npt.NDArray[Any]

__all__ = [
    "Codes", "Quantized", "centered_codes", "chosen_codes", "codes_of_same", "convolved_codes", "convolved_sums",
    "dequantized_tensor", "left_codes", "multiplied_codes", "permute_source", "quantized_convolution", "quantized_of",
    "quantized_product", "reshape_source", "signed_codes", "usual_scale",
]  # fmt: skip

_DEEPEST = 1 << 16
"""Elements of a sum of products of bytes that 32 bits hold."""
_CHANNELS = 16
"""Images of fewer channels get more of them, up to whole lanes of four bytes."""
_LANE = 4
_EXACT = 1 << 10
"""Elements of a sum of products of bytes that float32 holds exactly."""
_BYTES = (DType.int8, DType.uint8)
_USUAL = (1e-30, 1e30)
"""Scales whose products with codes are normal numbers."""


@dataclass(frozen=True)
class Codes:
    """Codes of a tensor as signed bytes.

    Attributes:
        tensor: int8.
        shift: What was subtracted from the codes, 128 for unsigned ones.
    """

    tensor: TensorValue
    shift: int


@dataclass(frozen=True)
class Quantized:
    """What a dequantized tensor was before.

    Attributes:
        codes: The codes.
        scale: One, or one for each place along the axis.
        zero: The same; None: 0.
        axis: The axis.
    """

    codes: Imported
    scale: Imported
    zero: Imported | None
    axis: int


def _axis(source: Quantized) -> int:
    rank = source.codes.rank
    return source.axis + rank if source.axis < 0 else source.axis


def _one(value: Imported | None) -> int | None:
    """A zero point that is one number; absent: 0."""
    if value is None:
        return 0
    numbers = value.numbers
    return int(numbers.reshape(-1)[0]) if numbers is not None and numbers.size == 1 else None


def _weight(value: Imported, axis: int) -> tuple[Array, Array] | None:
    """The integers of a constant weight, and their scales: one, or one for each place along an axis."""
    source = quantized_of(value)
    if source is None or source.scale.numbers is None or source.scale.dtype is not DType.float32:
        return None
    scale = source.scale.numbers.reshape(-1)
    # a scale can be taken out of the sum only if it is constant along k
    if source.scale.rank > 1 or (scale.size > 1 and _axis(source) != axis):
        return None
    weight = centered_codes(source.codes, source.zero, axis)
    return None if weight is None else (weight, scale)


def left_codes(value: Imported) -> tuple[Codes, int, TensorValue] | None:
    """The codes of a left operand with one scale, their zero point and the scale."""
    source = quantized_of(value)
    if source is None or source.scale.dtype is not DType.float32:
        return None
    # rows with scales of their own would need a column of them
    if source.scale.rank and list(source.scale.shape) != [1]:
        return None
    zero = _one(source.zero)
    # of constants nothing is computed in a run
    if zero is None or source.codes.numbers is not None:
        return None
    codes = signed_codes(source.codes)
    return None if codes is None else (codes, zero, ops.reshape(source.scale.tensor, []))


def quantized_product(
    left: Imported, right: Imported, transposed: bool = False
) -> TensorValue | None:
    """The product of a tensor and a weight ``[K, N]`` that were dequantized, from their codes; None: in floats.

    Args:
        left: The tensor.
        right: The weight.
        transposed: Whether the weight is ``[N, K]``.
    """
    if right.rank != 2:
        return None
    x, weight = left_codes(left), _weight(right, 0 if transposed else 1)
    if x is None or weight is None:
        return None
    numbers, scales = weight
    codes, zero, scale = x
    total = multiplied_codes(codes, zero, numbers.T if transposed else numbers)
    return None if total is None else ops.cast(total, DType.float32) * (_row(scales) * scale)


def quantized_convolution(
    image: Imported,
    filters: Imported,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    groups: int,
) -> TensorValue | None:
    """The convolution of a tensor and a filter that were dequantized, from their codes; None: in floats."""
    found = convolved_sums(image, filters, strides, dilations, pairs, groups)
    if found is None:
        return None
    total, factors, scale = found
    return ops.cast(total, DType.float32) * (ops.constant(factors) * scale)


def convolved_sums(
    image: Imported,
    filters: Imported,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    groups: int,
    bias_of: Callable[[Array], Array | None] | None = None,
) -> tuple[TensorValue, Array, TensorValue] | None:
    """`quantized_convolution` before its products with scales: the sums, the scales of the filter in a shape that
    broadcasts with them, and that of the image.

    Args:
        image: The image.
        filters: The filters.
        strides: The steps of both axes.
        dilations: The distances of taps of both axes.
        pairs: The padding before and after both axes.
        groups: The number of groups.
        bias_of: The int32 bias that is added to the sums of each filter, from the filter's scales; None if it has none
            that fits, and then there are no sums.
    """
    x, weight = left_codes(image), _weight(filters, 0)
    if x is None or weight is None or groups != 1:
        return None
    numbers, scales = weight
    codes, zero, scale = x
    scales = scales.reshape([scales.size, 1, 1] if scales.size > 1 else [])
    bias = None if bias_of is None else bias_of(scales)
    if bias_of is not None and bias is None:
        return None
    total = convolved_codes(codes, zero, numbers, strides, dilations, pairs, bias)
    return None if total is None else (total, scales, scale)


def _row(scales: Array) -> TensorValue:
    return ops.constant(scales if scales.size > 1 else scales.reshape(()))


def quantized_of(value: Imported) -> Quantized | None:
    """What a value was before it was dequantized."""
    return value.source if isinstance(value.source, Quantized) else None


def permute_source(source: Quantized, order: Sequence[int]) -> Quantized:
    """What a dequantized tensor with its axes in another order was before."""
    numbers = source.codes.numbers
    if numbers is not None and not source.codes.stored_as:
        codes = Imported(contents=numbers.transpose(order))
    else:
        codes = _view_codes(source.codes, lambda x: ops.permute(x, list(order)))
    return Quantized(codes, source.scale, source.zero, list(order).index(_axis(source)))


def reshape_source(source: Quantized, shape: Sequence[Any]) -> Quantized | None:
    """What a dequantized tensor of another shape was before; None where places along an axis have a scale."""
    if source.scale.rank or (source.zero is not None and source.zero.rank):
        return None
    return Quantized(
        _view_codes(source.codes, lambda x: ops.reshape(x, list(shape))),
        source.scale,
        source.zero,
        0,
    )


def _view_codes(codes: Imported, view: Callable[[TensorValue], TensorValue]) -> Imported:
    found = codes.source
    moved = Codes(view(found.tensor), found.shift) if isinstance(found, Codes) else None
    return Imported(view(codes.tensor), stored_as=codes.stored_as, source=moved)


def chosen_codes(value: Imported, choose: Callable[[TensorValue], TensorValue]) -> Quantized | None:
    """What elements of a dequantized tensor are as codes; None: in floats.

    Args:
        value: The tensor.
        choose: Chooses elements, such as the greatest: which ones does not depend on a positive scale and a zero point.
    """
    source, x = quantized_of(value), left_codes(value)
    scale = None if source is None else usual_scale(source.scale)
    if source is None or x is None or scale is None:
        return None
    codes, _, _ = x
    chosen = choose(codes.tensor)
    stored = chosen
    if codes.shift:
        assert source.codes.dtype is not None
        stored = ops.cast(ops.cast(chosen, DType.int32) + codes.shift, source.codes.dtype)
    return Quantized(
        Imported(stored, source=Codes(chosen, codes.shift)), source.scale, source.zero, 0
    )


def usual_scale(scale: Imported) -> float | None:
    """One constant scale whose products with codes neither overflow nor underflow; else None."""
    numbers = scale.numbers
    if numbers is None or numbers.size != 1:
        return None
    number = float(numbers.reshape(-1)[0])
    return number if _USUAL[0] < number < _USUAL[1] else None


def dequantized_tensor(source: Quantized) -> Imported:
    """The tensor of codes with one scale."""
    codes, zero = signed_codes(source.codes), _one(source.zero)
    assert codes is not None and zero is not None
    moved = ops.cast(codes.tensor, DType.int32) - (zero - codes.shift)
    scale = ops.reshape(source.scale.tensor, [])
    return Imported(ops.cast(moved, DType.float32) * scale, source=source)


def codes_of_same(value: Imported, scale: Imported, zero: Imported | None) -> Imported | None:
    """The codes that a tensor was dequantized from, if their scale and zero point are these: rounding the quotients
    gives the same codes again.
    """
    source = quantized_of(value)
    if source is None or left_codes(value) is None:
        return None
    one = usual_scale(source.scale)
    if one is None or usual_scale(scale) != one or scale.dtype is not source.scale.dtype:
        return None
    # without a zero point the codes are uint8
    dtype = DType.uint8 if zero is None else zero.dtype
    same = _one(zero) is not None and _one(zero) == _one(source.zero)
    return source.codes if same and dtype is source.codes.dtype else None


def signed_codes(codes: Imported) -> Codes | None:
    """Codes as signed bytes; None for codes of other sizes."""
    if isinstance(codes.source, Codes):
        return codes.source
    if codes.dtype not in _BYTES or codes.stored_as:
        return None
    if codes.dtype is DType.int8:
        return Codes(codes.tensor, 0)
    # kernels multiply signed bytes: unsigned ones are moved by half their range
    lower = ops.cast(codes.tensor, DType.int32) - 128
    return Codes(ops.cast(lower, DType.int8), 128)


def centered_codes(codes: Imported, zero: Imported | None, axis: int) -> Array | None:
    """Constant codes less their zero points, if they are bytes; `axis` is that of the zero points."""
    numbers = codes.numbers
    if numbers is None or codes.dtype not in _BYTES or codes.stored_as:
        return None
    offset = np.zeros((), np.int32) if zero is None else zero.numbers
    if offset is None:
        return None
    # unsigned codes below 128 are signed bytes as they are
    if not offset.any():
        return numbers if numbers.dtype == np.int8 or numbers.max(initial=0) < 128 else None
    if offset.ndim == 1 and offset.size > 1:
        offset = offset.reshape([-1 if i == axis else 1 for i in range(numbers.ndim)])
    # differences of bytes have 9 bits; those that fit into 8 are taken
    wide = numbers.astype(np.int16) - (
        offset if offset.ndim == numbers.ndim else offset.reshape(())
    )
    return wide if wide.min(initial=0) >= -128 and wide.max(initial=0) < 128 else None


def multiplied_codes(
    x: Codes, zero: int | TensorValue, weight: Array, bias: Array | None = None
) -> TensorValue | None:
    """The int32 product of codes ``[…, K]``, less their zero point, with weights ``[K, N]``; None if it may not fit.

    Args:
        x: The codes.
        zero: Their zero point, before the shift.
        weight: Integers of 8 bits.
        bias: Integers of 32 bits that are added to the rows, which wrap.
    """
    if weight.ndim != 2 or weight.shape[0] > _DEEPEST or not weight.size or x.tensor.rank < 2:
        return None
    matrix = ops.constant(np.ascontiguousarray(weight.astype(np.int8)))
    total = ops.matmul(ops.cast(x.tensor, DType.int32), ops.cast(matrix, DType.int32))
    return _without_zero(total, x, zero, weight.sum(0, dtype=np.int32), bias)


def _without_zero(
    total: TensorValue, x: Codes, zero: int | TensorValue, columns: Array, bias: Array | None
) -> TensorValue:
    """Sums of products of codes, without what their zero point adds, and a bias; `columns` are the sums of the
    weights.
    """
    # sum((x - zero) w) = sum((x - shift) w) + (shift - zero) sum(w): the zero point costs one row
    if isinstance(zero, int):
        correction = columns * np.int32(x.shift - zero)
        correction = correction if bias is None else correction + bias
        return total + ops.constant(correction) if correction.any() else total
    total = total if bias is None else total + ops.constant(bias)
    shift = ops.cast(ops.reshape(zero, []), DType.int32) - x.shift
    return total - ops.constant(columns) * shift


def convolved_codes(
    x: Codes,
    zero: int,
    weight: Array,
    strides: Sequence[int],
    dilations: Sequence[int],
    pairs: Pairs,
    bias: Array | None = None,
) -> TensorValue | None:
    """The int32 convolution of codes ``[N, C, H, W]``, less their zero point, with weights ``[F, C, R, S]``; None if
    floats are faster.

    Args:
        x: The codes.
        zero: Their zero point, before the shift.
        weight: Integers of 8 bits.
        strides: The steps of both axes.
        dilations: The distances of taps of both axes.
        pairs: The padding before and after both axes.
        bias: Integers of 32 bits that are added to the sums of each filter, which wrap.
    """
    if weight.ndim != 4 or not weight.size:
        return None
    _, channels, *kernel = weight.shape
    # another number of channels: groups
    if x.tensor.shape[1] != channels or any(amount < 0 for pair in pairs for amount in pair):
        return None
    # of few channels some kernels compute in floats
    if channels < _CHANNELS and channels * np.prod(kernel) > _EXACT:
        return None
    filters = weight.astype(np.int8).transpose(2, 3, 1, 0)  # [F, C, R, S] to [R, S, C, F]
    image = x.tensor
    if channels < _CHANNELS and (missing := -channels % _LANE):
        image = pad_axes(image, [(0, 0), (0, missing), (0, 0), (0, 0)], "constant", 0)
        filters = np.pad(filters, [(0, 0), (0, 0), (0, missing), (0, 0)])
    image = ops.permute(image, [0, 2, 3, 1])
    if any(amount for pair in pairs for amount in pair):
        # the code that stands for 0
        image = pad_axes(image, [(0, 0), *pairs, (0, 0)], "constant", zero - x.shift)
    if kernel == [1, 1] and set(strides) == {1}:
        total = multiplied_codes(Codes(image, x.shift), zero, filters[0, 0], bias)
    else:
        total = ops.conv2d(
            ops.cast(image, DType.int32), ops.cast(ops.constant(np.ascontiguousarray(filters)), DType.int32),
            (strides[0], strides[1]), (dilations[0], dilations[1]),
        )  # fmt: skip
        total = _without_zero(total, x, zero, filters.sum((0, 1, 2), dtype=np.int32), bias)
    return None if total is None else ops.permute(total, [0, 3, 1, 2])
