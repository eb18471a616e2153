"""Start-up figures, each a fresh process: import time, the CLI's help, one gelu cold and warm, an empty program."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile

from benchmarks.runner import ROOT, Samples

IMPORT = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"

GELU = """
import time, json
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
session = InferenceSession(devices=[CPU()])
t0 = time.perf_counter()
with Graph("gelu", input_types=[TensorType(DType.float32, ("n", 1024), DeviceRef.CPU())]) as graph:
    graph.output(ops.gelu(graph.inputs[0].tensor))
model = session.load(graph)
x = np.ones((4, 1024), np.float32)
model.execute(x)
print(time.perf_counter() - t0)
"""

EMPTY = """
import time, statistics
import numpy as np
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
session = InferenceSession(devices=[CPU()])
def timed(count):
    with Graph("chain", input_types=[TensorType(DType.float32, (16,), DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
        for _ in range(count):
            x = x + 1.0
        graph.output(x)
    model = session.load(graph)
    x = Tensor.from_numpy(np.ones(16, np.float32))
    runs = []
    for _ in range(3000):
        t = time.perf_counter(); model.execute(x); runs.append(time.perf_counter() - t)
    return statistics.median(runs)
print(timed(1))
"""


def fresh(code: str, runs: int, cache: str | None = None) -> Samples:
    """Seconds that the code prints, once a process; ``cache`` None gives each run an empty cache folder."""
    out = Samples()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as empty:
            env = {**os.environ, "MAX_CACHE_DIR": cache or empty}
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=env,
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            )
        out.values.append(float(done.stdout))
    return out


def measure(runs: int = 5) -> dict[str, Samples]:
    """Every figure of this page, in milliseconds but for the names that say µs."""
    figures: dict[str, Samples] = {}
    for module in ("max.graph", "max.engine"):
        figures[f"import {module}, ms"] = fresh(IMPORT.format(module=module), runs)
    figures["one gelu: stage, compile, run; cold, ms"] = fresh(GELU, runs)
    with tempfile.TemporaryDirectory() as cache:
        fresh(GELU, 1, cache)
        figures["one gelu: from the disk cache, ms"] = fresh(GELU, runs, cache)
    for samples in figures.values():
        samples.values = [v * 1e3 for v in samples.values]
    one_add = fresh(EMPTY, runs)
    one_add.values = [v * 1e6 for v in one_add.values]
    figures["execute of one add on 16 elements, µs"] = one_add
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    for name, samples in measure(args.runs).items():
        print(f"{name}: {samples}")


if __name__ == "__main__":
    main()
