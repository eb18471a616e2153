"""Modules: graphs that are compiled and loaded together."""

from __future__ import annotations

from typing import Any

__all__ = ["Module"]


class Module:
    """Graphs that `InferenceSession.compile` and `load_all` take together::

    module = Module()
    Graph("double", lambda x: x * 2, input_types=[vector], module=module)
    Graph("square", lambda x: x * x, input_types=[vector], module=module)
    models = InferenceSession().load_all(module)  # {"double": ..., "square": ...}
    """

    __module__ = "max.graph"

    def __init__(self) -> None:
        self._graphs: list[Any] = []

    @property
    def graphs(self) -> tuple[Any, ...]:
        """The graphs, in the order in which they were made."""
        return tuple(self._graphs)

    def add(self, graph: Any) -> None:
        """Adds a graph.

        Args:
            graph: A `Graph`, whose file is above this one.
        """
        self._graphs.append(graph)

    def top_level_graph_names(self) -> list[str]:
        """The names of the graphs, without those of their subgraphs."""
        return [graph.name for graph in self._graphs]

    def __repr__(self) -> str:
        return f"Module({', '.join(self.top_level_graph_names())})"
