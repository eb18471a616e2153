"""Lets images stay in one layout: transposes to channels first move behind the ops that use them, until one undoes
them.

Models of other frameworks have images as ``[N, C, H, W]``, kernels as ``[N, H, W, C]``: each convolution is staged
between two transposes. What lies between convolutions computes in the layout of the kernels after this pass, so that
the transposes cancel, and biases, activations and sums are epilogues of the kernels. Lines are images of height 1:
convolutions over them lie between reshapes too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.ir import Attribute, Block, SSAValue

from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before, producer
from max.mlir import DimExpr, MoOp, TensorType, build, to_attr
from max.mlir.ops.constant import ConstantOp
from max.mlir.ops.shape import BroadcastToOp, ConcatOp, PadOp, ReshapeOp, SliceOp, TransposeOp

__all__ = ["move_channels"]

Perm = tuple[int, ...]


def move_channels(block: Block) -> None:
    """Moves transposes to channels first behind their users; first ops first."""
    for op in ops_of(block):
        if isinstance(op, TransposeOp):
            _cancel(op)
            continue
        if isinstance(op, ReshapeOp):
            _move_reshape(op)
            continue
        rule = _rule(op)
        if rule is None:
            continue
        perm = next((p for value in op.operands if (p := _channels_first(value))), None)
        if perm is None:
            continue
        inner = [_before(op, value, perm) for value in op.operands]
        if all(value is not None for value in inner):
            _replace(op, rule(op, perm), [value for value in inner if value is not None], perm)


def _channels_first(value: SSAValue) -> Perm | None:
    """The permutation of a transpose of the last axis to place 1."""
    transpose = producer(value, TransposeOp)
    if transpose is None:
        return None
    perm = _perm(transpose)
    rank = len(perm)
    # [N, H, W, C] to [N, C, H, W], with any number of axes between
    return perm if rank > 2 and perm == (0, rank - 1, *range(1, rank - 1)) else None


def _perm(transpose: MoOp) -> Perm:
    axes: Sequence[int] = transpose.attr("perm")
    return tuple(axes)


def _inverse(perm: Perm) -> Perm:
    return tuple(perm.index(axis) for axis in range(len(perm)))


def _transpose(anchor: MoOp, value: SSAValue, perm: Perm) -> SSAValue:
    """A value with its axes in another order; a transpose of a transpose is one, or none."""
    first = producer(value, TransposeOp)
    if first is not None:
        inner = _perm(first)
        perm, value = tuple([inner[axis] for axis in perm]), first.operands[0]
    if perm == tuple(range(len(perm))):
        return value
    type_ = value.type
    assert isinstance(type_, TensorType)
    result = type_.with_shape(tuple([type_.shape[axis] for axis in perm]))
    return insert_before(anchor, build(TransposeOp, (value,), {"perm": perm}, (result,)))


def _before(op: MoOp, value: SSAValue, perm: Perm) -> SSAValue | None:
    """An operand before a transpose; None where it would have to be moved in memory."""
    transpose = producer(value, TransposeOp)
    if transpose is not None and _perm(transpose) == perm:
        return transpose.operands[0]
    broadcast = producer(value, BroadcastToOp)
    if broadcast is not None:
        return _broadcast(op, broadcast, perm)
    # views of constants are computed once
    reshape = producer(value, ReshapeOp)
    small = value.owner if reshape is None else reshape.operands[0].owner
    return _transpose(op, value, _inverse(perm)) if isinstance(small, ConstantOp) else None


def _broadcast(anchor: MoOp, op: MoOp, perm: Perm) -> SSAValue:
    """A broadcast before a transpose: what is broadcast is transposed, as it is small."""
    value, result = op.operands[0], op.results[0].type
    assert isinstance(value.type, TensorType) and isinstance(result, TensorType)
    rank, inverse = len(perm), _inverse(perm)
    shape = value.type.shape
    if shape:
        # a broadcast aligns axes at the end: those that are missing come first
        full = (*[DimExpr.of(1)] * (rank - len(shape)), *shape)
        dims = tuple([full[axis] for axis in inverse])
        if len(_long(full)) > 1:
            wide = _reshape(anchor, value, full)
            value = _transpose(anchor, wide, inverse)
        else:
            # one axis that is longer than 1 stays in its order
            value = _reshape(anchor, value, dims)
    shape = tuple([result.shape[axis] for axis in inverse])
    return insert_before(anchor, build(BroadcastToOp, (value,), {}, (result.with_shape(shape),)))


def _long(dims: Sequence[DimExpr]) -> list[DimExpr]:
    return [dim for dim in dims if dim != DimExpr.of(1)]


def _reshape(anchor: MoOp, value: SSAValue, shape: tuple[DimExpr, ...]) -> SSAValue:
    assert isinstance(value.type, TensorType)
    if value.type.shape == shape:
        return value
    return insert_before(anchor, build(ReshapeOp, (value,), {}, (value.type.with_shape(shape),)))


def _move_reshape(op: MoOp) -> None:
    """Moves a transpose behind a reshape of the axes after the channels, such as one that adds the height of a line."""
    transpose, result = producer(op.operands[0], TransposeOp), op.results[0].type
    if transpose is None or _channels_first(op.operands[0]) is None:
        return
    source = transpose.results[0].type
    assert isinstance(source, TensorType) and isinstance(result, TensorType)
    shape, rank = result.shape, len(result.shape)
    if rank < 3 or shape[:2] != source.shape[:2]:
        return
    images = _reshape(op, transpose.operands[0], (shape[0], *shape[2:], shape[1]))
    moved = _transpose(op, images, (0, rank - 1, *range(1, rank - 1)))
    op.results[0].replace_all_uses_with(moved)
    op.detach()
    op.erase()


Rule = Callable[[MoOp, Perm], dict[str, Attribute]]
"""The attributes of an op whose operands lose their transposes."""


def _rule(op: MoOp) -> Rule | None:
    if op.spec.elementwise:
        return _same
    # a reduction keeps its axis, with size 1
    if isinstance(op, ConcatOp) or (op.spec.reduction and "axis" in op.attributes):
        return _moved_axis
    return _moved_bounds if isinstance(op, SliceOp | PadOp) else None


def _same(op: MoOp, perm: Perm) -> dict[str, Attribute]:
    return {**op.attributes}


def _moved_axis(op: MoOp, perm: Perm) -> dict[str, Attribute]:
    axis: int = op.attr("axis")
    # axis `i` of a transpose is axis `perm[i]` of its operand
    return {**op.attributes, "axis": to_attr(perm[axis])}


def _moved_bounds(op: MoOp, perm: Perm) -> dict[str, Attribute]:
    inverse = _inverse(perm)
    moved: dict[str, Attribute] = dict(op.attributes)
    names = ("low", "high") if isinstance(op, PadOp) else ("start", "stop", "step")
    for name in names:
        bounds: Sequence[object] = op.attr(name)
        moved[name] = to_attr(tuple([bounds[axis] for axis in inverse]))
    return moved


def _replace(
    op: MoOp, attributes: dict[str, Attribute], operands: list[SSAValue], perm: Perm
) -> None:
    """Replaces an op by the same one before the transpose."""
    result = op.results[0].type
    assert isinstance(result, TensorType)
    inner = result.with_shape(tuple([result.shape[axis] for axis in _inverse(perm)]))
    moved = type(op).create(
        operands=operands, result_types=(inner,), attributes=attributes, location=op.location
    )
    value = insert_before(op, moved)
    op.results[0].replace_all_uses_with(_transpose(op, value, perm))
    op.detach()
    op.erase()


def _cancel(op: MoOp) -> None:
    """Joins a transpose with that of its operand."""
    if producer(op.operands[0], TransposeOp) is None:
        return
    op.results[0].replace_all_uses_with(_transpose(op, op.operands[0], _perm(op)))
    op.detach()
    op.erase()
