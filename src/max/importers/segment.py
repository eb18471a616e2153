"""One part of a program: a graph that is staged for known sizes, and what follows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine._array_runs import execute_arrays
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.importers.build import declared_types
from max.importers.errors import HostNode, ImportFailure, MissingContents, UnsupportedOpsError
from max.importers.points import Concrete, Cut, Point, Rebuild
from max.importers.source import SourceGraph, SourceNode
from max.importers.values import Imported, Items, Value
from max.importers.walk import Framework, Walker

__all__ = ["Segment", "stage_segment"]

Array = npt.NDArray[Any]


@dataclass
class Segment:
    """A compiled part.

    Attributes:
        model: The compiled graph; None if nothing is computed.
        arguments: The names of its inputs, and the position in the sequence or None.
        results: What each name that later nodes need is after this segment: an int, the number of an output of the
            model; a list of such; an array; or None.
        following: The point after it; None: the model's outputs are complete.
        host: The node that the host executes after the model.
    """

    model: Model | None
    arguments: list[tuple[str, int | None]]
    results: dict[str, Any]
    following: Point | None = None
    host: SourceNode | None = None

    def run(self, env: dict[str, Concrete]) -> None:
        """Executes the graph, and binds its results in `env`."""
        outputs: Sequence[Any] = ()
        if self.model is not None:
            arrays = [_argument(env, name, index) for name, index in self.arguments]
            outputs = execute_arrays(self.model, arrays)
        for name, result in self.results.items():
            env[name] = _concrete(result, outputs)


def _argument(env: Mapping[str, Concrete], name: str, index: int | None) -> Array:
    value = env[name]
    array = value if index is None else value[index]  # pyright: ignore[reportOptionalSubscript]
    return np.asarray(array, order="C")


def _concrete(result: Any, outputs: Sequence[Any]) -> Any:
    if isinstance(result, int):
        return outputs[result]
    if isinstance(result, list):
        return [_concrete(item, outputs) for item in result]
    return result


@dataclass
class _Inputs:
    """The inputs of a segment's graph, and the values that stand for them."""

    types: list[TensorType] = field(default_factory=list)
    arguments: list[tuple[str, int | None]] = field(default_factory=list)

    def add(self, array: Array, name: str, index: int | None = None) -> int:
        self.types.append(TensorType(DType.from_numpy(array.dtype), array.shape, DeviceRef.CPU()))
        self.arguments.append((name, index))
        return len(self.types) - 1


def stage_segment(
    point: Point,
    env: Mapping[str, Concrete],
    framework: Framework,
    source: SourceGraph,
    session: InferenceSession,
) -> Segment:
    """Stages and compiles the nodes that follow a point of the program, as many as fit one graph.

    Args:
        point: The point.
        env: The values of a run at the point.
        framework: The tables of the framework.
        source: The model.
        session: What compiles.

    Raises:
        Rebuild: The point has learnt that it must know more of its inputs.
        ImportFailure: A node cannot be staged, whatever is known.
    """
    inputs = _Inputs()
    places: dict[str, Any] = {}
    # inputs are of the graph, except what the point's segments must know: that is constant
    values: dict[str, Value] = dict(point.known)
    for name in sorted(point.read):
        value = env[name]
        if value is None:
            values[name] = None
        elif isinstance(value, list):
            places[name] = [
                item if _is_known(point, name, item) else inputs.add(item, name, index)
                for index, item in enumerate(value)
            ]
        elif _is_known(point, name, value):
            values[name] = Imported(contents=value, stored_as=point.stored_as(name))
        else:
            places[name] = inputs.add(value, name)
    if point.is_symbolic:
        inputs.types = _symbolic_types(source, inputs)
    with Graph(source.name or "main", input_types=inputs.types) as graph:
        for name, place in places.items():
            values[name] = _value(place, graph, point.stored_as(name))
        walker = Walker(framework, source.name, values, False, source.file)
        # names of expanded functions differ from those of the segments before
        walker._expansions = point.number * 100_000  # pyright: ignore[reportPrivateUsage]
        remaining, cut = _walk(point, walker, set(places))
        needed = point.after(remaining, source)
        outputs: list[TensorValue] = []
        results, known = _results(needed, walker.values, values, point, outputs)
        if outputs:
            graph.output(*outputs)
    segment = Segment(session.load(graph) if outputs else None, inputs.arguments, results)
    if cut is not None:
        # the host runs the node itself; the next segment begins behind it
        if cut.host:
            segment.host = remaining[0]
            remaining = remaining[1:]
        segment.following = point.next(remaining, known, cut)
    return segment


def _is_known(point: Point, name: str, array: Array) -> bool:
    return array.dtype == object or name in point.structural


def _value(place: Any, graph: Graph, stored_as: str) -> Value:
    if isinstance(place, int):
        return Imported(graph.inputs[place].tensor, stored_as=stored_as)
    return Items(
        Imported(graph.inputs[item].tensor) if isinstance(item, int) else Imported(contents=item)
        for item in place
    )


def _symbolic_types(source: SourceGraph, inputs: _Inputs) -> list[TensorType]:
    """The declared types of the inputs in use, whose dynamic sizes are symbols."""
    declared = {
        name: type_ for (name, _), type_ in zip(source.inputs, declared_types(source), strict=True)
    }
    return [
        declared.get(name, type_)
        for (name, _), type_ in zip(inputs.arguments, inputs.types, strict=True)
    ]


def _walk(
    point: Point, walker: Walker, inputs: set[str]
) -> tuple[tuple[SourceNode, ...], Cut | None]:
    """Stages nodes until one is for a later segment; the nodes that are left, and why."""
    pending = list(point.nodes)[::-1]
    staged: list[SourceNode] = []
    while pending:
        node = pending.pop()
        staged.append(node)
        cut = point.cuts.get(node.outputs)
        if cut is not None:
            # known from an earlier staging of this point
            return (node, *pending[::-1]), cut
        try:
            pending.extend(walker.step(node)[::-1])
        # raises `Rebuild`: the segment is staged again, with the elements or a cut
        except MissingContents as need:
            point.learn(node, need.name, inputs, walker.values, staged)
        except HostNode:
            point.cuts[node.outputs] = Cut(host=True)
            raise Rebuild from None
        except (UnsupportedOpsError, ImportFailure):
            operands = [walker.values.get(name) for name in node.inputs if name]
            if not point.learn_sizes(node, operands):
                raise
    return (), None


def _results(
    needed_names: frozenset[str],
    values: Mapping[str, Any],
    before: Mapping[str, Value],
    point: Point,
    outputs: list[TensorValue],
) -> tuple[dict[str, Any], dict[str, Value]]:
    """What the needed names are after the segment: outputs of its graph, arrays; and what is known at import."""
    results: dict[str, Any] = {}
    known: dict[str, Value] = {}
    numbers: dict[int, int] = {}

    def result(value: Imported) -> Any:
        if value.contents is not None and (value.is_text or value.numbers is not None):
            return value.contents
        tensor = value.tensor
        # names of one tensor share an output
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(outputs)
            outputs.append(tensor)
        return numbers[id(tensor)]

    for name in needed_names:
        if name not in values:
            # an output that was complete before
            continue
        value = values[name]
        # not made by this segment: `env` has it already
        if name in before and value is before[name]:
            if name in point.known:
                known[name] = value
            elif value is None:
                results[name] = None
            continue
        if value is None:
            results[name] = None
        elif isinstance(value, Items):
            results[name] = [result(item) for item in value]
        else:
            results[name] = found = result(value)
            if not isinstance(found, int):
                known[name] = value
    return results, known
