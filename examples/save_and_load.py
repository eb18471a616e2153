"""Saves a graph as MLIR text beside its constants, and runs it in another process."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops

READER = """
import sys
import numpy as np
from max.driver import CPU
from max.engine import InferenceSession
from max.graph import Graph

model = InferenceSession(devices=[CPU()]).load(Graph(name="scale", path=sys.argv[1]))
print(model.execute(np.ones((2, 3), np.float32))[0].to_numpy().tolist())
"""

x_type = TensorType(DType.float32, ("n", 3), DeviceRef.CPU())
with Graph("scale", input_types=[x_type]) as graph:
    factors = ops.constant(np.array([1, 10, 100], np.float32), device=DeviceRef.CPU())
    graph.output(graph.inputs[0].tensor * factors)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "scale.mlir"
    graph.save(path)
    subprocess.run([sys.executable, "-c", READER, str(path)], check=True)

# prints: [[1.0, 10.0, 100.0], [1.0, 10.0, 100.0]]
