"""Nodes whose operands are known: their results are computed at import, as shapes and axes depend on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from max import _interpreter
from max.graph import Graph, TensorValue
from max.graph.dim import StaticDim
from max.importers.errors import HostNode, MissingContents, Unsupported
from max.importers.node import Node
from max.importers.table import OpTable
from max.importers.values import Imported

__all__ = ["fold_node"]

_MOST_ELEMENTS = 1 << 14
"""Larger results are left to the graph, which computes them once, when it is loaded."""


def fold_node(node: Node, table: OpTable) -> Any:
    """The results of a node whose operands are known, if they can be computed now; else None."""
    source = node.source
    operands = node.operands
    # bodies are staged; a random node has other results in each run
    if source.bodies or source.full_name in RANDOM:
        return None
    if not all(operand is None or isinstance(operand, Imported) for operand in operands):
        return None
    known = [operand for operand in operands if isinstance(operand, Imported)]
    if not known or any(operand.contents is None for operand in known):
        return None
    arrays = [operand.contents if isinstance(operand, Imported) else None for operand in operands]
    if sum(array.size for array in arrays if array is not None) > _MOST_ELEMENTS:
        return None
    if (fold := table.folds.get(source.full_name)) is not None:
        with np.errstate(all="ignore"):
            results = fold(node, *arrays)
        if results is not None:
            return _with_size_type(results, known[0])
    # graphs have no strings
    if any(operand.is_text for operand in known) and source.full_name in table.hosts:
        return table.hosts[source.full_name](node, *arrays)
    # expressions over symbols: only functions of `folds` compute with them
    if any(array is not None and array.dtype == object for array in arrays):
        return None
    return _interpret(node, table)


RANDOM = {
    "RandomNormal",
    "RandomUniform",
    "RandomNormalLike",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
}


def _with_size_type(results: Any, first: Imported) -> Any:
    """Sizes have the element type of the first operand."""
    if isinstance(results, np.ndarray) and results.dtype == object and first.dtype is not None:
        return Imported(contents=results, dtype=first.dtype if first.dtype.is_integral() else None)
    return results


def _interpret(node: Node, table: OpTable) -> Any:
    """The results of a node, as the interpreter computes them; None if there is no function, or they are large."""
    entry = table.ops.get(node.source.full_name)
    if entry is None:
        return None
    copies = [
        None if operand is None else Imported(contents=operand.contents, dtype=operand.dtype)
        for operand in node.operands
        if operand is None or isinstance(operand, Imported)
    ]
    inner = Node(node.source, copies, node.walker)
    try:
        with Graph("fold") as graph:
            results = (
                entry.function(inner, *inner.tensors())
                if entry.takes_tensors
                else entry.function(inner)
            )
            listed = results if isinstance(results, tuple) else (results,)
            if not all(isinstance(result, TensorValue) for result in listed):
                return None
            tensors = [result for result in listed if isinstance(result, TensorValue)]
            # a small operand may be broadcast or tiled to a large result
            if any(_size(tensor) > _MOST_ELEMENTS for tensor in tensors):
                return None
            graph.output(*tensors)
        with np.errstate(all="ignore"):
            arrays = _interpreter.run(graph, [])
    # staging in the real graph raises the error, at the node's place
    except (MissingContents, HostNode, Unsupported, NotImplementedError, ValueError, TypeError):
        return None
    return tuple(np.asarray(array) for array in arrays)


def _size(tensor: TensorValue) -> int:
    size = 1
    for dim in tensor.shape:
        if not isinstance(dim, StaticDim):
            return _MOST_ELEMENTS + 1
        size *= int(dim)
    return size
