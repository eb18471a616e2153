"""A NumPy interpreter of `mo`: the executable definition of the ops, and the compiler's test oracle.

::

    from max import _interpreter

    outputs = _interpreter.run(graph, [x, y], weights)

Each op computes in float32 or wider and rounds its results to their dtype once.
"""

from max._interpreter import (
    buffer,
    detection,
    devices,
    elementwise,
    gather,
    layers,
    linear,
    printing,
    quantized,
    random,
    reduction,
    shape,
    spatial,
    trees,
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
from max._interpreter.models import (
    adapters,
    attention,
    cache,
    experts,
    latents,
    recurrence,
    residual_streams,
    sampling,
)

__all__ = [
    "AfterOp",
    "IMPLEMENTATIONS",
    "REFERENCES",
    "InterpreterError",
    "adapters",
    "attention",
    "buffer",
    "cache",
    "detection",
    "devices",
    "elementwise",
    "experts",
    "gather",
    "implements",
    "latents",
    "layers",
    "linear",
    "printing",
    "quantized",
    "random",
    "recurrence",
    "reduction",
    "register",
    "residual_streams",
    "run",
    "sampling",
    "shape",
    "spatial",
    "trees",
]
