"""Keeps quantized values in floats where a region rounds them to codes and widens the codes again.

A pair of ONNX's `QuantizeLinear` and `DequantizeLinear` is staged as ten ops, of which five go through integers::

    y = round(x / scale) + zero;  code = cast(min(max(y, low), high));  (cast(cast(code) - zero)) * scale

The clipped sum is an integer that float32 holds, so that the casts change nothing but NaN, which becomes the code 0,
and -0.0. In the middle of a region they take more instructions than the rest. Of scaled integers, as products of codes
give them, no element is NaN. Then the limits are moved by the zero point instead of the codes, and what is cast at the
end of a region is known to fit.
"""

from __future__ import annotations

import numpy as np
from xdsl.ir import Block, SSAValue

from max._compiler.analysis.bounds import Bounds, integer_range
from max._compiler.mok import CastWithinOp, RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before, producer, single_of, tensor_of
from max._compiler.passes.redundant_ops import drop_dead_ops
from max.dtype import DType
from max.mlir import MoOp, TensorType, build
from max.mlir.ops.elementwise import (
    AbsOp,
    AddOp,
    CastOp,
    DivOp,
    GreaterOp,
    MaxOp,
    MinOp,
    MulOp,
    RoundOp,
    SelectOp,
    SubOp,
)

__all__ = ["keep_codes_in_floats"]

CODES = frozenset({DType.int8, DType.uint8})
_KEEP_ZEROS = (AddOp, SubOp, MulOp, MaxOp, MinOp, RoundOp, SelectOp)
"""Ops whose results differ in the sign of zeros only where operands do."""
_COMPARISONS = (GreaterOp,)
LARGEST_ZERO = 1 << 20
"""The largest zero point: differences from codes of 8 bits are exact in float32."""


def keep_codes_in_floats(block: Block) -> None:
    """Replaces codes that a region makes and widens by the floats that they are."""
    for region in ops_of(block):
        if not isinstance(region, RegionOp):
            continue
        body, bounds = region.block, Bounds(region)
        for op in ops_of(body):
            if type(op) is CastOp and _dtype(op.results[0]) is DType.float32:
                _replace(op, bounds)
        for op in ops_of(body):
            if type(op) is CastOp and _fits(op, bounds):
                cast = build(CastWithinOp, op.operands, {}, op.result_types)
                op.results[0].replace_all_uses_with(insert_before(op, cast))
        drop_dead_ops(body)


def _fits(op: MoOp, bounds: Bounds) -> bool:
    """Whether a cast takes floats that the integers of its result hold."""
    (source,), (result,) = op.operands, op.results
    limits = None if _dtype(result) is DType.bool else integer_range(_dtype(result))
    if limits is None or _dtype(source) is not DType.float32:
        return False
    found = bounds.of(source)
    return found is not None and limits[0] <= found[0] and found[1] <= limits[1]


def _replace(op: MoOp, bounds: Bounds) -> None:
    """Replaces the floats of codes less a zero point, if the codes are made of floats."""
    codes, zero = op.operands[0], 0
    difference = producer(codes, SubOp)
    if difference is not None and _dtype(codes) is DType.int32:
        number = single_of(difference.operands[1])
        wide = producer(difference.operands[0], CastOp)
        if number is None or wide is None:
            return
        codes, zero = wide.operands[0], int(number)
    made = producer(codes, CastOp)
    if made is None or _dtype(codes) not in CODES or abs(zero) > LARGEST_ZERO:
        return
    clipped = _clipped_integers(made.operands[0], _dtype(codes))
    if clipped is None:
        return
    result = _floats_of(op, clipped, zero, bounds)
    op.results[0].replace_all_uses_with(result)
    op.detach()
    op.erase()


def _floats_of(
    op: MoOp, clip: tuple[SSAValue, float, float], zero: int, bounds: Bounds
) -> SSAValue:
    """The floats of clipped integers less a zero point, before a cast that they replace."""
    value, low, high = clip
    type_ = value.type
    assert isinstance(type_, TensorType)

    def number_of(x: float) -> SSAValue:
        return tensor_of(op, type_, x)

    def select(condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return insert_before(op, build(SelectOp, (condition, a, b)))

    finite = bounds.of(value) is not None
    signless = finite and _is_sign_of_zero_unused(op.results[0])
    moved = producer(value, AddOp)
    if signless and zero and moved is not None and single_of(moved.operands[1]) == zero:
        # the same without the zero point, which moves the limits
        value, low, high, zero = moved.operands[0], low - zero, high - zero, 0
    # one instruction each, as NaN need not stay
    more = insert_before(op, build(GreaterOp, (value, number_of(low))))
    result = select(more, value, number_of(low))
    less = insert_before(op, build(GreaterOp, (number_of(high), result)))
    result = select(less, result, number_of(high))
    if zero:
        if not finite:
            # NaN is the code 0
            invalid = insert_before(op, build("mo.is_nan", (value,)))
            result = select(invalid, number_of(0.0), result)
        result = insert_before(op, build(SubOp, (result, number_of(float(zero)))))
    elif not signless:
        # and without a zero point so is -0.0
        size = insert_before(op, build(AbsOp, (value,)))
        valid = insert_before(op, build(GreaterOp, (size, number_of(0.0))))
        result = select(valid, result, number_of(0.0))
    return result


def _is_sign_of_zero_unused(value: SSAValue) -> bool:
    """Whether the sign of zeros among the elements changes at most that of other zeros, which become integers."""
    for use in value.uses:
        user = use.operation
        if type(user) in _COMPARISONS or (
            type(user) is CastOp and not _dtype(user.results[0]).is_float()
        ):
            continue
        # of a divisor it is the sign of an infinity
        keeps = type(user) in _KEEP_ZEROS or (type(user) is DivOp and use.index == 0)
        if not keeps or not _is_sign_of_zero_unused(user.results[0]):
            return False
    return True


def _clipped_integers(value: SSAValue, dtype: DType) -> tuple[SSAValue, float, float] | None:
    """The integers in float32 that are clipped to limits around 0 and in the range of a dtype, and the limits; else
    None.
    """
    if _dtype(value) is not DType.float32:
        return None
    least = producer(value, MinOp)
    if least is None:
        return None
    most = producer(least.operands[0], MaxOp)
    if most is None:
        return None
    low, high = single_of(most.operands[1]), single_of(least.operands[1])
    info = np.iinfo(dtype.to_numpy())
    if low is None or high is None or not info.min <= low <= 0 <= high <= info.max:
        return None
    inner = most.operands[0]
    if not (_is_integer(low) and _is_integer(high) and _has_integers(inner)):
        return None
    return inner, float(low), float(high)


def _has_integers(value: SSAValue) -> bool:
    """Whether the finite elements are integers: rounded numbers, and sums of them and an integer."""
    if _is_rounded(value):
        return True
    total = producer(value, AddOp)
    if total is None or not _is_rounded(total.operands[0]):
        return False
    number = single_of(total.operands[1])
    return number is not None and _is_integer(number) and abs(number) <= LARGEST_ZERO


def _is_rounded(value: SSAValue) -> bool:
    return producer(value, RoundOp) is not None


def _is_integer(number: float) -> bool:
    return float(number).is_integer()


def _dtype(value: SSAValue) -> DType:
    type_ = value.type
    assert isinstance(type_, TensorType)
    return type_.dtype
