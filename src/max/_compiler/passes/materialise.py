"""Puts a copy where no strided layout can describe a view, and where a library op or a result needs one."""

from __future__ import annotations

from xdsl.ir import Block, BlockArgument, SSAValue

from max._compiler.layout import Layout
from max._compiler.mok import BodyOp, RegionOp, YieldOp
from max._compiler.passes.base import ops_of
from max._compiler.shapes import is_view, shape_of, view_layout
from max.mlir import OPS, BufferType, MoOp, ShapedType

__all__ = ["READS_STRIDED", "base_of", "copy_region", "materialise"]

READS_STRIDED = frozenset({
    "mo.reduce_sum", "mo.reduce_mean", "mo.reduce_max", "mo.reduce_min", "mo.softmax", "mo.logsoftmax",
    "mo.layer_norm", "mo.rms_norm", "mo.buffer_store", "mo.concat",
})  # fmt: skip
"""Ops besides the element-wise ones that become regions, which read through any layout."""


BORROWED = frozenset({"mo.constant", "mo.constant.external", "mo.buffer_load", "mok.once"})
"""Makers of values whose memory belongs to the model, or to the caller."""


def base_of(value: SSAValue) -> SSAValue:
    """The value that a chain of views starts from."""
    while is_view(owner := value.owner):
        assert isinstance(owner, MoOp)
        value = owner.operands[0]
    return value


def copy_region(value: SSAValue) -> BodyOp:
    """A region that writes a value, which may be a view, to memory of its own.

    The views that lead to the value are repeated in the body, so that it reads the memory they start from.
    """
    chain: list[MoOp] = []
    current = value
    while is_view(owner := current.owner):
        assert isinstance(owner, MoOp)
        chain.append(owner)
        current = owner.operands[0]
    body = Block(arg_types=[current.type])
    mapper: dict[SSAValue, SSAValue] = {current: body.args[0]}
    for op in reversed(chain):
        body.add_op(op.clone(mapper))
    body.add_op(YieldOp.create(operands=[mapper[value]]))
    return BodyOp.make(RegionOp, [current], [value.type], body, {"kind": "map"})


def _needs_contiguous(op: MoOp) -> bool:
    if is_view(op) or op.name in READS_STRIDED or isinstance(op, BodyOp):
        return False
    return not (op.name in OPS and op.spec.elementwise)


def materialise(block: Block) -> None:
    """Inserts copies; afterwards every view has a layout, and library ops, calls and outputs read contiguous values.

    An output is also copied where it is an argument, a weight or a constant, or part of another value, or is given
    twice: the caller owns what it gets.
    """
    layouts: dict[SSAValue, Layout] = {}

    def layout(value: SSAValue) -> Layout:
        found = layouts.get(value)
        if found is None:
            found = layouts[value] = Layout.contiguous(shape_of(value))
        return found

    def copied(op: MoOp, value: SSAValue) -> SSAValue:
        made = copy_region(value)
        block.insert_op_before(made, op)
        return made.results[0]

    for op in ops_of(block):
        if is_view(op):
            operand = op.operands[0]
            made = view_layout(op, layout(operand))
            if made is None:
                fresh = copied(op, operand)
                op.operands[0] = fresh
                made = view_layout(op, layout(fresh))
                assert made is not None
            layouts[op.results[0]] = made
        elif op.name in ("mo.output", "mok.yield"):
            _own_outputs(op, layout, copied)
        elif _needs_contiguous(op):
            for index, operand in enumerate(op.operands):
                if isinstance(operand.type, ShapedType) and not layout(operand).is_contiguous:
                    op.operands[index] = copied(op, operand)


def _own_outputs(op: MoOp, layout: object, copied: object) -> None:
    assert callable(layout) and callable(copied)
    taken: set[SSAValue] = set()
    for index, value in enumerate(op.operands):
        if not isinstance(value.type, ShapedType) or isinstance(value.type, BufferType):
            continue
        base = base_of(value)
        owner = base.owner
        borrowed = isinstance(base, BlockArgument) or (
            isinstance(owner, MoOp)
            and owner.name in ("mo.constant", "mo.constant.external", "mo.buffer_load", "mok.once")
        )
        found = layout(value)
        whole = found.is_contiguous and found.offset == 0 and not _is_part(value, base)
        if borrowed or not whole or base in taken:
            op.operands[index] = copied(op, value)
        else:
            taken.add(base)


def _is_part(value: SSAValue, base: SSAValue) -> bool:
    """Whether views between a base and a value leave elements out."""
    while value is not base:
        owner = value.owner
        assert isinstance(owner, MoOp)
        if owner.name in ("mo.slice", "mo.broadcast_to"):
            return True
        value = owner.operands[0]
    return False
