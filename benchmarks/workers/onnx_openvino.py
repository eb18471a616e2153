"""An ONNX file in OpenVINO, in float32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from benchmarks.imported import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str, folder: str) -> dict[str, float]:
    """Compiles the model with an open batch size."""
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
    }
    state["model"] = model
    state["compiled"] = openvino.compile_model(Path(folder) / f"{model}.onnx", "CPU", settings)
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Writes the results for a batch."""
    request = state["compiled"].create_infer_request()
    feed = inputs_of(state["model"], batch)
    state["call"] = lambda: request.infer(feed, share_inputs=True)
    results = state["call"]()
    np.savez(path, *[results[i] for i in range(len(results))])
    return {}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run})
