"""Replaces symbols that results introduce by expressions over the sizes of operands, where these determine them.

``x[(slice(2, n), "rest")]`` names the size ``n - 2`` of its result, a `mo.rebind` renames a size, and a call's
results have the sizes of its subgraph's. After this pass each symbol is the size of an input, or is computed when the
program runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from xdsl.ir import Attribute

from max._compiler.lowering.lowered_graph import UnsupportedOpError
from max._compiler.passes.base import ops_of
from max._lazy import lazy_module
from max.mlir import (
    CallOp,
    DimAttr,
    DimExpr,
    GraphOp,
    IfOp,
    MoOp,
    ShapeAttr,
    ShapedType,
    SubgraphOp,
    WhileOp,
    bind_call,
    entry,
    subgraphs,
    substitute_type,
)
from max.mlir.builtin import ModuleOp
from max.mlir.ops.shape import SLICE_ATTRIBUTES, RebindOp, SliceOp, slice_shape

if TYPE_CHECKING:
    from xdsl import rewriter
else:
    rewriter = lazy_module("xdsl.rewriter")

__all__ = ["resolve_sizes"]

Env = dict[str, DimExpr]


def resolve_sizes(module: ModuleOp) -> None:
    """Replaces each symbol that a slice, a rebind or a call introduces, in all graphs.

    Raises:
        UnsupportedOpError: A result has a symbol that nothing determines.
    """
    resolver = _Resolver(subgraphs(module))
    resolver.graph(entry(module), set(), {})
    for graph in resolver.subgraphs.values():
        # subgraphs without callers are resolved too
        resolver.callee(graph)


class _Resolver:
    """Resolves the graphs of a module, callees before their callers' results."""

    def __init__(self, subgraphs: Mapping[str, SubgraphOp]) -> None:
        self.subgraphs = subgraphs
        self.visited: set[str] = set()

    def callee(self, graph: SubgraphOp) -> None:
        """A subgraph of calls, which has only symbols of its own."""
        if graph.sym_name not in self.visited:
            self.graph(graph, set(), {})

    def graph(self, graph: GraphOp, enclosing: set[str], outer: Env) -> None:
        """One graph.

        Args:
            graph: The graph.
            enclosing: Symbols that a branch or a loop body shares with the enclosing graph.
            outer: The expressions of symbols that were resolved in the enclosing graph.
        """
        self.visited.add(graph.sym_name)
        input_symbols = _symbols(graph.input_types)
        defined = enclosing | input_symbols
        # an input binds its symbols itself, whatever the enclosing graph calls them
        env = {name: dim for name, dim in outer.items() if name not in input_symbols}
        for op in ops_of(graph.block):
            if env:
                _substitute(op, env)
            if isinstance(op, IfOp | WhileOp):
                for name in op.callees:
                    if name not in self.visited:
                        self.graph(self.subgraphs[name], defined, env)
            elif isinstance(op, CallOp):
                self.callee(self.subgraphs[op.callee])
            resolved = self.sizes_named_by(op, defined)
            if resolved:
                env.update(resolved)
                _substitute(op, resolved)
            self.check(op, graph, defined)

    def sizes_named_by(self, op: MoOp, defined_symbols: set[str]) -> Env:
        """The expressions of the symbols that an op's results introduce."""
        resolved: Env = {}
        for result, computed in zip(op.results, self.computed_shapes(op), strict=False):
            if not isinstance(result.type, ShapedType):
                continue
            for dim, size in zip(result.type.shape, computed, strict=True):
                name = dim.symbol_name
                if name is None or name in defined_symbols or name in resolved:
                    continue
                # an expression over a size that nothing defines yet would not help
                if defined_symbols.issuperset(size.symbols):
                    resolved[name] = size
        return resolved

    def computed_shapes(self, op: MoOp) -> Sequence[Sequence[DimExpr]]:
        """The shapes of an op's results computed from its operands, for ops that may name sizes."""
        if type(op) is SliceOp:
            bounds: list[tuple[DimExpr, ...]] = [op.attr(name) for name in SLICE_ATTRIBUTES]
            return [slice_shape("slice", _shape(op.operands[0].type), *bounds)]
        if type(op) is RebindOp:
            return [_shape(op.operands[0].type)]
        if isinstance(op, CallOp):
            callee = self.subgraphs[op.callee]
            env = bind_call(op.callee, callee.input_types, [v.type for v in op.operands])
            return [_shape(substitute_type(t, env)) for t in callee.output_types]
        return []

    def check(self, op: MoOp, graph: GraphOp, defined_symbols: set[str]) -> None:
        """Adds the symbols that an op computes to `defined_symbols`; all other symbols must be defined."""
        computes = op.spec.size_rule != "" or isinstance(op, CallOp)
        for result in op.results:
            for dim in _shape(result.type):
                undefined = set(dim.symbols) - defined_symbols
                # an op may give a new size a name; a product of sizes has none
                if undefined and not (computes and dim.symbol_name is not None):
                    raise UnsupportedOpError(
                        f"{op.name}: the size {dim} of its result does not follow from the inputs of "
                        f"{graph.sym_name}"
                    )
                defined_symbols |= undefined


def _shape(type_: Attribute) -> tuple[DimExpr, ...]:
    return type_.shape if isinstance(type_, ShapedType) else ()


def _symbols(types: Iterable[Attribute]) -> set[str]:
    return {name for type_ in types for dim in _shape(type_) for name in dim.symbols}


def _substitute(op: MoOp, env: Env) -> None:
    """Replaces symbols in the types of an op's results, and in its attributes."""
    for result in list(op.results):
        type_ = substitute_type(result.type, env)
        # new types are rare, and replacing a value visits all its uses
        if type_ is not result.type:
            rewriter.Rewriter.replace_value_with_new_type(result, type_)
    for name, attr in op.attributes.items():
        if isinstance(attr, ShapeAttr):
            op.attributes[name] = ShapeAttr.of([dim.substitute(env) for dim in attr.data])
        elif isinstance(attr, DimAttr):
            op.attributes[name] = DimAttr(attr.data.substitute(env))
