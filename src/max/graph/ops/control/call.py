"""Calls of subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from max import mlir
from max.graph.graph import Graph
from max.graph.value import TensorValue, Value, value_of

__all__ = ["call"]


def call(graph: Graph, *args: Value[Any], prefix: str = "") -> list[Value[Any]]:
    """Calls a subgraph that was created with `max.graph.Graph.add_subgraph`.

    Side effects of the subgraph keep the order in which the call is staged. Symbols of its input types are bound to
    the dimensions of the arguments. Symbols that the subgraph introduces keep their names, so all calls must agree
    on their sizes.

    Args:
        graph: The subgraph, with its outputs set.
        args: One value per input.
        prefix: A prefix for the names of the subgraph's weights, such as ``"layers.0."``.

    Returns:
        The outputs, with the types of this call.

    Raises:
        ValueError: The subgraph belongs to another module or has no outputs yet, or the number or a dimension of the
            arguments does not match.
        TypeError: The type of an argument does not match.
    """
    current = Graph.current
    if graph.root is not current.root or graph is graph.root:
        raise ValueError(
            f"call: {graph.name} is not a subgraph of {current.root.name}; make it with "
            "add_subgraph"
        )
    if not graph.has_output:
        raise ValueError(f"call: the subgraph {graph.name} has no outputs yet; set them first")
    values: list[Value[Any]] = [
        v if isinstance(v, Value) else TensorValue(v) for v in cast("Sequence[Any]", args)
    ]
    inputs = [t for t in graph.mlir_op.input_types if not isinstance(t, mlir.ChainType)]
    env = mlir.bind_call(graph.name, inputs, [v.to_mlir().type for v in values])
    outputs = graph.mlir_op.output_types
    attrs = {"callee": mlir.SymbolRefAttr(graph.name), "prefix": prefix}
    has_chain = len(inputs) != len(graph.mlir_op.input_types)
    # the chain is last, in inputs and outputs
    value_types = outputs[:-1] if has_chain else outputs
    types = [mlir.substitute_type(t, env) for t in value_types]
    stage = current.stage_effect if has_chain else current.stage
    return [value_of(result) for result in stage("mo.call", values, attrs, types)]
