"""Computes element-wise what was put together, part by part: ``op(concat(a, b), c)`` becomes ``concat(op(a, c[:n]), op(b, c[n:]))``.

A concat between element-wise ops would be written to memory and read again; as the last op it costs nothing, since each part is written
to its place. So rotary embeddings of halves (``x * cos + concat(-b, a) * sin``) are one kernel.
"""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalise import insert_before
from max._compiler.passes.fuse import ROWWISE
from max._compiler.passes.views import MOVED
from max._compiler.shapes import shape_of
from max.mlir import OPS, DimExpr, MoOp, TensorType, build

__all__ = ["split_concats"]

MAX_PARTS = 4
MAX_OPS = 32
"""Ops of a tree that is repeated for each part, at most."""


def split_concats(block: Block) -> None:
    """Moves concats behind the element-wise ops that use them, where that leaves no value to be computed twice."""
    for op in reversed(ops_of(block)):
        if op.parent is None or not _elementwise(op) or not _is_root(op):
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
        made = insert_before(op, build("mo.concat", parts, {"axis": axis}, op.result_types))
        op.results[0].replace_all_uses_with(made)
        for old in (*tree, concat):
            if all(result.first_use is None for result in old.results):
                old.detach()
                old.erase()


def _elementwise(op: object) -> bool:
    return isinstance(op, MoOp) and op.name in OPS and op.spec.elementwise


def _concat(value: SSAValue) -> bool:
    owner = value.owner
    return isinstance(owner, MoOp) and owner.name == "mo.concat" and value.has_one_use()


def _is_root(op: MoOp) -> bool:
    """Whether what uses the result would read it from memory anyway."""
    users = [use.operation for use in op.results[0].uses]
    return not any(_elementwise(u) or u.name in ROWWISE or u.name in MOVED for u in users)


def _inside(value: SSAValue) -> bool:
    return _elementwise(value.owner) and value.has_one_use()


def _tree(root: MoOp) -> list[MoOp]:
    """An element-wise op, and those before it that nothing else uses, each after what uses it."""
    found = [root]
    for op in found:
        found += [v.owner for v in op.operands if _inside(v) and isinstance(v.owner, MoOp)]
        if len(found) > MAX_OPS:
            break
    return found


def _bounds(concat: MoOp) -> list[tuple[int, int]] | None:
    """Where the parts begin and end, if that is known and there are few; at least one of them is computed element by element."""
    axis: int = concat.attr("axis")
    sizes = [shape_of(part)[axis] for part in concat.operands]
    if not 2 <= len(sizes) <= MAX_PARTS or not any(_elementwise(v.owner) for v in concat.operands):
        return None
    bounds: list[tuple[int, int]] = []
    for size in sizes:
        if not isinstance(size, int) or not size:
            return None
        start = bounds[-1][1] if bounds else 0
        bounds.append((start, start + size))
    return bounds


def _part(
    anchor: MoOp, value: SSAValue, axis: int, start: int, stop: int, concat: MoOp, number: int
) -> SSAValue:
    """The part of a value from `start` to `stop` along an axis, computed before the anchor."""
    owner = value.owner
    if owner is concat:
        return concat.operands[number]
    if value is anchor.results[0] or _inside(value):
        assert isinstance(owner, MoOp)
        operands = [_part(anchor, v, axis, start, stop, concat, number) for v in owner.operands]
        made = type(owner).create(
            operands=operands,
            result_types=(_narrowed(value, axis, stop - start),),
            attributes=owner.attributes,
            location=owner.location,
        )
        return insert_before(anchor, made)
    if isinstance(owner, MoOp) and owner.name == "mo.broadcast_to":
        # narrowed before it is widened, where it has the axis at all
        source = owner.operands[0]
        missing = len(shape_of(value)) - len(shape_of(source))
        if axis >= missing and shape_of(source)[axis - missing] != 1:
            source = _slice(anchor, source, axis - missing, start, stop)
        wanted = (_narrowed(value, axis, stop - start),)
        return insert_before(anchor, build("mo.broadcast_to", (source,), {}, wanted))
    return _slice(anchor, value, axis, start, stop)


def _narrowed(value: SSAValue, axis: int, size: int) -> TensorType:
    type_ = value.type
    assert isinstance(type_, TensorType)
    dims = list(type_.shape)
    dims[axis] = DimExpr.of(size)
    return type_.with_shape(dims)


def _slice(anchor: MoOp, value: SSAValue, axis: int, start: int, stop: int) -> SSAValue:
    type_ = value.type
    assert isinstance(type_, TensorType)
    starts, stops = [DimExpr.of(0)] * type_.rank, list(type_.shape)
    starts[axis], stops[axis] = DimExpr.of(start), DimExpr.of(stop)
    steps = [DimExpr.of(1)] * type_.rank
    attrs = {"start": tuple(starts), "stop": tuple(stops), "step": tuple(steps)}
    wanted = (_narrowed(value, axis, stop - start),)
    return insert_before(anchor, build("mo.slice", (value,), attrs, wanted))
