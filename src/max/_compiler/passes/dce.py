"""Dead code elimination."""

from __future__ import annotations

from xdsl.ir import Block

from max._compiler.mok import BodyOp
from max._compiler.passes.base import ops_of
from max.mlir import MoOp

__all__ = ["drop_dead_ops"]


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
        if op.name == "mo.buffer_load" and op.results[0].first_use is None:
            op.results[1].replace_all_uses_with(op.operands[1])
        elif (
            any(result.first_use is not None for result in op.results)
            or not op.results
            or not _removable(op)
        ):
            continue
        op.detach()
        op.erase()
