"""Points of a program: what the segments behind them must know of their inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from max.importers.errors import ImportFailure
from max.importers.source import SourceGraph, SourceNode
from max.importers.values import Imported, Items, Value

__all__ = ["Concrete", "Cut", "Point", "Rebuild"]

Array = npt.NDArray[Any]
Concrete = Array | list[Array] | None


class Rebuild(Exception):
    """A segment must be staged again, as its point of the program has learnt what it needs."""


@dataclass(frozen=True)
class Cut:
    """Why a segment ends before a node.

    Attributes:
        structural: Values whose elements the node needs at import.
        host: Whether the host executes the node.
    """

    structural: frozenset[str] = frozenset()
    host: bool = False


class Point:
    """A place in the program, before a node.

    Args:
        nodes: The nodes behind it.
        known: Values that are known at import, by name.
        source: The model.
        structural: Names of values whose elements its segments must know.
        is_symbolic: Whether inputs have their declared types, with symbols for dynamic sizes.
        number: A number of the point, for names.
    """

    def __init__(
        self,
        nodes: Sequence[SourceNode],
        known: Mapping[str, Value],
        source: SourceGraph,
        structural: frozenset[str] = frozenset(),
        is_symbolic: bool = False,
        number: int = 0,
    ) -> None:
        self.nodes = tuple(nodes)
        self.source = source
        self.live = self.after(self.nodes, source)
        used: set[str] = set().union(*(node.used for node in self.nodes)) & self.live
        self.known = {name: value for name, value in known.items() if name in self.live}
        self.read = frozenset(used - set(self.known))
        self.structural = set(structural)
        self.is_symbolic = is_symbolic
        self.number = number
        self.cuts: dict[tuple[str, ...], Cut] = {}
        self.segments: OrderedDict[object, Any] = OrderedDict()

    @staticmethod
    def after(nodes: Sequence[SourceNode], source: SourceGraph) -> frozenset[str]:
        """The names that are needed before these nodes: by them, or as outputs of the model."""
        needed = {name for name, _ in source.outputs}
        for node in reversed(nodes):
            needed.difference_update(node.outputs)
            needed |= node.used
        return frozenset(needed)

    def stored_as(self, name: str) -> str:
        """The narrow type that the elements of a model's input have."""
        return next((type_.stored_as for other, type_ in self.source.inputs if other == name), "")

    def next(self, nodes: Sequence[SourceNode], known: Mapping[str, Value], cut: Cut) -> Point:
        """The point behind a segment of this one."""
        return Point(nodes, known, self.source, cut.structural, False, self.number + 1)

    def learn(
        self, node: SourceNode, name: str, inputs: set[str], values: Mapping[str, Any]
    ) -> None:
        """Remembers that a node needs the elements of a value, or its sizes.

        Raises:
            Rebuild: Always, unless it is known to be of no use.
            ImportFailure: The value is known as well as it can be.
        """
        value = values.get(name)
        if name in inputs:
            if self.is_symbolic and isinstance(value, Imported) and not value.is_static:
                self.is_symbolic = False
            elif name not in self.structural:
                self.structural.add(name)
            else:
                raise ImportFailure(f"node {node.number} ({node.op}): {name!r} is not known enough")
        elif (
            isinstance(value, Imported) and value.contents is None and node.outputs not in self.cuts
        ):
            if self.is_symbolic and not value.is_static:
                self.is_symbolic = False
            else:
                self.cuts[node.outputs] = Cut(frozenset([name]))
        elif node.bodies:
            self.cuts[node.outputs] = Cut(host=True)
        elif self.is_symbolic:
            self.is_symbolic = False
        else:
            raise ImportFailure(f"node {node.number} ({node.op}): {name!r} is not known enough")
        raise Rebuild

    def learn_sizes(self, node: SourceNode, operands: Sequence[Value]) -> bool:
        """Remembers that a node could not be staged with symbolic sizes; whether there were such.

        Raises:
            Rebuild: Sizes will be known after another staging.
        """
        if self.is_symbolic:
            self.is_symbolic = False
            raise Rebuild
        tensors = [
            item
            for value in operands
            for item in (value if isinstance(value, Items) else [value])
            if isinstance(item, Imported)
        ]
        if all(item.is_static and _is_number(item) for item in tensors):
            return False
        self.cuts[node.outputs] = Cut()
        raise Rebuild

    def key(self, env: Mapping[str, Concrete]) -> object:
        """What the segments of the point depend on."""
        return tuple((name, self._part(name, env[name])) for name in sorted(self.read))

    def _part(self, name: str, value: Concrete) -> object:
        if value is None:
            return None
        if isinstance(value, list):
            return tuple(self._part(name, item) for item in value)
        if value.dtype == object:
            return (value.shape, tuple(value.flat))
        if name in self.structural:
            return (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
        return value.dtype.name if self.is_symbolic else (value.dtype.name, value.shape)


def _is_number(item: Imported) -> bool:
    """Whether contents, if they are known, have no symbols."""
    return item.contents is None or item.is_text or item.numbers is not None
