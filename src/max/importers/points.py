"""Points of a program: what the segments behind them must know of their inputs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from max.dtype import DType
from max.importers.errors import ImportFailure
from max.importers.source import SourceGraph, SourceNode
from max.importers.values import Imported, Items, Value

__all__ = ["Choice", "Concrete", "Cut", "Point", "Rebuild"]

Array = npt.NDArray[Any]

_SIZES = ""
"""Among what decides about a value: the sizes of tensors. No value has this name."""
_SIZE_OPS = frozenset({"Shape", "Size"})
_MOST_NUMBERS = 4
"""Elements of an input that may decide about the structure."""
_MOST_STEPS = 64
"""Values between such an input and what it decides."""
_MOST_CHOICES = 4
"""Segments of a point before inputs decide no longer."""
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


@dataclass(frozen=True)
class Choice:
    """Inputs whose elements are known to a segment for the sake of a value that only they decide.

    Attributes:
        value: The value, whose elements a node needs at import.
        inputs: The inputs.
    """

    value: str
    inputs: frozenset[str]


class Point:
    """A place in the program, before a node.

    Args:
        nodes: The nodes behind it.
        known_values: Values that are known at import, by name.
        source: The model.
        structural: Names of values whose elements its segments must know.
        is_symbolic: Whether inputs have their declared types, with symbols for dynamic sizes.
        number: A number of the point, for names.
    """

    def __init__(
        self,
        nodes: Sequence[SourceNode],
        known_values: Mapping[str, Value],
        source: SourceGraph,
        structural: frozenset[str] = frozenset(),
        is_symbolic: bool = False,
        number: int = 0,
    ) -> None:
        self.nodes = tuple(nodes)
        self.source = source
        self.live = self.after(self.nodes, source)
        # what nodes read and no node behind the point makes
        used: set[str] = set().union(*(node.names_read for node in self.nodes)) & self.live
        self.known = {name: value for name, value in known_values.items() if name in self.live}
        self.read = frozenset(used - set(self.known))
        self._order = sorted(self.read)  # of the parts of a key
        self.structural = set(structural)
        self.is_symbolic = is_symbolic
        self.number = number
        self.cuts: dict[tuple[str, ...], Cut] = {}
        self.choices: dict[tuple[str, ...], Choice] = {}
        self.segments: OrderedDict[object, Any] = OrderedDict()

    @staticmethod
    def after(nodes: Sequence[SourceNode], source: SourceGraph) -> frozenset[str]:
        """The names that are needed before these nodes: by them, or as outputs of the model."""
        needed = {name for name, _ in source.outputs}
        # from the last node on: a name is needed until the node that makes it
        for node in reversed(nodes):
            needed.difference_update(node.outputs)
            needed |= node.names_read
        return frozenset(needed)

    def stored_as(self, name: str) -> str:
        """The narrow type that the elements of a model's input have."""
        return next((type_.stored_as for other, type_ in self.source.inputs if other == name), "")

    def next(
        self, nodes: Sequence[SourceNode], known_values: Mapping[str, Value], cut: Cut
    ) -> Point:
        """The point behind a segment of this one."""
        return Point(nodes, known_values, self.source, cut.structural, False, self.number + 1)

    def learn(
        self,
        node: SourceNode,
        name: str,
        inputs: set[str],
        values: Mapping[str, Any],
        staged_nodes: Sequence[SourceNode] = (),
    ) -> None:
        """Remembers that a node needs the elements of a value, or its sizes.

        Args:
            node: The node.
            name: The value.
            inputs: The names of the segment's inputs.
            values: The values by name.
            staged_nodes: The nodes of the segment before this one.

        Raises:
            Rebuild: Always, unless it is known to be of no use.
            ImportFailure: The value is known as well as it can be.
        """
        value = values.get(name)
        if name in inputs:
            # sizes as numbers may be all that is missing; the elements are asked for next
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
                self._learn_computed(node, name, self._deciding(name, inputs, values, staged_nodes))
        # a body needs what no staging of this segment can know
        elif node.bodies:
            self.cuts[node.outputs] = Cut(host=True)
        elif self.is_symbolic:
            self.is_symbolic = False
        else:
            raise ImportFailure(f"node {node.number} ({node.op}): {name!r} is not known enough")
        raise Rebuild

    def _learn_computed(self, node: SourceNode, name: str, deciding: frozenset[str] | None) -> None:
        """Remembers that a node needs a computed value, which sizes and some inputs decide, or (None) others."""
        if deciding is not None and self.is_symbolic and _SIZES in deciding:
            self.is_symbolic = False
        elif deciding is not None and (chosen := deciding - self.structural - {_SIZES}):
            self.choices[node.outputs] = Choice(name, chosen)
            self.structural |= chosen
        else:
            self.cuts[node.outputs] = Cut(frozenset([name]))

    def _deciding(
        self,
        name: str,
        inputs: set[str],
        values: Mapping[str, Any],
        staged_nodes: Sequence[SourceNode],
    ) -> frozenset[str] | None:
        """The inputs that decide about a value, if they are a few integers or flags, and `_SIZES` for sizes of tensors.

        Returns:
            Their names; None if other inputs decide.
        """
        producers = {output: node for node in staged_nodes for output in node.outputs if output}
        deciding: set[str] = set()
        todo, seen = [name], {name}
        while todo and len(seen) <= _MOST_STEPS:
            current = todo.pop()
            if current in inputs:
                value = values.get(current)
                if not isinstance(value, Imported) or not _is_choice(value):
                    return None
                deciding.add(current)
            elif current in producers:
                node = producers[current]
                if node.op in _SIZE_OPS:
                    deciding.add(_SIZES)
                    continue
                # further up: the producer's operands decide about its result
                fresh = node.names_read - seen
                seen |= fresh
                todo.extend(fresh)
            # neither an input nor a result of this segment, and no constant
            elif not isinstance(value := values.get(current), Imported) or value.contents is None:
                return None
        # too long a way: what is left may depend on anything
        return None if todo else frozenset(deciding)

    def limit_choices(self) -> bool:
        """Ends segments before nodes that need what inputs decide, if these have many values; whether there are any.

        Such a node then runs for each value that it needs, not for each of the inputs.
        """
        if not self.choices or len(self.segments) <= _MOST_CHOICES:
            return False
        for outputs, choice in self.choices.items():
            self.structural -= choice.inputs
            self.cuts[outputs] = Cut(frozenset([choice.value]))
        self.choices.clear()
        # they were staged with the inputs' elements as constants
        self.segments.clear()
        return True

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
        # the node begins a segment of its own, whose inputs have known sizes
        self.cuts[node.outputs] = Cut()
        raise Rebuild

    def key(self, env: Mapping[str, Concrete]) -> object:
        """What the segments of the point depend on."""
        return tuple([self._part(name, env[name]) for name in self._order])

    def _part(self, name: str, value: Concrete) -> object:
        if value is None:
            return None
        if isinstance(value, list):
            return tuple(self._part(name, item) for item in value)
        if value.dtype == object:
            # texts and expressions are constants of a segment
            return (value.shape, tuple(value.flat))
        if name in self.structural:
            return (value.dtype, value.shape, value.tobytes())
        # a segment with symbolic sizes serves all of them
        return value.dtype if self.is_symbolic else (value.dtype, value.shape)


def _is_choice(value: Imported) -> bool:
    """Whether a value is a few integers or flags."""
    dtype = value.dtype
    if value.is_text or not value.is_static or dtype is None:
        return False
    count = math.prod(int(size) for size in value.shape)
    return count <= _MOST_NUMBERS and (dtype.is_integral() or dtype is DType.bool)


def _is_number(item: Imported) -> bool:
    """Whether contents, if they are known, have no symbols."""
    return item.contents is None or item.is_text or item.numbers is not None
