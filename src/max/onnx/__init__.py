"""ONNX models: as graphs, and as sessions with ONNX Runtime's method names.

::

    from max.onnx import from_onnx

    model = max.engine.InferenceSession().load(from_onnx("model.onnx"))

    import max.onnx as ort

    session = ort.InferenceSession("model.onnx")
    outputs = session.run(None, {"input": x})

Files are read with the package `onnx` (``pip install "supremum[onnx]"``). `from_onnx` gives one graph for all sizes of
dynamic dimensions; a session also runs models whose structure depends on data.
"""

from max.importers.errors import ImportFailure, ModelFileError, UnsupportedOpsError
from max.onnx.graphs import from_onnx
from max.onnx.session import (
    GraphOptimizationLevel,
    InferenceSession,
    NodeArg,
    SessionOptions,
    get_available_providers,
)
from max.onnx.settings import (
    ExecutionMode,
    RunOptions,
    disable_telemetry_events,
    enable_telemetry_events,
    get_device,
    set_default_logger_severity,
    set_seed,
)

__all__ = [
    "ExecutionMode",
    "GraphOptimizationLevel",
    "ImportFailure",
    "InferenceSession",
    "ModelFileError",
    "NodeArg",
    "RunOptions",
    "SessionOptions",
    "UnsupportedOpsError",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "from_onnx",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
    "set_seed",
]
