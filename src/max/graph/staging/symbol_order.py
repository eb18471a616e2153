"""Symbols that an op of a graph uses before another one binds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from max import mlir

if TYPE_CHECKING:
    from xdsl.ir import Block

__all__ = ["order_by_symbols"]


def order_by_symbols(block: Block, later: set[str], graphs: Mapping[str, Block]) -> set[str]:
    """Moves ops behind the ones that bind their symbols; the order stays otherwise.

    Ops whose symbols nothing binds, and ops that need those, come last.

    Args:
        block: The ops of a complete graph.
        later: The symbols that were used before they were bound.
        graphs: The blocks of the subgraphs by name, whose symbols are those of this graph.

    Returns:
        The symbols that are bound.
    """
    ops = list(block.ops)
    needed = {op: {*_symbols(op, graphs)} & later for op in ops}
    introduced = {op: _introduced_symbols(op) & later for op in ops}
    bound: set[str] = set()
    placed: set[mlir.Operation] = set()
    # all but the output, which stays last
    waiting, ordered = ops[:-1], list[mlir.Operation]()
    progress = True
    # until nothing moves: an op may wait for a symbol of one that comes later
    while progress and waiting:
        progress, rest = False, list[mlir.Operation]()
        for op in waiting:
            owners = [operand.owner for operand in op.operands]
            ready = all(owner in placed for owner in owners if owner in needed)
            if ready and needed[op] <= bound | introduced[op]:
                ordered.append(op)
                placed.add(op)
                bound |= introduced[op]
                progress = True
            else:
                rest.append(op)
        waiting = rest
    for op in ops:
        op.detach()
    block.add_ops([*ordered, *waiting, ops[-1]])
    return bound


def _introduced_symbols(op: mlir.Operation) -> set[str]:
    """The symbols that are sizes of the results of an op that binds symbols."""
    if not isinstance(op, mlir.MoOp) or not op.spec.introduces_symbols:
        return set()
    types = [result.type for result in op.results]
    return {
        name
        for t in types
        if isinstance(t, mlir.ShapedType)
        for dim in t.shape
        if (name := dim.symbol_name) is not None
    }


def _symbols(op: mlir.Operation, graphs: Mapping[str, Block]) -> Iterator[str]:
    """The symbols in an op's result types and attributes, and in its subgraphs."""
    for result in op.results:
        if isinstance(result.type, mlir.ShapedType):
            for dim in result.type.shape:
                yield from dim.symbols
    for attribute in op.attributes.values():
        if isinstance(attribute, mlir.ShapeAttr):
            for dim in attribute.data:
                yield from dim.symbols
        elif isinstance(attribute, mlir.SymbolRefAttr) and op.name != "mo.call":
            for inner in graphs[attribute.data].ops:
                yield from _symbols(inner, graphs)
