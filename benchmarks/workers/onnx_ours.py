"""An ONNX file in `max.onnx`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.imported import inputs_of
from benchmarks.runner import peak_memory, serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str, folder: str, packages: str) -> dict[str, float]:
    """Loads the model; ``packages`` are where the package onnx is, if not here."""
    if packages:
        sys.path.append(packages)
    import max.onnx

    start = time.perf_counter()
    state["model"] = model
    state["session"] = max.onnx.InferenceSession(str(Path(folder) / f"{model}.onnx"))
    return {"load_s": time.perf_counter() - start}


def make(batch: int, path: str) -> dict[str, float]:
    """Writes the results for a batch."""
    feed = inputs_of(state["model"], batch)
    start = time.perf_counter()
    results = state["session"].run(None, feed)
    seconds = time.perf_counter() - start
    state["call"] = lambda: state["session"].run(None, feed)
    np.savez(path, *results)
    return {"first_s": seconds}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run, "memory": peak_memory})
