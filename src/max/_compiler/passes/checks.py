"""Makes the conditions of ops visible: each that the compiler cannot prove becomes a `mok.check`."""

from __future__ import annotations

from xdsl.ir import Block

from max._compiler.mok import CheckOp
from max._compiler.passes.base import ops_of

__all__ = ["insert_checks"]


def insert_checks(block: Block) -> None:
    """Adds a check for each condition of the block's ops, before all ops, in the order of the ops.

    Checks have no operands, and later passes move them only behind the ops that discover their sizes. So they hold
    whatever becomes of the ops that they come from: a slice that is joined with another one, a view that disappears.
    """
    checks: dict[tuple[object, ...], CheckOp] = {}
    for op in ops_of(block):
        for condition in op.conditions():
            key = (condition.have, condition.want, condition.exact)
            if key not in checks:
                checks[key] = CheckOp.of(condition, op.location)
    first = block.first_op
    assert first is not None  # a graph ends with its outputs
    for check in checks.values():
        block.insert_op_before(check, first)
