"""Symbols that branches and loop bodies share with the graphs around them."""

from __future__ import annotations

from max.mlir import GraphOp, IfOp, ShapedType, WhileOp
from max.mlir.builtin import ModuleOp


def scopes(module: ModuleOp) -> dict[str, set[str]]:
    """For each branch and loop body, the symbols of the enclosing graphs; they have the same values there."""
    graphs = {op.sym_name: op for op in module.body.block.ops if isinstance(op, GraphOp)}
    inner: dict[str, set[str]] = {}

    def visit(name: str, outer: set[str]) -> None:
        """Adds the symbols that are visible in a graph to those of its branches and loop bodies."""
        visible = outer | _symbols_of(graphs[name])
        for op in graphs[name].body:
            if isinstance(op, IfOp | WhileOp):
                for callee in op.callees:
                    inner.setdefault(callee, set()).update(visible)
                    visit(callee, visible)

    branches = {
        callee
        for graph in graphs.values()
        for op in graph.body
        if isinstance(op, IfOp | WhileOp)
        for callee in op.callees
    }
    for name in graphs:
        if name not in branches:
            visit(name, set())
    return inner


def _symbols_of(graph: GraphOp) -> set[str]:
    values = [*graph.args, *[result for op in graph.body for result in op.results]]
    types = [v.type for v in values if isinstance(v.type, ShapedType)]
    return {name for type_ in types for dim in type_.shape for name in dim.symbols}
