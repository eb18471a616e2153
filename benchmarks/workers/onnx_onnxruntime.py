"""An ONNX file in ONNX Runtime."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.imported import inputs_of
from benchmarks.runner import peak_memory, serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str, folder: str) -> dict[str, float]:
    """Loads the model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.log_severity_level = 3
    start = time.perf_counter()
    file = Path(folder) / f"{model}.onnx"
    state["model"] = model
    state["session"] = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    return {"load_s": time.perf_counter() - start}


def make(batch: int, path: str) -> dict[str, float]:
    """Writes the results for a batch."""
    feed = inputs_of(state["model"], batch)
    state["call"] = lambda: state["session"].run(None, feed)
    np.savez(path, *state["call"]())
    return {}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run, "memory": peak_memory})
