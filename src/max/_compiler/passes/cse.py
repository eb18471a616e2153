"""Common subexpression elimination: equal pure ops share one result."""

from __future__ import annotations

from typing import Any

from xdsl.ir import Block, SSAValue

from max._compiler.passes.base import ops_of

__all__ = ["merge_equal_ops"]


def merge_equal_ops(block: Block) -> None:
    """Replaces the results of a pure op by those of an earlier op with equal name, operands, attributes and result
    types.
    """
    results_of: dict[Any, tuple[SSAValue, ...]] = {}
    for op in ops_of(block):
        if not op.is_pure or op.regions:
            continue
        attributes = tuple(sorted(op.attributes.items(), key=lambda item: item[0]))
        key = (op.name, tuple(map(id, op.operands)), attributes, tuple(r.type for r in op.results))
        first = results_of.setdefault(key, tuple(op.results))
        if first[0] is not op.results[0]:
            for old, new in zip(op.results, first, strict=True):
                old.replace_all_uses_with(new)
            op.detach()
            op.erase()
