"""The functions of torch's ops, a module for each family. Importing the package fills the table."""

from max.importers.torch.ops import (
    arithmetic,
    control_flow,
    convolution,
    creation,
    detection,
    elementwise,
    images,
    indexing,
    linear,
    normalization,
    pooling,
    quantization,
    reduction,
    scatter,
    shape,
    sizes,
)

__all__ = [
    "arithmetic", "control_flow", "convolution", "creation", "detection", "elementwise", "images", "indexing",
    "linear", "normalization", "pooling", "quantization", "reduction", "scatter", "shape", "sizes",
]  # fmt: skip
