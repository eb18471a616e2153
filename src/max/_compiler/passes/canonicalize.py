"""Brings ops to canonical form: removes no-ops, joins adjacent views, folds transposes into matmul."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from xdsl.ir import Block, Operation, SSAValue

from max._compiler.mok import MatmulOp
from max._compiler.passes.base import constant_of, ops_of
from max.mlir import DenseAttr, DimExpr, MoOp, ShapedType, TensorType, build, to_attr
from max.mlir.builtin import UNKNOWN_LOC
from max.mlir.ops import matmul as staged
from max.mlir.ops.constant import ConstantOp, TransferOp
from max.mlir.ops.elementwise import AddOp, CastOp, EqualOp, MulOp, PowOp, RsqrtOp, SelectOp, SqrtOp
from max.mlir.ops.gather import GatherOp
from max.mlir.ops.shape import (
    BroadcastToOp,
    ConcatOp,
    PadOp,
    RebindOp,
    ReshapeOp,
    SliceOp,
    TransposeOp,
)
from max.mlir.ops.spatial import ConvOp

__all__ = ["canonicalize", "insert_before", "producer", "single_of", "tensor_of"]

Rule = Callable[[MoOp], "SSAValue | None"]


def insert_before(anchor: Operation, op: MoOp) -> SSAValue:
    """Inserts an op before the anchor and returns its first result; an op without a location takes the anchor's."""
    block = anchor.parent_block()
    assert block is not None
    if op.location == UNKNOWN_LOC:
        op.location = anchor.location
    block.insert_op_before(op, anchor)
    return op.results[0]


def producer(value: SSAValue, op: type[MoOp]) -> MoOp | None:
    """The op that defines a value, if it is of the given class."""
    owner = value.owner
    return owner if isinstance(owner, op) else None


def shape_of(value: SSAValue) -> tuple[object, ...]:
    """The dims of a tensor or buffer."""
    type_ = value.type
    assert isinstance(type_, ShapedType)
    return type_.shape


def _same_type(op: MoOp) -> SSAValue | None:
    return op.operands[0] if op.operands[0].type == op.results[0].type else None


def _reshape(op: MoOp) -> SSAValue | None:
    """Removes a reshape to the same type; a reshape of a reshape becomes one."""
    if (unchanged := _same_type(op)) is not None:
        return unchanged
    inner = producer(op.operands[0], ReshapeOp)
    if inner is None:
        return None
    return insert_before(op, build(ReshapeOp, inner.operands, {}, op.result_types))


def _broadcast_to(op: MoOp) -> SSAValue | None:
    """Removes a broadcast to the same type; a broadcast of a broadcast becomes one."""
    if (unchanged := _same_type(op)) is not None:
        return unchanged
    inner = producer(op.operands[0], BroadcastToOp)
    if inner is None:
        return None
    return insert_before(op, build(BroadcastToOp, inner.operands, {}, op.result_types))


def _transpose(op: MoOp) -> SSAValue | None:
    """Removes an identity; joins two transposes; a transpose that moves axes of size 1 only becomes a reshape."""
    perm: tuple[int, ...] = op.attr("perm")
    source = op.operands[0]
    if list(perm) == list(range(len(perm))):
        return source
    if (inner := producer(source, TransposeOp)) is not None:
        first: tuple[int, ...] = inner.attr("perm")
        # axis `i` of the result is axis `perm[i]` of the inner one
        joined = tuple(first[axis] for axis in perm)
        return insert_before(op, build(TransposeOp, inner.operands, {"perm": joined}))
    shape = shape_of(source)
    moved = [axis for axis in perm if shape[axis] != 1]
    if moved == sorted(moved):
        # only axes of size 1 move: a reshape, no element moves in memory
        return insert_before(op, build(ReshapeOp, (source,), {}, op.result_types))
    return None


def _slice(op: MoOp) -> SSAValue | None:
    start, step = op.attr("start"), op.attr("step")
    is_full = all(s == 0 for s in start) and all(s == 1 for s in step)
    return op.operands[0] if is_full and op.operands[0].type == op.results[0].type else None


def _concat(op: MoOp) -> SSAValue | None:
    """Drops operands that are empty along the axis; a concat of one operand becomes the operand."""
    axis: int = op.attr("axis")
    kept = [v for v in op.operands if shape_of(v)[axis] != 0]
    if len(kept) == 1 and kept[0].type == op.results[0].type:
        return kept[0]
    # where all are empty, one must stay to be the result
    if len(kept) == len(op.operands) or not kept:
        return None
    return insert_before(op, build(ConcatOp, kept, {"axis": axis}))


def _reduce_one(op: MoOp) -> SSAValue | None:
    """A reduction over an axis of size 1 is the identity."""
    return op.operands[0] if shape_of(op.operands[0])[op.attr("axis")] == 1 else None


def _matmul(op: MoOp) -> SSAValue | None:
    """`mo.matmul(x, transpose(w))` becomes `mok.matmul(x, w) {transpose_b = true}`."""
    x, y = op.operands
    inner = producer(y, TransposeOp)
    if inner is None:
        return None
    perm: tuple[int, ...] = inner.attr("perm")
    rank = len(perm)
    if perm != (*range(rank - 2), rank - 1, rank - 2):
        return None
    matmul = MatmulOp.create(
        operands=(x, inner.operands[0]),
        result_types=op.result_types,
        attributes={"transpose_b": to_attr(True)},
        location=op.location,
    )
    return insert_before(op, matmul)


def _gather(op: MoOp) -> SSAValue | None:
    """A gather of one constant index becomes a slice, a view; `gather(cast(table))` becomes `cast(gather(table))`: only
    the gathered rows are converted.
    """
    if (part := _slice_at(op)) is not None:
        return part
    inner = producer(op.operands[0], CastOp)
    if inner is None:
        return None
    result = op.results[0].type
    source = inner.operands[0].type
    assert isinstance(result, TensorType) and isinstance(source, ShapedType)
    # only a widening cast: the gather then reads fewer bytes
    if source.dtype.size_in_bytes >= result.dtype.size_in_bytes:
        return None
    rows = insert_before(op, build(GatherOp, (inner.operands[0], op.operands[1]), op.attrs))
    return insert_before(op, build(CastOp, (rows,), {}, (result,)))


def _slice_at(op: MoOp) -> SSAValue | None:
    """What a gather reads if its index is one constant in range, maybe repeated, as a slice; else None."""
    source, index = op.operands
    number = single_of(index)
    type_ = source.type
    axis: int = op.attr("axis")
    if number is None or not isinstance(type_, TensorType) or not type_.shape[axis].is_static:
        return None
    size: int = type_.shape[axis].value
    at = int(number)
    if not -size <= at < size:
        # an error at run time
        return None
    at %= size
    dims = [*type_.shape]
    start, stop = [DimExpr.of(0)] * len(dims), [*dims]
    start[axis], stop[axis], dims[axis] = DimExpr.of(at), DimExpr.of(at + 1), DimExpr.of(1)
    bounds = {"start": tuple(start), "stop": tuple(stop), "step": (DimExpr.of(1),) * len(dims)}
    part = insert_before(op, build(SliceOp, (source,), bounds, (type_.with_shape(dims),)))
    # an axis of size 1 for each axis of the index, which may repeat its constant
    shape = [*dims[:axis], *[DimExpr.of(1)] * len(shape_of(index)), *dims[axis + 1 :]]
    if shape != dims:
        part = insert_before(op, build(ReshapeOp, (part,), {}, (type_.with_shape(shape),)))
    return insert_before(op, build(BroadcastToOp, (part,), {}, op.result_types))


def single_of(value: SSAValue) -> Any:
    """The element of a constant that has one, seen through views, such as broadcasts and transposes; else None.

    Args:
        value: The constant, or a view of it.
    """
    while isinstance(view := value.owner, MoOp) and view.spec.view:
        value = view.operands[0]
    array = constant_of(value.owner)
    return array.reshape(-1)[0] if array is not None and array.size == 1 else None


def _conv(op: MoOp) -> SSAValue | None:
    """Zeros that pad an image become the padding of the convolution that reads it."""
    image, weight = op.operands
    transpose = producer(image, TransposeOp)
    pad = producer(image if transpose is None else transpose.operands[0], PadOp)
    if pad is None or pad.attr("mode") != "constant" or pad.attr("value") != 0:
        return None
    low, high = pad.attr("low"), pad.attr("high")
    if transpose is not None:
        # in the order of the convolution's axes
        low, high = ([side[axis] for axis in transpose.attr("perm")] for side in (low, high))
    margins = list(zip(low, high, strict=True))
    if any(not side.is_static or side.value < 0 for pair in margins for side in pair):
        return None
    # batches and channels have no padding in a convolution
    if any(side.value for pair in (margins[0], margins[-1]) for side in pair):
        return None
    # [low, high] of each axis between batches and channels
    padding: list[int] = [*op.attr("padding")]
    for i, pair in enumerate(margins[1:-1]):
        taps, dilation = shape_of(weight)[i], op.attr("dilation")[i]
        for side in range(2):
            padding[2 * i + side] += pair[side].value
            # more padding than taps: windows of zeros only, which kernels do not expect
            if not isinstance(taps, DimExpr) or not taps.is_static:
                return None
            if padding[2 * i + side] > (taps.value - 1) * dilation:
                return None
    inner = pad.operands[0]
    if transpose is not None:
        perm = tuple(transpose.attr("perm"))
        inner = insert_before(op, build(TransposeOp, (inner,), {"perm": perm}))
    return insert_before(
        op, build(ConvOp, (inner, weight), {**op.attrs, "padding": tuple(padding)})
    )


def _transfer(op: MoOp) -> SSAValue | None:
    """Joins two transfers, and removes transfers to the device of their operand."""
    inner = producer(op.operands[0], TransferOp)
    if inner is None:
        return _same_type(op)
    if inner.operands[0].type == op.results[0].type:
        return inner.operands[0]
    return insert_before(op, build(TransferOp, inner.operands, {}, op.result_types))


def _pow(op: MoOp) -> SSAValue | None:
    """Small constant powers of floats as products and roots."""
    x, y = op.operands
    number = single_of(y)
    type_ = x.type
    if number is None or not isinstance(type_, TensorType) or not type_.dtype.is_float():
        return None
    match float(number):
        case 1.0:
            return x
        case 2.0:
            return insert_before(op, build(MulOp, (x, x)))
        case 3.0:
            return insert_before(op, build(MulOp, (insert_before(op, build(MulOp, (x, x))), x)))
        case 0.5 | -0.5 as power:
            # unlike roots, powers of -0.0 are those of 0.0, and powers of -inf those of inf
            infinite = insert_before(op, build(EqualOp, (x, tensor_of(op, type_, -math.inf))))
            base = insert_before(op, build(AddOp, (x, tensor_of(op, type_, 0.0))))
            base = (infinite, tensor_of(op, type_, math.inf), base)
            base = insert_before(op, build(SelectOp, base))
            return insert_before(op, build(SqrtOp if power > 0 else RsqrtOp, (base,)))
        case _:
            return None


def tensor_of(op: MoOp, type_: TensorType, number: float) -> SSAValue:
    """A tensor of one number, before an op.

    Args:
        op: The op.
        type_: The type of the tensor.
        number: Its elements.
    """
    scalar_type = TensorType.get(type_.dtype, (), type_.device)
    attr = {"value": DenseAttr.of(np.asarray(number).astype(type_.dtype.to_numpy()))}
    scalar = insert_before(op, build(ConstantOp, (), attr, (scalar_type,)))
    return insert_before(op, build(BroadcastToOp, (scalar,), {}, (type_,)))


def _pad(op: MoOp) -> SSAValue | None:
    """Padding by symbolic amounts becomes a concat per axis: the kernel takes constant amounts only."""
    low, high = op.attr("low"), op.attr("high")
    if not low:
        return op.operands[0]
    if all(amount.is_static for amount in (*low, *high)):
        return None
    value = op.operands[0]
    type_ = value.type
    assert isinstance(type_, TensorType)
    for axis, amounts in enumerate(zip(low, high, strict=True)):
        assert isinstance(value.type, TensorType)
        shape = value.type.shape
        margins = [
            tensor_of(
                op, type_.with_shape([*shape[:axis], amount, *shape[axis + 1 :]]), op.attr("value")
            )
            if amount != 0
            else None
            for amount in amounts
        ]
        parts = [part for part in (margins[0], value, margins[1]) if part is not None]
        if len(parts) > 1:
            value = insert_before(op, build(ConcatOp, parts, {"axis": axis}))
    return value


RULES: dict[type[MoOp], Rule] = {
    PadOp: _pad,
    PowOp: _pow,
    CastOp: _same_type,
    ReshapeOp: _reshape,
    BroadcastToOp: _broadcast_to,
    TransposeOp: _transpose,
    SliceOp: _slice,
    ConcatOp: _concat,
    RebindOp: _same_type,
    staged.MatmulOp: _matmul,
    GatherOp: _gather,
    ConvOp: _conv,
    TransferOp: _transfer,
}
"""The rule of each op: it returns the replacement, or None to keep the op. `_reduce_one` is that of reductions."""


def canonicalize(block: Block) -> None:
    """Applies the rules, operands before users, until none applies to an op or to what replaced it."""
    for op in ops_of(block):
        current: MoOp | None = op
        while current is not None:
            rule = RULES.get(type(current), _reduce_one if current.spec.reduction else None)
            value = rule(current) if rule is not None else None
            if value is None:
                break
            current.results[0].replace_all_uses_with(value)
            current.detach()
            current.erase()
            # a new op may be simplified further; older ones have been already
            owner = value.owner
            current = owner if isinstance(owner, MoOp) and value.first_use is not None else None
