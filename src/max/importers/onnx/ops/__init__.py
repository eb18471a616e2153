"""The functions of ONNX ops, a module for each family. Importing the package fills the table."""

from max.importers.onnx.ops import (
    arithmetic,
    casts,
    contrib,
    control_flow,
    convolution,
    elementwise,
    folds,
    generators,
    images,
    indexing,
    linear,
    normalization,
    pooling,
    recurrent,
    reduction,
    sequence,
    shape,
    signal,
    text,
)
from max.importers.onnx.ops.quantized import quantization

__all__ = [
    "arithmetic", "casts", "contrib", "control_flow", "convolution", "elementwise", "folds", "generators", "images",
    "indexing", "linear", "normalization", "pooling", "quantization", "recurrent", "reduction", "sequence", "shape",
    "signal", "text",
]  # fmt: skip
