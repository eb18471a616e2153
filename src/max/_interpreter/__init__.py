"""A NumPy interpreter of `mo`: the executable definition of the ops, and the compiler's test oracle.

::

    from max import _interpreter

    outputs = _interpreter.run(graph, [x, y], weights)

Each op computes in float32 or wider and rounds its results to their dtype once.
"""

from max._interpreter import (
    buffer,
    cache,
    collective,
    constant,
    delta_rule,
    detection,
    elementwise,
    experts,
    fourier,
    gather,
    matmul,
    nn,
    normalization,
    printing,
    quantized,
    random,
    recurrence,
    reduction,
    shape,
    spatial,
    streams,
    token_selection,
)
from max._interpreter.core import (
    IMPLEMENTATIONS,
    REFERENCES,
    AfterOp,
    InterpreterError,
    implements,
    register,
    run,
)

__all__ = [
    "AfterOp",
    "IMPLEMENTATIONS",
    "REFERENCES",
    "InterpreterError",
    "buffer",
    "cache",
    "collective",
    "constant",
    "delta_rule",
    "detection",
    "elementwise",
    "experts",
    "fourier",
    "gather",
    "implements",
    "matmul",
    "nn",
    "normalization",
    "printing",
    "quantized",
    "random",
    "recurrence",
    "reduction",
    "register",
    "run",
    "shape",
    "spatial",
    "streams",
    "token_selection",
]
