"""Inserts copies where strides cannot describe a view, and where a library op or an output needs contiguous memory."""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._compiler.analysis.attention_operands import is_readable
from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import is_view, shape_of, view_layout
from max._compiler.mok import AttentionOp, BodyOp, RegionOp, YieldOp
from max._compiler.passes.base import ops_of
from max.mlir import BufferType, MoOp, ShapedType, builtin

__all__ = ["base_of", "copy_region", "materialize", "needs_contiguous"]


def base_of(value: SSAValue) -> SSAValue:
    """The value that a chain of views starts from."""
    while is_view(owner := value.owner):
        assert isinstance(owner, MoOp)
        value = owner.operands[0]
    return value


def copy_region(value: SSAValue) -> BodyOp:
    """A region that copies a value, which may be a view, to a new buffer.

    The body repeats the views that lead to the value, so that the region reads their base.
    """
    chain: list[MoOp] = []
    current = value
    while is_view(owner := current.owner):
        assert isinstance(owner, MoOp)
        chain.append(owner)
        current = owner.operands[0]
    body = builtin.Block(arg_types=[current.type])
    mapper: dict[SSAValue, SSAValue] = {current: body.args[0]}
    # the region then reads the base in its layout: one pass over memory instead of two
    for op in reversed(chain):
        body.add_op(op.clone(mapper))
    body.add_op(YieldOp.create(operands=[mapper[value]]))
    return RegionOp.make([current], [value.type], body, {"kind": "map"})


def needs_contiguous(op: MoOp) -> bool:
    """Whether an op takes contiguous operands only."""
    spec = op.spec
    reads_strided = spec.elementwise or spec.row_flops > 0 or spec.reads_strided
    return not (spec.view or reads_strided or isinstance(op, BodyOp))


class _Materializer:
    """Inserts the copies of one block, and tracks the layout of each value."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.layouts: dict[SSAValue, Layout] = {}

    def layout(self, value: SSAValue) -> Layout:
        """The layout of a value in the buffer of its base."""
        layout = self.layouts.get(value)
        if layout is None:
            layout = self.layouts[value] = Layout.contiguous(shape_of(value))
        return layout

    def copy(self, op: MoOp, index: int) -> None:
        """Replaces an operand of an op by a copy."""
        copy = copy_region(op.operands[index])
        self.block.insert_op_before(copy, op)
        op.operands[index] = copy.results[0]

    def view(self, op: MoOp) -> None:
        """Records the layout of a view; copies its operand first if no strides describe the view."""
        layout = view_layout(op, self.layout(op.operands[0]))
        if layout is None:
            # such as a reshape of a transposed value
            self.copy(op, 0)
            layout = view_layout(op, self.layout(op.operands[0]))
            assert layout is not None, f"{op.name} of a contiguous value has a layout"
        self.layouts[op.results[0]] = layout

    def contiguous_operands(self, op: MoOp) -> None:
        for index, operand in enumerate(op.operands):
            if isinstance(operand.type, ShapedType) and not self.layout(operand).is_contiguous:
                self.copy(op, index)

    def attention_operands(self, op: MoOp) -> None:
        for index, operand in enumerate(op.operands):
            if not is_readable(index, self.layout(operand)):
                self.copy(op, index)

    def outputs(self, op: MoOp) -> None:
        """Copies outputs that are borrowed memory, not a whole contiguous buffer, or returned twice."""
        returned: set[SSAValue] = set()
        for index, value in enumerate(op.operands):
            if not isinstance(value.type, ShapedType) or isinstance(value.type, BufferType):
                continue
            # the caller owns each output, so two of them cannot be views of one buffer
            base = base_of(value)
            owner = base.owner
            borrowed = not isinstance(owner, MoOp) or owner.spec.borrows
            layout = self.layout(value)
            is_full_buffer = (
                layout.is_contiguous and layout.offset == 0 and not _selects_or_repeats(value, base)
            )
            if borrowed or not is_full_buffer or base in returned:
                self.copy(op, index)
            else:
                returned.add(base)


def materialize(block: Block) -> None:
    """Inserts copies; afterwards every view has a layout, and library ops, calls and outputs read contiguous values.

    The caller owns the outputs. So an output is also copied if it is an argument, a weight or a constant, if it is part
    of another value, or if it is returned twice.
    """
    materializer = _Materializer(block)
    for op in ops_of(block):
        if is_view(op):
            materializer.view(op)
        elif op.spec.terminator:
            materializer.outputs(op)
        # its kernel takes strides between rows, so that fewer operands are copied
        elif type(op) is AttentionOp:
            materializer.attention_operands(op)
        elif needs_contiguous(op):
            materializer.contiguous_operands(op)


def _selects_or_repeats(value: SSAValue, base: SSAValue) -> bool:
    """Whether a view between the base and the value selects or repeats elements."""
    while value is not base:
        owner = value.owner
        assert isinstance(owner, MoOp)
        if owner.spec.resizes:
            return True
        value = owner.operands[0]
    return False
