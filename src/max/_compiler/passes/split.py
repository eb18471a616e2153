"""Moves concats behind element-wise ops: `op(concat(a, b), c)` becomes `concat(op(a, c[:n]), op(b, c[n:]))`.

A concat between element-wise ops writes its result to memory, and the next op reads it. As the last op it costs
nothing: each part is written to its place in the result. So RoPE on halves (`x * cos + concat(-b, a) * sin`) is one
kernel.
"""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._compiler.analysis.shapes import shape_of
from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max.mlir import DimExpr, MoOp, TensorType, build
from max.mlir.ops.shape import BroadcastToOp, ConcatOp, SliceOp

__all__ = ["split_concats"]

MAX_PARTS = 4
"""The most operands of a concat that is moved: the ops before it are repeated for each."""
MAX_OPS = 32
"""The most ops of a tree that is repeated for each part."""


def split_concats(block: Block) -> None:
    """Moves concats behind the element-wise ops that use them, where no value is then computed twice."""
    for op in reversed(ops_of(block)):
        # an op that is erased has no operands, and no concat to move
        if not _elementwise(op) or not _is_root(op):
            continue
        tree = _tree(op)
        concats = {v.owner for member in tree for v in member.operands if _concat(v)}
        if len(concats) != 1 or len(tree) > MAX_OPS:
            continue
        (concat,) = concats
        assert isinstance(concat, MoOp)
        bounds = _bounds(concat)
        if bounds is None:
            continue
        axis: int = concat.attr("axis")
        parts = [
            _part(op, op.results[0], axis, *bound, concat, i) for i, bound in enumerate(bounds)
        ]
        joined = insert_before(op, build(ConcatOp, parts, {"axis": axis}, op.result_types))
        op.results[0].replace_all_uses_with(joined)
        for old in (*tree, concat):
            if all(result.first_use is None for result in old.results):
                old.detach()
                old.erase()


def _elementwise(op: object) -> bool:
    return isinstance(op, MoOp) and op.spec.elementwise


def _may_fuse(op: object) -> bool:
    """Whether an op may join a region, or may move so that its users do."""
    if not isinstance(op, MoOp):
        return False
    return op.spec.elementwise or op.spec.row_flops > 0 or op.spec.movable


def _concat(value: SSAValue) -> bool:
    owner = value.owner
    return type(owner) is ConcatOp and value.has_one_use()


def _is_root(op: MoOp) -> bool:
    """Whether no user could be fused: all users read the result from memory anyway."""
    return not any(_may_fuse(use.operation) for use in op.results[0].uses)


def _inside(value: SSAValue) -> bool:
    return _elementwise(value.owner) and value.has_one_use()


def _tree(root: MoOp) -> list[MoOp]:
    """The element-wise op and the single-use element-wise ops that feed it, users first."""
    tree = [root]
    # the list grows meanwhile, by the operands of its members
    for op in tree:
        for value in op.operands:
            if _inside(value):
                assert isinstance(value.owner, MoOp)
                tree.append(value.owner)
        if len(tree) > MAX_OPS:
            break
    return tree


def _bounds(concat: MoOp) -> list[tuple[int, int]] | None:
    """The bounds of the parts along the axis; None unless sizes are static, parts are few and one is element-wise."""
    axis: int = concat.attr("axis")
    sizes = [shape_of(part)[axis] for part in concat.operands]
    # without an element-wise op before a part the split saves no launch
    if len(sizes) > MAX_PARTS or not any(_elementwise(v.owner) for v in concat.operands):
        return None
    bounds: list[tuple[int, int]] = []
    for size in sizes:
        if not isinstance(size, int) or not size:
            return None
        start = bounds[-1][1] if bounds else 0
        bounds.append((start, start + size))
    return bounds


def _part(
    anchor: MoOp, value: SSAValue, axis: int, start: int, stop: int, concat: MoOp, index: int
) -> SSAValue:
    """The slice of a value from `start` to `stop` along an axis, inserted before the anchor."""
    owner = value.owner
    if owner is concat:
        return concat.operands[index]
    if value is anchor.results[0] or _inside(value):
        assert isinstance(owner, MoOp)
        operands = [_part(anchor, v, axis, start, stop, concat, index) for v in owner.operands]
        narrowed = type(owner).create(
            operands=operands,
            result_types=(_narrowed_type(value, axis, stop - start),),
            attributes=owner.attributes,
            location=owner.location,
        )
        return insert_before(anchor, narrowed)
    if isinstance(owner, MoOp) and type(owner) is BroadcastToOp:
        # slice before the broadcast, if the source has the axis
        source = owner.operands[0]
        missing = len(shape_of(value)) - len(shape_of(source))
        if axis >= missing and shape_of(source)[axis - missing] != 1:
            source = _slice(anchor, source, axis - missing, start, stop)
        result_types = (_narrowed_type(value, axis, stop - start),)
        return insert_before(anchor, build(BroadcastToOp, (source,), {}, result_types))
    return _slice(anchor, value, axis, start, stop)


def _narrowed_type(value: SSAValue, axis: int, size: int) -> TensorType:
    type_ = value.type
    assert isinstance(type_, TensorType)
    dims = list(type_.shape)
    dims[axis] = DimExpr.of(size)
    return type_.with_shape(dims)


def _slice(anchor: MoOp, value: SSAValue, axis: int, start: int, stop: int) -> SSAValue:
    """Inserts the slice `start` to `stop` of a value along an axis before the anchor."""
    type_ = value.type
    assert isinstance(type_, TensorType)
    starts, stops = [DimExpr.of(0)] * type_.rank, list(type_.shape)
    starts[axis], stops[axis] = DimExpr.of(start), DimExpr.of(stop)
    steps = [DimExpr.of(1)] * type_.rank
    attrs = {"start": tuple(starts), "stop": tuple(stops), "step": tuple(steps)}
    result_types = (_narrowed_type(value, axis, stop - start),)
    return insert_before(anchor, build(SliceOp, (value,), attrs, result_types))
