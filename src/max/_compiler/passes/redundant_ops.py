"""Removes redundant ops: equal pure ops share one result, ops without uses are dropped."""

from __future__ import annotations

from typing import Any

from xdsl.ir import Block, SSAValue

from max._compiler.mok import BodyOp
from max._compiler.passes.base import ops_of
from max.mlir import MoOp
from max.mlir.ops.buffer import BufferLoadOp

__all__ = ["drop_dead_ops", "merge_equal_ops"]


def merge_equal_ops(block: Block) -> None:
    """Replaces the results of a pure op by those of an earlier op with equal name, operands, attributes and result
    types.
    """
    results_of: dict[Any, tuple[SSAValue, ...]] = {}
    for op in ops_of(block):
        # a region is not pure: its body would have to be equal too; without results there is nothing to share
        if not op.is_pure or not op.results:
            continue
        attributes = tuple(sorted(op.attributes.items(), key=lambda item: item[0]))
        key = (op.name, tuple(map(id, op.operands)), attributes, tuple(r.type for r in op.results))
        first = results_of.setdefault(key, tuple(op.results))
        if first[0] is not op.results[0]:
            for old, new in zip(op.results, first, strict=True):
                old.replace_all_uses_with(new)
            op.detach()
            op.erase()


def _removable(op: MoOp) -> bool:
    if isinstance(op, BodyOp):
        return True
    # a read of a buffer has no effect: only its chain may still have uses
    return op.is_pure or op.spec.removable


def drop_dead_ops(block: Block) -> None:
    """Removes pure ops without uses, last first, so that one walk removes whole chains.

    A `mo.buffer_load` whose tensor is unused is removed too: its incoming chain replaces its outgoing one.
    """
    for op in reversed(ops_of(block)):
        if type(op) is BufferLoadOp and op.results[0].first_use is None:
            op.results[1].replace_all_uses_with(op.operands[1])
        elif (
            any(result.first_use is not None for result in op.results)
            or not op.results
            or not _removable(op)
        ):
            continue
        op.detach()
        op.erase()
