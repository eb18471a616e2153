"""A NumPy interpreter of `mo`: what each op means, and what the compiler is tested against.

::

    from max import _interpreter

    outputs = _interpreter.run(graph, [x, y], weights)

Each op computes in float32 (float64 for float64) and rounds its results to their dtype.
"""

from max._interpreter import (
    buffer,
    collective,
    constant,
    elementwise,
    fourier,
    gather,
    matmul,
    nn,
    normalization,
    printing,
    quantised,
    random,
    reduction,
    shape,
    spatial,
)
from max._interpreter.core import (
    IMPLEMENTATIONS,
    REFERENCES,
    InterpreterError,
    implements,
    register,
    run,
)

__all__ = [
    "IMPLEMENTATIONS",
    "REFERENCES",
    "InterpreterError",
    "buffer",
    "collective",
    "constant",
    "elementwise",
    "fourier",
    "gather",
    "implements",
    "matmul",
    "nn",
    "normalization",
    "printing",
    "quantised",
    "random",
    "reduction",
    "register",
    "run",
    "shape",
    "spatial",
]
