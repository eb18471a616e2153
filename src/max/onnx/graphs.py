"""ONNX models as graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from max.graph import Graph
from max.importers.build import build_graph
from max.importers.onnx.importer import OnnxFramework
from max.importers.onnx.reader import read_model

if TYPE_CHECKING:
    import onnx

__all__ = ["from_onnx"]


def from_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Graph:
    """An ONNX model as a graph, whose inputs are those of the model, in their order.

    Dynamic dimensions become symbols: one compiled model serves all sizes. Large weights share the memory of the file
    that was read, or of the mapped file of external data.

    Args:
        model: The path of a model, the bytes of a file, or an `onnx.ModelProto`.
        shapes: Shapes in place of declared ones, by the names of inputs: sizes, names of symbols, or None.

    Returns:
        The graph, to be loaded with `max.engine.InferenceSession.load`, or saved.

    Raises:
        ImportError: The package `onnx` is not installed.
        ModelFileError: It is no valid model.
        UnsupportedOpsError: Nodes cannot be staged; it lists all of them.
        ImportFailure: An input is no tensor of numbers, or its rank is not known.
    """
    read = read_model(model)
    return build_graph(read.graph, OnnxFramework(read), shapes)
