"""Lowers collectives between CPU devices, which share one memory, to transfers and ordinary ops.

The sum or the concatenation is computed once, on the first device; the other devices read the same memory. This needs
neither signal buffers nor the chain.
"""

from __future__ import annotations

from functools import reduce

from xdsl.ir import Block, SSAValue

from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max.dtype import DType
from max.mlir import MoOp, TensorType, build
from max.mlir.ops.collective import AllgatherOp, AllreduceOp
from max.mlir.ops.constant import TransferOp
from max.mlir.ops.elementwise import AddOp, CastOp
from max.mlir.ops.shape import ConcatOp

__all__ = ["expand_collectives"]


def expand_collectives(block: Block) -> None:
    """Replaces `mo.allreduce` and `mo.allgather`."""
    for op in ops_of(block):
        if type(op) not in (AllreduceOp, AllgatherOp):
            continue
        # the last operand and the last result are the chain
        types = [result.type for result in op.results[:-1]]
        first = types[0]
        assert isinstance(first, TensorType)
        inputs = [_on_device_of(op, value, first) for value in op.operands[: len(types)]]
        combined = _sum(op, inputs) if type(op) is AllreduceOp else insert_before(
            op, build(ConcatOp, inputs, {"axis": op.attr("axis")})
        )  # fmt: skip
        for result, type_ in zip(op.results[:-1], types, strict=True):
            assert isinstance(type_, TensorType)
            result.replace_all_uses_with(_on_device_of(op, combined, type_))
        # the ops that replace it are ordered by their operands, so the chain goes past them
        op.results[-1].replace_all_uses_with(op.operands[-1])
        op.detach()
        op.erase()


def _on_device_of(op: MoOp, value: SSAValue, like: TensorType) -> SSAValue:
    """The value on the device of `like`."""
    type_ = value.type
    assert isinstance(type_, TensorType)
    if type_.device == like.device:
        return value
    moved_type = TensorType.get(type_.dtype, type_.shape, like.device)
    return insert_before(op, build(TransferOp, (value,), {}, (moved_type,)))


def _sum(op: MoOp, inputs: list[SSAValue]) -> SSAValue:
    """The sum; floats of less than 32 bits are summed in f32 and rounded once."""
    type_ = inputs[0].type
    assert isinstance(type_, TensorType)
    if len(inputs) == 1:
        return inputs[0]
    narrow = type_.dtype.is_float() and type_.dtype.size_in_bytes < 4
    if narrow:
        wide = TensorType.get(DType.float32, type_.shape, type_.device)
        inputs = [insert_before(op, build(CastOp, (x,), {}, (wide,))) for x in inputs]
    total = reduce(lambda x, y: insert_before(op, build(AddOp, (x, y))), inputs)
    return insert_before(op, build(CastOp, (total,), {}, (type_,))) if narrow else total
