"""The functions of torch's ops, a module for each family. Importing the package fills the table."""

from max.importers.torch.ops import (
    arithmetic,
    convolution,
    creation,
    elementwise,
    images,
    indexing,
    linear,
    normalization,
    pooling,
    reduction,
    scatter,
    shape,
    sizes,
)

__all__ = [
    "arithmetic", "convolution", "creation", "elementwise", "images", "indexing", "linear", "normalization", "pooling",
    "reduction", "scatter", "shape", "sizes",
]  # fmt: skip
