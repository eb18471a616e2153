"""Makes the conditions of ops explicit: each condition that the compiler cannot prove becomes a `mok.check`."""

from __future__ import annotations

from xdsl.ir import Block

from max._compiler.mok import CheckOp
from max._compiler.passes.base import ops_of

__all__ = ["insert_checks"]


def insert_checks(block: Block) -> None:
    """Adds a check for each condition of the block's ops, at the start of the block, in the order of the ops.

    Checks have no operands, and later passes move them only behind the ops that discover their sizes. So a check stays
    when its op is rewritten: a slice that is joined with another one, a view that is removed.
    """
    checks: dict[tuple[object, ...], CheckOp] = {}
    for op in ops_of(block):
        for condition in op.conditions():
            key = (condition.actual, condition.required, condition.exact)
            if key not in checks:
                checks[key] = CheckOp.of(condition, op.location)
    first = block.first_op
    assert first is not None  # a graph has at least mo.output
    for check in checks.values():
        block.insert_op_before(check, first)
