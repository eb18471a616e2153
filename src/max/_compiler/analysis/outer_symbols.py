"""Symbols that branches and loop bodies share with the graphs around them."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.ir import SSAValue

from max.mlir import GraphOp, IfOp, ShapedType, WhileOp
from max.mlir.builtin import ModuleOp


def scopes(module: ModuleOp) -> dict[str, set[str]]:
    """For each branch and loop body, the symbols that are known before it in the enclosing graphs; they have the same
    values there.
    """
    graphs = {op.sym_name: op for op in module.body.block.ops if isinstance(op, GraphOp)}
    inner: dict[str, set[str]] = {}

    def visit(name: str, outer: set[str]) -> None:
        """Adds the symbols that are visible in a graph to those of its branches and loop bodies."""
        visible = outer | _symbols_of(graphs[name].args)
        for op in graphs[name].body:
            if isinstance(op, IfOp | WhileOp):
                for callee in op.callees:
                    inner.setdefault(callee, set()).update(visible)
                    visit(callee, visible)
            # an op sees what was computed before it: later ops may compute other sizes of the same names
            visible |= _symbols_of(op.results)

    branches = {
        callee
        for graph in graphs.values()
        for op in graph.body
        if isinstance(op, IfOp | WhileOp)
        for callee in op.callees
    }
    for name in graphs:
        # branches are visited from their ops, where the enclosing graph's symbols are known
        if name not in branches:
            visit(name, set())
    return inner


def _symbols_of(values: Iterable[SSAValue]) -> set[str]:
    types = [value.type for value in values if isinstance(value.type, ShapedType)]
    return {name for type_ in types for dim in type_.shape for name in dim.symbols}
