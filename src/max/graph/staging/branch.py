"""Subgraphs of `cond` and `while_loop`: functions that capture values of the graphs that enclose them."""

# a branch sets up the same private state as `Graph` itself
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from max import mlir
from max.graph.graph import Graph
from max.graph.staging.symbols import Symbols
from max.graph.value import TensorValue, Value, value_of
from max.graph.weight import Weight

__all__ = ["Branch", "close_branches"]


class Branch(Graph):
    """A subgraph that captures: a value of an enclosing graph becomes an input at its first use.

    Constants and weights are cloned into the branch instead, so that passes that read constant operands still find
    them.

    Args:
        outer: The graph that the branch is in.
        role: The suffix of its name: ``then``, ``else``, ``cond``, ``body``.
        types: The types of the inputs that precede the captures.
        captures: The captures of the op's other branch, which this one takes in the same order.
    """

    def __init__(
        self,
        outer: Graph,
        role: str,
        types: Sequence[mlir.Attribute] = (),
        captures: Sequence[mlir.SSAValue] = (),
    ) -> None:
        root = outer.root
        self._init(_free_name(root, f"{outer.name}_{role}"), outer._kernel_library, ())
        self.root = root
        self.outer = outer
        self._module = root._module
        self._num_own = len(types)
        self.captures: list[mlir.SSAValue] = []
        """Values of the enclosing graph, in the order of their inputs, which follow the branch's own inputs."""
        self._inside: dict[mlir.SSAValue, mlir.SSAValue] = {}
        self._build("mo.subgraph", ())
        for type_ in types:
            self._block.insert_arg(type_, len(self._block.args))
        chain = self._block.insert_arg(mlir.ChainType.get(), len(self._block.args))
        self._chains.begin(chain)
        self._num_inputs = len(types)
        # branches see the sizes of the graph around them
        self._symbols = Symbols(self.name, outer._symbols)
        for value in captures:
            self.capture(value)
        root._subgraphs[self.name] = self

    @property
    def has_effects(self) -> bool:
        """Whether an op of the branch has used its chain."""
        return self._chains.has_advanced

    def capture(self, value: mlir.SSAValue) -> mlir.SSAValue:
        """The input for a value of the enclosing graph, added at the first call."""
        inner = self._inside.get(value)
        if inner is None:
            inner = self._block.insert_arg(value.type, self._num_own + len(self.captures))
            self._inside[value] = inner
            self.captures.append(value)
        return inner

    def _captured_value(self, value: mlir.SSAValue) -> mlir.SSAValue | None:
        # a value from further out is captured by each branch in between
        captured = self._inside.get(value)
        if captured is not None:
            return captured
        owner = value.owner
        # constants are copied, not passed: the compiler sees their values inside the branch too
        if isinstance(owner, mlir.MoOp) and owner.name in ("mo.constant", "mo.constant.external"):
            if not self._encloses(value):
                return None
            copy = owner.clone()
            first = self._block.first_op
            if first is None:
                self._block.add_op(copy)
            else:
                self._block.insert_op_before(copy, first)
            # later uses in this branch share the copy
            self._inside[value] = copy.results[0]
            return copy.results[0]
        if mlir.block_of(value) is not self.outer._block:
            outer_value = self.outer._captured_value(value)
            if outer_value is None:
                return None
            captured = self.capture(outer_value)
            self._inside[value] = captured
            return captured
        return self.capture(value)

    def _encloses(self, value: mlir.SSAValue) -> bool:
        """Whether a value is defined in a graph that encloses this one."""
        block, graph = mlir.block_of(value), self.outer
        while graph._block is not block:
            if not isinstance(graph, Branch):
                return False
            graph = graph.outer
        return True

    def own(self, values: Iterable[Value[Any]]) -> list[Value[Any]]:
        """Maps values to values of this graph; those of enclosing graphs become inputs.

        Raises:
            ValueError: A value is defined in a graph that does not enclose this one.
        """
        own_values: list[Value[Any]] = []
        with self:
            for value in values:
                inner: mlir.SSAValue | None = value.to_mlir()
                if mlir.block_of(inner) is not self._block:
                    inner = self._captured_value(inner)
                if inner is None:
                    raise ValueError(f"{self.name}: the result {value!r} is of another graph")
                own_values.append(value_of(inner))
        return own_values

    def random_seed(self) -> TensorValue | None:
        """The seed set in the branch, else that of the enclosing graph."""
        return self.outer.random_seed() if self._seed is None else self._seed

    def add_weight(self, weight: Weight, force_initial_weight_on_host: bool = True) -> TensorValue:
        """Adds a weight to the enclosing graph, whose weights the branch shares."""
        return self.add_weight_of(self, weight, force_initial_weight_on_host)

    def add_weight_of(self, branch: Graph | None, weight: Weight, on_host: bool) -> TensorValue:
        return self.outer.add_weight_of(branch, weight, on_host)

    def finish(self, outputs: Iterable[Value[Any]], has_chain: bool) -> None:
        """Sets the outputs and inserts the subgraph into the module, before its callers.

        Args:
            outputs: The results.
            has_chain: Whether the op takes and returns the chain; without it the chain input is removed.
        """
        values = list(outputs)
        chain = self._chains.take_input()
        assert chain is not None
        if has_chain:
            values.append(self._chains.current)
        else:
            self._block.erase_arg(chain)
        with self:
            self.stage("mo.output", values, result_types=())
        before = self.root.mlir_op
        # subgraphs stand before their callers, and inner branches before outer ones
        self.root._module.body.block.insert_op_before(self.mlir_op, before)


def _free_name(root: Graph, name: str) -> str:
    number = 0
    while f"{name}_{number}" in root._subgraphs or f"{name}_{number}" == root.name:
        number += 1
    return f"{name}_{number}"


def close_branches(
    op: str,
    branches: tuple[Branch, Branch],
    outputs: tuple[Sequence[Value[Any]], Sequence[Value[Any]]],
    first: Sequence[Value[Any]],
    own: Sequence[Value[Any]],
    roles: tuple[str, str],
    types: Sequence[mlir.Attribute],
) -> list[Value[Any]]:
    """Finishes the two subgraphs of an op with equal signatures, and stages the op.

    Args:
        op: The name of the op.
        branches: The subgraphs; the second was built with the captures of the first.
        outputs: The results of each subgraph.
        first: Operands of the op that the subgraphs do not take, such as the predicate.
        own: The values of the inputs that precede the captures.
        roles: The op's attribute name for each subgraph.
        types: The types of the op's results.

    Returns:
        The results of the op.
    """
    one, other = branches
    # both subgraphs take the same operands, also those that only the second one uses
    for value in other.captures:
        one.capture(value)
    assert one.captures == other.captures
    # without side effects the op stays pure, so that passes may move or remove it
    has_chain = one.has_effects or other.has_effects
    for branch, values in zip(branches, outputs, strict=True):
        branch.finish(values, has_chain)
    outer = one.outer
    attrs = {role: mlir.SymbolRefAttr(b.name) for role, b in zip(roles, branches, strict=True)}
    operands = [*first, *own, *[value_of(value) for value in one.captures]]
    stage = outer.stage_effect if has_chain else outer.stage
    return [value_of(result) for result in stage(op, operands, attrs, list(types))]
