"""Calls of subgraphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from max import mlir
from max.graph.graph import Graph
from max.graph.value import TensorValue, Value, value_of

__all__ = ["call"]


def call(graph: Graph, *args: Value[Any], prefix: str = "") -> list[Value[Any]]:
    """Calls a subgraph, made with `max.graph.Graph.add_subgraph`.

    A subgraph with side effects takes its place in their order. Symbols of its input types stand
    for the dimensions of the arguments. Sizes that the subgraph itself gives a name keep it, so that
    all its calls must agree on them.

    Args:
        graph: The subgraph, with its outputs set.
        args: A value for each input.
        prefix: What is put before the names of the subgraph's weights, such as ``"layers.0."``.

    Returns:
        The outputs.

    Raises:
        ValueError: The subgraph is not of this module or has no outputs yet, a count or a dimension
            does not fit.
        TypeError: The type of an argument does not fit.
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
    kept = outputs[:-1] if has_chain else outputs
    types = [mlir.substitute_type(t, env) for t in kept]
    stage = current.stage_effect if has_chain else current.stage
    return [value_of(result) for result in stage("mo.call", values, attrs, types)]
