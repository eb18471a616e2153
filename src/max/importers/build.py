"""A source graph as one graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from max.graph import DeviceRef, Graph, TensorType, Weight
from max.importers.errors import ImportFailure
from max.importers.source import InputType, SourceGraph
from max.importers.symbols import SymbolNames
from max.importers.values import Imported, Value
from max.importers.walk import Framework, Walker

__all__ = ["build_graph", "constants_of", "declared_types"]

Shape = Sequence[int | str | None]


def constants_of(source: SourceGraph) -> dict[str, Value]:
    """The constants of a model as values. Large ones share the memory of the file."""
    return {name: Imported(contents=array) for name, array in source.constants.items()}


def declared_types(
    source: SourceGraph, shapes: Mapping[str, Shape] | None = None
) -> list[TensorType]:
    """The types of a model's inputs, with symbols for dynamic dimensions.

    Args:
        source: The model.
        shapes: Shapes that replace the declared ones, by the names of inputs.

    Raises:
        ImportFailure: An input is no tensor of numbers, its rank is not declared, or a given shape does not fit.
    """
    names = SymbolNames()
    given = dict(shapes or {})
    types = [
        _declare_input(source.name, name, type_, given.pop(name, None), names)
        for name, type_ in source.inputs
    ]
    if given:
        known = ", ".join(name for name, _ in source.inputs)
        raise ImportFailure(
            f"{source.name}: no input {next(iter(given))!r}; the inputs are {known}"
        )
    return types


def _declare_input(
    model: str, name: str, type_: InputType, given_shape: Shape | None, names: SymbolNames
) -> TensorType:
    where = f"{model}: input {name!r}"
    if type_.kind != "tensor" or type_.dtype is None:
        raise ImportFailure(f"{where} is a {type_.kind}; a graph takes tensors of numbers")
    if type_.optional:
        raise ImportFailure(f"{where} may be absent; inputs of a graph may not")
    shape = type_.shape
    if given_shape is not None:
        if shape is not None and (
            len(given_shape) != len(shape)
            or any(
                isinstance(old, int) and old != new
                for old, new in zip(shape, given_shape, strict=True)
            )
        ):
            raise ImportFailure(f"{where} has the shape {list(shape)}, not {list(given_shape)}")
        shape = tuple(given_shape)
    if shape is None:
        raise ImportFailure(f"{where} has no declared rank; give its shape")
    return TensorType(type_.dtype, names.dims(name, shape), DeviceRef.CPU())


def build_graph(
    source: SourceGraph,
    framework: Framework,
    shapes: Mapping[str, Shape] | None = None,
    weights: Collection[str] = (),
) -> Graph:
    """Stages a whole model.

    Args:
        source: The model.
        framework: The tables of its framework.
        shapes: Shapes for inputs, by name, in place of the declared ones.
        weights: Names of inputs that are weights of the graph, of these names. Their shapes must be static.

    Raises:
        UnsupportedOpsError: Nodes cannot be staged; it lists all of them.
        ImportFailure: Inputs or outputs are not those of a graph.
    """
    names = [name for name, _ in source.inputs]
    types = dict(zip(names, declared_types(source, shapes), strict=True))
    inputs = [types[name] for name in names if name not in weights]
    with Graph(source.name or "main", input_types=inputs) as graph:
        values = constants_of(source)
        given = iter(graph.inputs)
        for name, type_ in source.inputs:
            declared = types[name]
            if name in weights:
                weight = Weight(name, declared.dtype, declared.shape, declared.device)
                tensor = graph.add_weight(weight)
            else:
                tensor = next(given).tensor
            values[name] = Imported(tensor, stored_as=type_.stored_as)
        walker = Walker(framework, source.name, values, True, source.file)
        walker.run(source.nodes)
        walker.finish()
        outputs = [walker.values[name] for name, _ in source.outputs]
        for (name, _), value in zip(source.outputs, outputs, strict=True):
            if not isinstance(value, Imported) or value.is_text:
                raise ImportFailure(f"{source.name}: output {name!r} is no tensor of numbers")
        graph.output(*[value.tensor for value in outputs])
    return graph
