"""Models whose structure depends on data: staged in segments, each when what it must know of its inputs is known.

A point of the program lies before a node. It has a segment for each combination of what the nodes behind it must know:
the sizes of the values that they use, and the elements of those that determine the structure (axes, a shape that is
computed from data, a condition). At first nothing but declared types is known; staging finds out what else it needs,
and the point remembers it. A model whose structure is static is one segment, which serves all sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max.engine import InferenceSession, Model
from max.engine._array_runs import execute_fitting_arrays
from max.importers.build import constants_of
from max.importers.errors import ImportFailure
from max.importers.node import Node
from max.importers.points import Concrete, Point, Rebuild
from max.importers.segment import Segment, stage_segment
from max.importers.source import SourceGraph, SourceNode
from max.importers.values import Imported
from max.importers.walk import Framework, Walker

__all__ = ["HostCall", "Program"]

Array = npt.NDArray[Any]

_MOST_SEGMENTS = 64
"""Segments that a point keeps; the one that was not used for the longest time is dropped."""
_MOST_REBUILDS = 10_000


class HostCall(Node):
    """A node that the host executes, as the function of its op sees it.

    Args:
        source: The node.
        operands: The arrays of its operands.
        program: The program around it.
        env: The values of the run by name.
    """

    def __init__(
        self,
        source: SourceNode,
        operands: Sequence[Concrete],
        program: Program,
        env: Mapping[str, Concrete],
    ) -> None:
        values = [Imported(contents=v) if isinstance(v, np.ndarray) else None for v in operands]
        super().__init__(source, values, Walker(program.framework, program.source.name, {}))
        self._program, self._env = program, env

    def run(self, body: SourceGraph, arguments: Sequence[Concrete]) -> list[Concrete]:
        """Executes a graph among the node's attributes.

        Args:
            body: The graph.
            arguments: The values of its inputs.
        """
        program = self._program.of_body(body)
        feeds = {name: self._env[name] for name in body.captured_names}
        names = [name for name, _ in body.inputs]
        return program.run({**feeds, **dict(zip(names, arguments, strict=True))})


def _shared_sizes(source: SourceGraph) -> list[tuple[str, list[tuple[int, str]]]]:
    """The axes of inputs whose sizes have a name that other axes have too, by input."""
    named = [
        (name, [(i, s) for i, s in enumerate(type_.shape or ()) if isinstance(s, str)])
        for name, type_ in source.inputs
    ]
    counts = Counter(symbol for _, places in named for _, symbol in places)
    shared = [(name, [place for place in places if counts[place[1]] > 1]) for name, places in named]
    return [(name, places) for name, places in shared if places]


class _Whole(NamedTuple):
    """A model that is one graph, of all of its inputs, for all sizes.

    Attributes:
        model: The compiled graph.
        inputs: The names of the inputs, in the order of the graph's.
        outputs: For each output of the model the number of the graph's.
    """

    model: Model
    inputs: tuple[str, ...]
    outputs: tuple[int, ...]


class Program:
    """A model that is staged while it runs.

    Args:
        source: The model.
        framework: The tables of its framework.
        session: What compiles the segments.
        is_symbolic: Whether to try graphs for all sizes first.
    """

    def __init__(
        self,
        source: SourceGraph,
        framework: Framework,
        session: InferenceSession,
        is_symbolic: bool = True,
    ) -> None:
        self.source = source
        self.framework = framework
        self.session = session
        can = is_symbolic and not source.captured_names and all(
            type_.kind == "tensor" and not type_.optional and type_.shape is not None
            for _, type_ in source.inputs
        )  # fmt: skip
        self._bodies: dict[int, Program] = {}
        self._shared = _shared_sizes(source)
        self._start = Point(source.nodes, constants_of(source), source, is_symbolic=can)
        self._whole: _Whole | None = None

    def run(self, feeds: Mapping[str, Concrete]) -> list[Concrete]:
        """Executes the model.

        Args:
            feeds: The values of inputs, and of names that a body captures.

        Returns:
            The values of the outputs.

        Raises:
            ImportFailure: A node cannot be staged.
        """
        if self._start.is_symbolic and not self._fits(feeds):
            self._start.is_symbolic = False
            self._start.segments.clear()
        env: dict[str, Concrete] = {**self.source.constants, **feeds}
        point = self._start
        while True:
            segment = self._segment(point, env)
            segment.run(env)
            if segment.host is not None:
                self._host(segment.host, env)
            if segment.following is None:
                if point is self._start:
                    self._whole = self._whole_of(segment)
                return [env[name] for name, _ in self.source.outputs]
            point = segment.following
            for name in env.keys() - point.live:
                del env[name]

    def run_whole(self, feeds: Mapping[str, object]) -> list[Array] | None:
        """Executes a model that is one graph with inputs that fit it as they are, without what other models need.

        Args:
            feeds: The values of inputs; they may be anything.

        Returns:
            The values of the outputs; None: nothing was executed, and `run` must see to it.
        """
        whole = self._whole
        if whole is None or len(feeds) != len(whole.inputs):
            return None
        try:
            arrays: Any = [feeds[name] for name in whole.inputs]
        except KeyError:
            return None
        # the graph has the declared types, and takes no others
        results = execute_fitting_arrays(whole.model, arrays)
        return None if results is None else [results[i] for i in whole.outputs]

    def _whole_of(self, segment: Segment) -> _Whole | None:
        """What `run_whole` needs, where the first segment is all there is."""
        start, model = self._start, segment.model
        names = tuple([name for name, index in segment.arguments if index is None])
        results = [segment.results.get(name) for name, _ in self.source.outputs]
        numbers = tuple([number for number in results if isinstance(number, int)])
        if (
            model is None
            or not start.is_symbolic
            or start.structural
            or segment.host is not None
            or sorted(names) != sorted(name for name, _ in self.source.inputs)
            or len(names) != len(segment.arguments)
            or len(numbers) != len(results)
        ):
            return None
        return _Whole(model, names, numbers)

    def _fits(self, feeds: Mapping[str, Concrete]) -> bool:
        """Whether dynamic sizes of one name are equal, as symbols are: not all exporters see to it."""
        sizes: dict[str, int] = {}
        for name, places in self._shared:
            array = feeds.get(name)
            if not isinstance(array, np.ndarray):
                continue
            for axis, symbol in places:
                if (
                    axis < array.ndim
                    and sizes.setdefault(symbol, array.shape[axis]) != array.shape[axis]
                ):
                    return False
        return True

    @property
    def segments(self) -> int:
        """The number of compiled segments."""
        count, points = 0, [self._start]
        while points:
            point = points.pop()
            count += len(point.segments)
            points += [s.following for s in point.segments.values() if s.following is not None]
        return count

    def _segment(self, point: Point, env: Mapping[str, Concrete]) -> Segment:
        for _ in range(_MOST_REBUILDS):
            key = point.key(env)
            if key in point.segments:
                point.segments.move_to_end(key)
                return point.segments[key]
            try:
                segment = stage_segment(point, env, self.framework, self.source, self.session)
            except Rebuild:
                point.segments.clear()
                continue
            point.segments[key] = segment
            if point.limit_choices():
                continue
            if len(point.segments) > _MOST_SEGMENTS:
                point.segments.popitem(last=False)
            return segment
        raise ImportFailure(f"{self.source.name}: staging does not end")

    def of_body(self, body: SourceGraph) -> Program:
        """The program of a body of one of the nodes."""
        key = id(body)
        if key not in self._bodies:
            if len(self._bodies) > _MOST_SEGMENTS:
                self._bodies.clear()
            self._bodies[key] = Program(body, self.framework, self.session, False)
        return self._bodies[key]

    def _host(self, node: SourceNode, env: dict[str, Concrete]) -> None:
        """Executes a node on the host."""
        operands = [env[name] if name else None for name in node.inputs]
        function = self.framework.table.hosts.get(node.full_name)
        if function is None:
            raise ImportFailure(
                f"{Walker.describe_node(node)}: cannot be staged, whatever is known"
            )
        with np.errstate(all="ignore"):
            results = function(HostCall(node, operands, self, env), *operands)
        listed = results if isinstance(results, tuple) else (results,)
        for name, result in zip(node.outputs, listed, strict=False):
            if name:
                env[name] = result
