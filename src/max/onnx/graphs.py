"""ONNX models as graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from max.engine import TorchInputSpec
from max.graph import Graph
from max.importers.build import build_graph
from max.importers.errors import ImportFailure
from max.importers.onnx.importer import OnnxFramework
from max.importers.onnx.reader import read_model
from max.importers.source import SourceGraph

if TYPE_CHECKING:
    import onnx

__all__ = ["from_onnx"]


def from_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    shapes: Mapping[str, Sequence[int | str | None]] | Sequence[TorchInputSpec] | None = None,
) -> Graph:
    """An ONNX model as a graph, whose inputs are those of the model, in their order.

    Dynamic dimensions become symbols: one compiled model serves all sizes. Large weights share the memory of the file
    that was read, or of the mapped file of external data.

    Args:
        model: The path of a model, the bytes of a file, or an `onnx.ModelProto`.
        shapes: Shapes in place of declared ones: sizes, names of symbols, or None, by the names of inputs; or an
            `InputSpec` for each input.

    Returns:
        The graph, to be loaded with `max.engine.InferenceSession.load`, or saved.

    Raises:
        ImportError: The package `onnx` is not installed.
        ModelFileError: It is no valid model.
        UnsupportedOpsError: Nodes cannot be staged; it lists all of them.
        ImportFailure: An input is no tensor of numbers, or its rank is not known.
    """
    read = read_model(model)
    if shapes is not None and not isinstance(shapes, Mapping):
        shapes = _by_name(read.graph, shapes)
    return build_graph(read.graph, OnnxFramework(read), shapes)


def _by_name(
    source: SourceGraph, specs: Sequence[TorchInputSpec]
) -> dict[str, Sequence[int | str | None]]:
    """The shapes of input specs by the names of inputs.

    Raises:
        ImportFailure: Their number or a dtype does not fit.
    """
    if len(specs) != len(source.inputs):
        raise ImportFailure(
            f"{source.name}: {len(specs)} input specs for {len(source.inputs)} inputs: "
            + ", ".join(name for name, _ in source.inputs)
        )
    shapes: dict[str, Sequence[int | str | None]] = {}
    for (name, type_), spec in zip(source.inputs, specs, strict=True):
        if spec.dtype is not None and spec.dtype is not type_.dtype:
            declared = "nothing" if type_.dtype is None else type_.dtype.name
            raise ImportFailure(
                f"{source.name}: input {name!r} is {declared}, not {spec.dtype.name}"
            )
        if spec.shape is not None:
            shapes[name] = spec.shape
    return shapes
