"""Tables of functions: how each op of a framework is staged, folded, or executed by the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OpFunction", "OpTable"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class OpFunction:
    """A function of a table.

    Attributes:
        function: The function.
        takes_tensors: Whether it takes the operands as tensors of the graph, after the node. Else its only parameter
            is the node.
    """

    function: Function
    takes_tensors: bool


def _describe_function(function: Function) -> OpFunction:
    return OpFunction(function, len(inspect.signature(function).parameters) > 1)


@dataclass
class OpTable:
    """The ops of a framework.

    `op` and `fold` and `host` are decorators::

        @TABLE.op("Elu")
        def elu(node, x):
            return ops.where(x > 0, x, node.attr("alpha", 1.0) * (ops.exp(x) - 1))

    A function of `op` stages graph ops and returns the result, or a tuple of several: tensors, or arrays of what is
    known without a run. With a parameter besides the node it takes the operands as tensors (None for an absent
    one); with the node alone it asks the node for what it needs (`node.tensor(0)`, `node.sizes(1)`,
    `node.elements(2)`).

    A function of `fold` computes known results from known operands, arrays that may have dimensions among their
    elements; it returns None if it cannot.

    A function of `host` computes results from arrays: strings, and results that have no place in a graph.
    """

    framework: str
    ops: dict[str, OpFunction] = field(default_factory=dict)
    folds: dict[str, Function] = field(default_factory=dict)
    hosts: dict[str, Function] = field(default_factory=dict)

    def op(self, *names: str) -> Callable[[Function], Function]:
        """Registers a function that stages the ops of these names; names outside the framework's own domain have it as
        prefix: ``"com.microsoft:Gelu"``.
        """

        def register(function: Function) -> Function:
            for name in names:
                self._add(self.ops, name, _describe_function(function))
            return function

        return register

    def fold(self, *names: str) -> Callable[[Function], Function]:
        """Registers a function of known operands."""

        def register(function: Function) -> Function:
            for name in names:
                self._add(self.folds, name, function)
            return function

        return register

    def host(self, *names: str) -> Callable[[Function], Function]:
        """Registers a function that the host executes, on arrays."""

        def register(function: Function) -> Function:
            for name in names:
                self._add(self.hosts, name, function)
            return function

        return register

    def _add(self, table: dict[str, Any], name: str, entry: Any) -> None:
        if name in table:
            raise ValueError(f"{self.framework}: two functions for {name}")
        table[name] = entry
