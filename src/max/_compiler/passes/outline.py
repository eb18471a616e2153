"""Outlines groups of ops into region ops and orders the block topologically."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from xdsl.ir import Block, SSAValue

from max import mlir
from max._compiler.analysis.shapes import is_view
from max._compiler.mok import BodyOp, RegionOp, YieldOp
from max._compiler.passes.base import constant_of, ops_of
from max._dataclass import dataclass
from max.mlir import DimExpr, MoOp, ShapeAttr, ShapedType

__all__ = ["Unit", "computed_sizes", "rebuild", "size_dependencies"]


@dataclass(eq=False)
class Unit:
    """The ops of one region, in program order, and its kind."""

    ops: list[MoOp]
    kind: str


def _is_literal(value: SSAValue) -> bool:
    array = constant_of(value.owner)
    return array is not None and array.size == 1


def _outline(unit: Unit) -> BodyOp:
    """The region of a unit, not yet inserted; its results replace the uses outside of the unit."""
    members = set[object](unit.ops)
    inputs: dict[SSAValue, int] = {}
    body = mlir.Block()
    mapper: dict[SSAValue, SSAValue] = {}

    def inside(value: SSAValue) -> None:
        """Maps a value into the body: as an argument, or as views of an argument or of a member's result."""
        if value in mapper:
            return
        owner = value.owner
        # views are copied into each region that reads through them: they cost nothing there
        if is_view(owner):
            assert isinstance(owner, MoOp)
            inside(owner.operands[0])
            body.add_op(owner.clone(mapper))
        # a constant of one element becomes text of the kernel, not an operand
        elif _is_literal(value):
            assert isinstance(owner, MoOp)
            body.add_op(owner.clone(mapper))
        else:
            inputs[value] = len(inputs)
            mapper[value] = body.insert_arg(value.type, len(body.args))

    for op in unit.ops:
        for operand in op.operands:
            inside(operand)
        body.add_op(op.clone(mapper))
    results = [
        r
        for op in unit.ops
        for r in op.results
        if any(use.operation not in members for use in r.uses)
    ]
    # a view of a member's result with users in the region only is copied into the body, and dead outside
    results = [r for r in results if _used_outside(r, members)]
    body.add_op(YieldOp.create(operands=[mapper[result] for result in results]))
    region = RegionOp.make(list(inputs), [r.type for r in results], body, {"kind": unit.kind})
    for old, new in zip(results, region.results, strict=True):
        old.replace_uses_with_if(new, lambda use: use.operation not in members)
    return region


def _used_outside(value: SSAValue, members: set[object]) -> bool:
    """Whether an op outside of `members` uses the value, seen through views."""
    for use in value.uses:
        if use.operation in members:
            continue
        if not is_view(use.operation) or _used_outside(use.operation.results[0], members):
            return True
    return False


def rebuild(block: Block, units: list[Unit]) -> None:
    """Replaces the ops of each unit by a region.

    Args:
        block: The block.
        units: Disjoint units; none may depend on itself through ops outside of it.
    """
    ops = ops_of(block)
    position = {op: i for i, op in enumerate(ops)}
    regions: dict[MoOp, int] = {}
    for unit in units:
        regions[_outline(unit)] = position[unit.ops[-1]]
    members = {op for unit in units for op in unit.ops}
    kept = [op for op in ops if op not in members]
    # users first: an op can be erased when nothing uses its results
    for op in reversed(ops):
        if op in members:
            for result in op.results:
                _erase_views(result, kept)
            op.detach()
            op.erase()
    kept = [op for op in kept if op.parent is not None]
    _order(block, kept, {**{op: position[op] for op in kept}, **regions})


def _erase_views(value: SSAValue, kept_ops: list[MoOp]) -> None:
    """Erases the views of an erased value; regions that use them contain copies."""
    for use in list(value.uses):
        view = use.operation
        assert isinstance(view, MoOp) and is_view(view), f"{view.name} uses a fused value"
        _erase_views(view.results[0], kept_ops)
        view.detach()
        view.erase()


def _dims(value: SSAValue) -> tuple[DimExpr, ...]:
    return value.type.shape if isinstance(value.type, ShapedType) else ()


def computed_sizes(block: Block, ops: Iterable[MoOp]) -> dict[str, MoOp]:
    """The symbols whose sizes the program computes, each with the first op that computes it."""
    computed: dict[str, MoOp] = {}
    size_computing = [op for op in ops if op.spec.size_rule]
    if size_computing:
        input_symbols = {
            name for argument in block.args for dim in _dims(argument) for name in dim.symbols
        }
        for op in size_computing:
            for dim in _dims(op.results[0]):
                if (name := dim.symbol_name) is not None and name not in input_symbols:
                    computed.setdefault(name, op)
    return computed


def size_dependencies(op: MoOp, producers: dict[str, MoOp]) -> set[MoOp]:
    """The ops that discover the sizes that an op needs, and must precede it."""
    dependencies: set[MoOp] = set()
    for inner in op.walk():
        for value in (*inner.results, *inner.operands):
            if isinstance(value.type, ShapedType):
                dependencies.update(
                    producers[name]
                    for dim in value.type.shape
                    for name in dim.symbols
                    if name in producers
                )
        for attr in inner.attributes.values():
            if isinstance(attr, ShapeAttr):
                dependencies.update(
                    producers[name]
                    for dim in attr.data
                    for name in dim.symbols
                    if name in producers
                )
    return dependencies - {op}


def _order(block: Block, kept_ops: list[MoOp], priority: dict[MoOp, int]) -> None:
    """Orders ops in the block topologically; ops that are ready are ordered by priority."""
    for op in kept_ops:
        op.detach()
    waiting: dict[MoOp, int] = {}
    users: dict[MoOp, list[MoOp]] = {}
    computed = computed_sizes(block, priority)
    for op in priority:
        owners = {v.owner for v in op.operands if v.owner in priority}
        if computed:
            # an op also waits for the op that computes a size of its types, with no operand in between
            owners |= size_dependencies(op, computed)
        waiting[op] = len(owners)
        for owner in owners:
            assert isinstance(owner, MoOp)
            users.setdefault(owner, []).append(op)
    # equal priorities: in the order of the block, as ops do not compare
    serial = {op: i for i, op in enumerate(priority)}
    ready = [(priority[op], serial[op], op) for op in priority if not waiting[op]]
    heapq.heapify(ready)
    placed = 0
    while ready:
        _, _, op = heapq.heappop(ready)
        block.add_op(op)
        placed += 1
        for user in users.get(op, ()):
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (priority[user], serial[user], user))
    assert placed == len(priority), "regions wait for each other"
