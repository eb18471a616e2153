"""The ops of the `mo` dialect, one file per family. Importing this package fills `max.mlir.OPS`."""

from max.mlir.ops import (
    buffer,
    collective,
    constant,
    control,
    detection,
    elementwise,
    fourier,
    gather,
    matmul,
    normalization,
    quantised,
    random,
    reduction,
    shape,
    spatial,
)

__all__ = [
    "buffer",
    "collective",
    "constant",
    "control",
    "detection",
    "elementwise",
    "fourier",
    "gather",
    "matmul",
    "normalization",
    "quantised",
    "random",
    "reduction",
    "shape",
    "spatial",
]
