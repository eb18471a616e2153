"""Stages the nodes of a source graph into the graph that is being built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from max.graph import Dim, Graph, TensorValue
from max.importers import folding
from max.importers.errors import (
    HostNode,
    ImportFailure,
    MissingContents,
    ModelFileError,
    Problem,
    Unsupported,
    UnsupportedOpsError,
)
from max.importers.node import Node
from max.importers.source import SourceGraph, SourceNode
from max.importers.table import OpTable
from max.importers.values import Imported, Items, Value

__all__ = ["Framework", "Walker"]

Array = npt.NDArray[Any]

_DEEPEST = 32
"""Functions within functions, and branches within branches."""
_MOST_EXPANSIONS = 50_000
_MOST_NODES = 2_000_000
"""Nodes that an import may stage, those of expanded functions and unrolled bodies included."""


class Framework(Protocol):
    """What an importer adds to the common layer.

    Attributes:
        table: The functions of its ops.
        in_parts: What runs models that are no single graph, for messages.
    """

    table: OpTable
    in_parts: str

    def expand(self, node: Node) -> SourceGraph | None:
        """The definition of an op by other ops: a graph with the operands as inputs; None: it has none."""
        ...


class _Missing:
    """The result of a node that could not be staged."""


MISSING = _Missing()


class Walker:
    """Stages nodes one after the other. The values of names are in `values`.

    Args:
        framework: The tables of the source framework.
        name: The name of the model, for messages.
        values: The values of inputs and constants by name.
        gathers: Whether problems are gathered instead of raised, so that `finish` raises all of them.
        file: The file of the model, which the places of ops name.
    """

    def __init__(
        self,
        framework: Framework,
        name: str,
        values: Mapping[str, Value],
        gathers: bool = False,
        file: str = "model",
    ) -> None:
        self.framework = framework
        self.name = name
        self.file = file
        self.values: dict[str, Any] = dict(values)
        self.problems: list[Problem] = []
        self._gathers = gathers
        self._expansions = 0
        self._count = 0
        self._spliced = 0

    # nodes ---------------------------------------------------------------------------------------

    def run(self, nodes: Iterable[SourceNode]) -> None:
        """Stages nodes in order, with those of functions and branches that they expand to.

        Raises:
            ImportFailure: A node cannot be staged.
            MissingContents: A node needs what is not known at import.
            HostNode: A node is for the host.
        """
        # a stack: nodes that stand for another one come next, before those behind it
        pending = list(nodes)[::-1]
        while pending:
            node = pending.pop()
            pending.extend(self.step(node)[::-1])

    def step(self, source: SourceNode) -> Sequence[SourceNode]:
        """Stages one node, or returns the nodes that stand for it."""
        self._count += 1
        if self._count > _MOST_NODES:
            raise ModelFileError(f"{self.name}: more than {_MOST_NODES} nodes")
        operands = [self.values[name] if name else None for name in source.inputs]
        # the problem was reported at the node that should have made it
        if any(operand is MISSING for operand in operands):
            self._set_missing(source)
            return ()
        node = Node(source, operands, self)
        with self._at_node(source):
            try:
                return self._stage_node(node)
            except (MissingContents, HostNode) as need:
                if not self._gathers:
                    raise
                self._problem(source, str(need), True)
            except (Unsupported, NotImplementedError) as error:
                self._problem(source, str(error))
            # of a body: it names its own node
            except (UnsupportedOpsError, ModelFileError, ImportFailure):
                raise
            except (AttributeError, AssertionError, ZeroDivisionError) as error:
                # what a function finds absent that its op requires
                self._problem(
                    source, f"lacks an operand or attribute, or has a senseless one: {error}"
                )
            except (ValueError, TypeError, IndexError, OverflowError, KeyError) as error:
                if not self._gathers:
                    raise ImportFailure(
                        f"{self.name}: {self.describe_node(source)}: {error}"
                    ) from error
                self._problem(source, str(error))
        self._set_missing(source)
        return ()

    def _problem(self, source: SourceNode, reason: str, needs_run: bool = False) -> None:
        problem = Problem(self.describe_node(source), source.full_name, reason, needs_run)
        if not self._gathers:
            raise UnsupportedOpsError(self.name, [problem])
        self.problems.append(problem)

    def _set_missing(self, source: SourceNode) -> None:
        for name in source.outputs:
            if name:
                self.values[name] = MISSING

    def finish(self) -> None:
        """Raises the gathered problems.

        Raises:
            UnsupportedOpsError: There are some.
        """
        if self.problems:
            in_parts = all(problem.needs_run for problem in self.problems)
            hint = self.framework.in_parts if in_parts else ""
            raise UnsupportedOpsError(self.name, self.problems, hint)

    @staticmethod
    def describe_node(source: SourceNode) -> str:
        """A node for messages: its position, op and name."""
        label = f" {source.label!r}" if source.label else ""
        return f"node {source.number} ({source.full_name}{label})"

    @contextmanager
    def _at_node(self, source: SourceNode) -> Any:
        graph = Graph.current
        label = (source.label or source.full_name).replace("\n", " ")
        with graph.at_place(self.file, source.number), graph.profile_scope(label):
            yield

    def _stage_node(self, node: Node) -> Sequence[SourceNode]:
        source = node.source
        table = self.framework.table
        # shapes and axes of later nodes may depend on it
        results = folding.fold_node(node, table)
        if results is None:
            entry = table.ops.get(source.full_name)
            if entry is not None:
                results = (
                    entry.function(node, *node.tensors())
                    if entry.takes_tensors
                    else entry.function(node)
                )
            elif source.full_name in table.hosts:
                raise HostNode("runs between graphs, not in one")
        if isinstance(results, SourceGraph):
            return self.splice_graph(source, results)
        if results is None:
            expanded = self.framework.expand(node)
            if expanded is None:
                raise Unsupported(f"the op {source.full_name} is not known")
            return self.splice_graph(source, expanded)
        self.define(source, results)
        return ()

    def define(self, source: SourceNode, results: Any) -> None:
        """Binds the names of a node's results."""
        listed = results if isinstance(results, tuple) else (results,)
        if len(listed) < len([name for name in source.outputs if name]):
            raise Unsupported(f"has {len(source.outputs)} results; {len(listed)} are known here")
        for name, result in zip(source.outputs, listed, strict=False):
            if name:
                self.values[name] = as_value(result)

    def splice_graph(self, source: SourceNode, graph: SourceGraph) -> list[SourceNode]:
        """The nodes of a graph that stands for a node: its inputs are the node's operands, its outputs the results."""
        if source.depth >= _DEEPEST:
            raise ModelFileError(
                f"{self.name}: {self.describe_node(source)} is expanded deeper than {_DEEPEST}: a function calls itself"
            )
        self._expansions += 1
        self._spliced += 1
        if self._spliced > _MOST_EXPANSIONS:
            raise ModelFileError(f"{self.name}: more than {_MOST_EXPANSIONS} calls of functions")
        # unique, so that two calls of a function do not bind the same names
        prefix = f"{source.outputs[0] if source.outputs else ''}/{self._expansions}/"
        bound = {
            name: source.inputs[i] if i < len(source.inputs) else ""
            for i, (name, _) in enumerate(graph.inputs)
        }
        inner = graph.with_prefix(prefix, bound)
        for name, array in inner.constants.items():
            self.values[name] = Imported(contents=array)
        copies = [
            SourceNode(
                # the names of the results are bound to those of the function's outputs
                "Identity",
                "",
                source.version,
                (inner_name,),
                (outer,),
                {},
                source.label,
                source.number,
            )
            for (inner_name, _), outer in zip(inner.outputs, source.outputs, strict=False)
            if outer
        ]
        return [*(replace(node, depth=source.depth + 1) for node in inner.nodes), *copies]

    # bodies --------------------------------------------------------------------------------------

    def inner(self, graph: SourceGraph, arguments: Sequence[Value]) -> list[Value]:
        """Stages a body into the graph that is being built, which may be a branch of this walker's graph.

        Args:
            graph: The body.
            arguments: The values of its inputs.

        Returns:
            The values of its outputs.
        """
        values = {
            **self.values,
            **{name: Imported(contents=array) for name, array in graph.constants.items()},
            **{name: value for (name, _), value in zip(graph.inputs, arguments, strict=True)},
        }
        walker = Walker(self.framework, self.name, values, False, self.file)
        # limits and numbers hold for the whole import, bodies included
        walker._expansions = self._expansions + 1
        walker._count, walker._spliced = self._count, self._spliced
        walker.run(graph.nodes)
        self._expansions, self._count = walker._expansions, walker._count
        self._spliced = walker._spliced
        return [walker.values[name] for name, _ in graph.outputs]


def as_value(result: Any) -> Value:
    """The value that a function's result stands for.

    Raises:
        TypeError: It stands for none.
    """
    match result:
        case None | Imported() | Items():
            return result
        case TensorValue():
            return Imported(result)
        case np.ndarray():
            return Imported(contents=result)
        case Dim():
            return Imported(contents=np.array(result, object))
        case np.generic():
            return Imported(contents=np.asarray(result))
        case list():
            return Items(as_imported(item) for item in result)
        case _:
            raise TypeError(f"a function returned {result!r}, which is no value")


def as_imported(item: Any) -> Imported:
    """The tensor that an item of a sequence stands for."""
    value = as_value(item)
    if not isinstance(value, Imported):
        raise TypeError(f"an item of a sequence is {item!r}, expected a tensor")
    return value
