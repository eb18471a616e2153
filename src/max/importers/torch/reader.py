"""The nodes of an fx graph as a source graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from max.importers.errors import ImportFailure
from max.importers.source import InputType, SourceGraph, SourceNode
from max.importers.torch.element_types import array_of, dtype_of
from max.importers.torch.table import Ref

if TYPE_CHECKING:
    import torch

__all__ = ["FxReader", "input_type", "op_name", "source_line"]

_IGNORED = {"device", "layout", "memory_format", "pin_memory", "non_blocking", "generator"}
"""Arguments that say nothing of the result's elements."""
_INLINED = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')


def op_name(node: torch.fx.Node) -> str:
    """The name of the function that a node calls, as tables have it."""
    target = str(node.target)
    if "." in target and not target.startswith("<"):
        return target
    return getattr(node.target, "__name__", target)


def source_line(node: torch.fx.Node) -> str:
    """Where the source program calls an op: the module's path, file and line."""
    trace = node.meta.get("stack_trace") or ""
    places = _PLACE.findall(trace)
    path = ""
    stack = node.meta.get("nn_module_stack")
    if stack:
        path = str(list(stack.values())[-1][0]).replace("L['self'].", "")
    where = f"{places[-1][0].rsplit('/', 1)[-1]}:{places[-1][1]}" if places else ""
    return " at ".join(part for part in (path, where) if part)


def input_type(value: torch.Tensor) -> InputType:
    """The declared type of a tensor; symbols for sizes that are symbols of torch."""
    shape: list[int | str | None] = []
    for size in value.shape:
        if isinstance(size, int):
            shape.append(size)
        else:
            expression = size.node.expr
            if expression.is_number:
                shape.append(int(expression))
            else:
                # an expression of several symbols has no name: the size is unknown
                shape.append(str(expression) if expression.is_symbol else None)
    dtype = dtype_of(value.dtype)
    if dtype is None:
        raise ImportFailure(f"an input is {value.dtype}, which graphs lack")
    return InputType("tensor", dtype, tuple(shape))


def _symbol(value: Any) -> Any:
    """The expression of a symbolic integer; None for other values."""
    node = getattr(value, "node", None)
    return getattr(node, "expr", None)


def _live(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that outputs need."""
    live: set[torch.fx.Node] = set()
    # the users of a node come behind it
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return live


class FxReader:
    """Reads an fx graph.

    Args:
        graph: The graph.
        module: The module that holds its tensors and subgraphs.
        bound_values: What placeholders stand for: arrays, by their names; the others are inputs.
    """

    def __init__(
        self, graph: torch.fx.Graph, module: torch.nn.Module | None, bound_values: Mapping[str, Any]
    ) -> None:
        self.graph = graph
        self.module = module
        self.constants: dict[str, Any] = dict(bound_values)
        self.nodes: list[SourceNode] = []
        self.inputs: list[tuple[str, InputType]] = []
        self.outputs: list[Any] = []
        self._names: dict[torch.fx.Node, Any] = {}
        self._symbols: dict[Any, tuple[str, int]] = {}
        self._number = 0

    def read(self, name: str, keep: Any = None) -> SourceGraph:
        """The whole graph.

        Args:
            name: The name of the graph.
            keep: The positions of outputs in their new order; None: all of them.
        """
        self._placeholders()
        self._body(self.graph, self.module, "")
        outputs = self.outputs if keep is None else [self.outputs[i] for i in keep]
        named = [(self._output(value, i), InputType()) for i, value in enumerate(outputs)]
        return SourceGraph(
            name,
            tuple(self.inputs),
            tuple(named),
            tuple(self.nodes),
            self.constants,
            f"{name}.py",
        )

    def _output(self, value: Any, index: int) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            name = f"output:{index}"
            self.constants[name] = np.array(value)
            return name
        raise ImportFailure(f"output {index} is {value!r}, expected a tensor")

    def _placeholders(self) -> None:
        sizes: list[tuple[Any, Any]] = []
        for node in self.graph.nodes:
            if node.op != "placeholder":
                continue
            self._names[node] = node.name
            if node.name in self.constants:
                continue
            value = node.meta.get("val")
            if hasattr(value, "shape"):
                self.inputs.append((node.name, input_type(value)))
                for axis, size in enumerate(value.shape):
                    expression = _symbol(size)
                    if expression is not None:
                        self._symbols.setdefault(expression, (node.name, axis))
            elif _symbol(value) is not None:
                sizes.append((node, value))
            elif isinstance(value, int | float | bool):
                self.constants[node.name] = np.array(value)
            elif value is not None and node.users:
                raise ImportFailure(f"input {node.name!r} is a {type(value).__name__}")
        # behind all tensors: their sizes have the symbols
        for node, value in sizes:
            self._size_input(node, value)

    def _size_input(self, node: Any, value: Any) -> None:
        """A placeholder that is a size: that of a tensor among the inputs."""
        expression = _symbol(value)
        if expression.is_number:
            self.constants[node.name] = np.array(int(expression))
            return
        if expression not in self._symbols:
            raise ImportFailure(
                f"input {node.name!r} is an integer that is no size of an input tensor"
            )
        name, axis = self._symbols[expression]
        arguments = {"args": [Ref(0, False), axis], "kwargs": {}}
        self.nodes.append(
            SourceNode("aten.sym_size.int", "", 0, (name,), (node.name,), arguments, "", 0)
        )

    def _body(self, graph: torch.fx.Graph, module: Any, prefix: str) -> list[Any]:
        """Reads the nodes; returns the outputs."""
        live = _live(graph)
        for node in graph.nodes:
            if node.op == "placeholder" or node not in live:
                continue
            if node.op == "get_attr":
                self._attribute(node, module, prefix)
            elif node.op == "output":
                results: Any = node.args[0]
                listed = results if isinstance(results, list | tuple) else [results]
                outputs = [self._value(argument) for argument in listed]
                # results of an inlined region are no outputs of the graph
                if not prefix:
                    self.outputs = outputs
                return outputs
            elif node.op == "call_function":
                self._call(node, module, prefix)
            else:
                raise ImportFailure(f"node {node.name!r} is a {node.op}, expected a function")
        return []

    def _attribute(self, node: torch.fx.Node, module: Any, prefix: str) -> None:
        value = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        # a graph, for a node that runs or inlines it
        if hasattr(value, "graph"):
            self._names[node] = value
            return
        name = f"{prefix}{node.name}"
        self.constants[name] = array_of(str(node.target), value)
        self._names[node] = name

    def _value(self, argument: Any) -> Any:
        """The name of a node, or the argument itself."""
        return self._names[argument] if hasattr(argument, "users") else argument

    def _call(self, node: torch.fx.Node, module: Any, prefix: str) -> None:
        target = node.target
        name = getattr(target, "__name__", str(target))
        # results of a node with several are a list of names
        if name == "getitem" and isinstance(names := self._value(node.args[0]), list | tuple):
            index = node.args[1]
            assert isinstance(index, int)
            self._names[node] = names[index]
            return
        label = op_name(node)
        if name in _INLINED:
            self._inline(node, name, prefix)
            return
        self._number += 1
        inputs: list[str] = []
        args = [self._argument(argument, inputs) for argument in node.args]
        kwargs = {
            key: self._argument(argument, inputs)
            for key, argument in node.kwargs.items()
            if key not in _IGNORED
        }
        attributes: dict[str, Any] = {"args": args, "kwargs": kwargs}
        # where `SourceNode.bodies` finds what they capture
        attributes |= {
            f"body {i}": arg for i, arg in enumerate(args) if isinstance(arg, SourceGraph)
        }
        value: Any = node.meta.get("val")
        results: list[Any] = list(value) if isinstance(value, tuple | list) else [value]
        if hasattr(results[0], "dtype"):
            attributes["dtype"] = dtype_of(results[0].dtype)
            attributes["sizes"] = [s if isinstance(s, int) else str(s) for s in results[0].shape]
        attributes["common"] = _common(node)
        # the only op that depends on how its operand lies in memory
        if label == "aten.as_strided.default":
            first: Any = node.args[0]
            attributes["strides"] = list(first.meta["val"].stride())
        outer = f"{prefix}{node.name}"
        if isinstance(value, tuple | list):
            # a result without users has no name, as no node needs to stage it
            used: list[Any] = [user.args[1] for user in node.users]
            names = [f"{outer}:{i}" for i in range(len(results))]
            self._names[node] = names
            outputs = tuple(n if i in used else "" for i, n in enumerate(names))
        else:
            self._names[node] = outer
            outputs = (outer,)
        self.nodes.append(
            SourceNode(
                label, "", 0, tuple(inputs), outputs, attributes, source_line(node), self._number
            )
        )

    def _inline(self, node: torch.fx.Node, name: str, prefix: str) -> None:
        """A region that sets a mode of torch which changes no result."""
        position = next(
            i
            for i, argument in enumerate(node.args)
            if hasattr(argument, "users") and hasattr(self._value(argument), "graph")
        )
        # its third argument is whether autocast is on
        if name == "wrap_with_autocast" and node.args[2]:
            raise ImportFailure("the program has a region of autocast; export it without")
        inner = self._value(node.args[position])
        places = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for place, argument in zip(places, node.args[position + 1 :], strict=True):
            self._names[place] = self._value(argument)
        self._names[node] = self._body(inner.graph, inner, f"{prefix}{node.name}/")

    def _body_of(self, node: torch.fx.Node, module: Any) -> SourceGraph:
        """A graph that a branch or loop runs."""
        inner = FxReader(module.graph, module, {})
        for place in module.graph.nodes:
            if place.op == "placeholder":
                inner._names[place] = place.name
                inner.inputs.append((place.name, InputType()))
        inner._body(module.graph, module, "")
        outputs = [(inner._output(value, i), InputType()) for i, value in enumerate(inner.outputs)]
        return SourceGraph(
            node.name, tuple(inner.inputs), tuple(outputs), tuple(inner.nodes), inner.constants
        )

    def _argument(self, argument: Any, inputs: list[str]) -> Any:
        import torch

        if isinstance(argument, torch.fx.Node):
            name = self._names[argument]
            if hasattr(name, "graph"):
                return self._body_of(argument, name)
            if not isinstance(name, str):
                raise ImportFailure(f"node {argument.name!r} is used as one value")
            inputs.append(name)
            # a constant is a tensor, and torch notes no value of it
            is_size = not hasattr(argument.meta.get("val"), "shape") and (argument.op != "get_attr")
            return Ref(len(inputs) - 1, is_size)
        if isinstance(argument, list | tuple):
            return [self._argument(item, inputs) for item in argument]
        if isinstance(argument, torch.dtype):
            dtype = dtype_of(argument)
            if dtype is None:
                raise ImportFailure(f"a tensor is {argument}, which graphs lack")
            return dtype
        return argument


def _common(node: torch.fx.Node) -> Any:
    """The element type that torch promotes the first two arguments to."""
    import torch

    if len(node.args) < 2:
        return None
    values: list[Any] = [
        argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument
        for argument in node.args[:2]
    ]
    if not all(isinstance(value, torch.Tensor | bool | int | float) for value in values):
        return None
    if not any(isinstance(value, torch.Tensor) for value in values):
        return None
    return dtype_of(torch.result_type(values[0], values[1]))
