"""The table of ONNX ops, which the modules of `max.importers.onnx.ops` fill."""

from __future__ import annotations

from max.importers.table import OpTable

__all__ = ["TABLE", "fold", "host", "op"]

TABLE = OpTable("ONNX")
"""The functions of ops by name."""

op, fold, host = TABLE.op, TABLE.fold, TABLE.host
