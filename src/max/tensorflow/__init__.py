"""TensorFlow's models as graphs.

::

    from max.tensorflow import from_tensorflow

    model = max.engine.InferenceSession().load(from_tensorflow("saved_model_folder"))

Needs TensorFlow and tf2onnx: ``pip install 'supremum[tensorflow]'``. They run in a process of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from max.engine import TorchInputSpec
from max.graph import Graph
from max.importers.tensorflow.convert import onnx_of
from max.onnx import from_onnx

__all__ = ["from_tensorflow"]


def from_tensorflow(
    path: str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int | str | None]] | Sequence[TorchInputSpec] | None = None,
    exported_name: str = "serving_default",
) -> Graph:
    """A SavedModel's folder, a ``.keras`` file of Keras 3 or a ``.tflite`` file as a graph.

    The model is converted to ONNX by tf2onnx. Inputs and outputs are those of the signature in the order of their
    names, of a Keras model in its own order.

    Args:
        path: The model.
        shapes: As for `max.onnx.from_onnx`.
        exported_name: The signature of a SavedModel.

    Returns:
        The graph, to be loaded with `max.engine.InferenceSession.load`, or saved.

    Raises:
        ImportError: TensorFlow or tf2onnx is not installed.
        ModelFileError: It is no such model.
        ImportFailure: The model cannot be converted, or be one graph.
    """
    return from_onnx(onnx_of(path, exported_name), shapes)
