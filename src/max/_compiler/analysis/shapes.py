"""Shapes of values, and the layouts that views make of them."""

from __future__ import annotations

from xdsl.ir import SSAValue

from max._compiler.analysis.layout import Layout
from max.mlir import MoOp, ShapedType
from max.mlir.ops import shape as shape_ops
from max.mlir.sizes import Size, Sizes, simplify

__all__ = ["is_view", "shape_of", "strip", "view_layout"]


def is_view(op: object) -> bool:
    """Whether an op is a view."""
    return isinstance(op, MoOp) and op.spec.view


def shape_of(value: SSAValue) -> Sizes:
    """The dims of a tensor or buffer; static ones are ints."""
    type_ = value.type
    assert isinstance(type_, ShapedType)
    return tuple([simplify(dim) for dim in type_.shape])


def strip(shape: Sizes, keep: int = -1) -> Sizes:
    """The dims that are not 1, and the one at `keep`."""
    return tuple([dim for axis, dim in enumerate(shape) if dim != 1 or axis == keep])


def view_layout(op: MoOp, source: Layout) -> Layout | None:
    """The layout of a view's result, or None if no strides can describe it.

    Args:
        op: A view.
        source: The layout of its operand.
    """
    shape = shape_of(op.results[0])
    match type(op):
        case shape_ops.ReshapeOp:
            return source.reshape(shape)
        case shape_ops.TransposeOp:
            return source.transpose(op.attr("perm"))
        case shape_ops.BroadcastToOp:
            return source.broadcast_to(shape)
        case shape_ops.SliceOp:
            starts: list[Size] = [simplify(s) for s in op.attr("start")]
            # a step is static: an int, or a dim that holds one
            steps = [int(s) if isinstance(s, int) else s.value for s in op.attr("step")]
            return source.slice(starts, steps, shape)
        case shape_ops.RebindOp:
            # the dims are other expressions of equal values
            if source.is_contiguous:
                contiguous = Layout.contiguous(shape)
                return Layout(shape, contiguous.strides, source.offset)
            return Layout(shape, source.strides, source.offset)
        case _:
            return source
