"""Removes redundant ops: equal pure ops share one result, ops without uses are dropped."""

from __future__ import annotations

from typing import Any

from xdsl.ir import Block, SSAValue

from max._compiler.mok import BodyOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.outline import size_dependencies
from max.mlir import MoOp, ShapedType
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
        # equal ops may have got their attributes in another order
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


def _symbols(value: SSAValue) -> set[str]:
    """The symbols in the sizes of a value."""
    if not isinstance(value.type, ShapedType):
        return set()
    return {name for dim in value.type.shape for name in dim.symbols}


def _new_symbols(op: MoOp) -> set[str]:
    """The symbols in the sizes of an op's results that no operand has."""
    symbols = {name for result in op.results for name in _symbols(result)}
    for operand in op.operands:
        symbols -= _symbols(operand)
    return symbols


def _gives_size(op: MoOp, block: Block) -> bool:
    """Whether an op needs a size that only this one knows, such as the number of elements that are not 0."""
    symbols = _new_symbols(op)
    for argument in block.args:
        symbols -= _symbols(argument)
    if not symbols:
        return False
    others = [other for other in block.ops if isinstance(other, MoOp)]
    # sizes that earlier ops compute are known without this one
    for other in others[: others.index(op)]:
        symbols -= _new_symbols(other)
    return any(
        size_dependencies(other, dict.fromkeys(symbols - _new_symbols(other), op))
        for other in others
        if other is not op
    )


def drop_dead_ops(block: Block) -> None:
    """Removes pure ops without uses, last first, so that one walk removes whole chains.

    An op whose result has a size that other ops need is kept. A `mo.buffer_load` whose tensor is unused is removed too:
    its incoming chain replaces its outgoing one.
    """
    for op in reversed(ops_of(block)):
        if type(op) is BufferLoadOp and op.results[0].first_use is None:
            op.results[1].replace_all_uses_with(op.operands[1])
        elif (
            any(result.first_use is not None for result in op.results)
            or not op.results
            or not _removable(op)
            or _gives_size(op, block)
        ):
            continue
        op.detach()
        op.erase()
