"""The exported models in ONNX Runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.encoders import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str, dtype: str, folder: str) -> dict[str, float]:
    """Its CPU provider has float32 only."""
    if dtype != "float32":
        raise ValueError(f"no {dtype}")
    state["model"], state["file"] = model, Path(folder) / f"{model}.onnx"
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Load for the batch size; writes the result."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_free_dimension_override_by_name("batch", batch)
    session = onnxruntime.InferenceSession(state["file"], options, ["CPUExecutionProvider"])
    feed = {"x": inputs_of(state["model"], batch)}
    state["call"] = lambda: session.run(None, feed)
    np.save(path, state["call"]()[0][None])
    return {}


def run(seconds: float) -> dict[str, float]:
    """Seconds for a batch."""
    return {"onnxruntime": median_time(state["call"], seconds)}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run})
