"""Moves views before element-wise ops: `view(op(x, y))` becomes `op(view(x), view(y))`.

A region reads its leaves through views at no cost, but a view between element-wise ops splits them into two regions.
Broadcasts move too: values that do not vary along the innermost axis are computed once per row.
"""

from __future__ import annotations

from xdsl.ir import Block, SSAValue

from max._compiler.passes.base import ops_of
from max._compiler.passes.canonicalize import insert_before
from max.mlir import MoOp, TensorType
from max.mlir.ops.shape import BroadcastToOp

__all__ = ["push_views"]


def _feeds_region(view: MoOp) -> bool:
    """Whether an element-wise op or a reduction uses a view, directly or through further views."""
    for use in view.results[0].uses:
        user = use.operation
        assert isinstance(user, MoOp)
        if (
            user.spec.elementwise
            or user.spec.reduction
            or (user.spec.movable and _feeds_region(user))
        ):
            return True
    return False


def _worthwhile(view: MoOp, source: MoOp) -> bool:
    """Whether moving the view lets ops on both sides of it become one region."""
    if not source.results[0].has_one_use():
        return False
    # the op would run once for each copy of an element
    if type(view) is BroadcastToOp and not source.spec.cheap:
        return False
    return _feeds_region(view)


def _apply(view: MoOp, value: SSAValue) -> SSAValue:
    """The view of another value of the same shape."""
    result, source = view.results[0].type, value.type
    assert isinstance(result, TensorType) and isinstance(source, TensorType)
    moved = type(view).create(
        operands=(value,),
        result_types=(source.with_shape(result.shape),),
        attributes=view.attributes,
        location=view.location,
    )
    return insert_before(view, moved)


def push_views(block: Block) -> None:
    """Swaps a view and the element-wise op before it where that joins two regions; last ops first."""
    todo = [op for op in ops_of(block) if op.spec.movable]
    while todo:
        view = todo.pop()
        source = view.operands[0].owner
        if (
            not isinstance(source, MoOp)
            or not source.spec.elementwise
            or not _worthwhile(view, source)
        ):
            continue
        moved = [_apply(view, value) for value in source.operands]
        elementwise = type(source).create(
            operands=moved,
            result_types=view.result_types,
            attributes=source.attributes,
            location=source.location,
        )
        view.results[0].replace_all_uses_with(insert_before(view, elementwise))
        for op in (view, source):
            op.detach()
            op.erase()
        # the moved views may go further up, and views of the result may follow
        todo.extend(op for value in moved if isinstance(op := value.owner, MoOp))
        for use in elementwise.results[0].uses:
            assert isinstance(use.operation, MoOp)
            if use.operation.spec.movable:
                todo.append(use.operation)
