"""The exported models in OpenVINO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from benchmarks.encoders import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time

PRECISION = {"float32": openvino.Type.f32, "bfloat16": openvino.Type.bf16}
state: dict[str, Any] = {}


def setup(model: str, dtype: str, folder: str) -> dict[str, float]:
    """The dtype is the precision that it is asked to compute in."""
    state["model"], state["dtype"] = model, dtype
    state["file"] = Path(folder) / f"{model}.onnx"
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Compile for the batch size; writes the result."""
    array = inputs_of(state["model"], batch)
    core = openvino.Core()
    network = core.read_model(state["file"])
    network.reshape(array.shape)
    options = {
        "INFERENCE_PRECISION_HINT": PRECISION[state["dtype"]],
        "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = core.compile_model(network, "CPU", options)
    request = compiled.create_infer_request()
    request.set_input_tensor(openvino.Tensor(array, shared_memory=True))
    # the tensor does not keep the array, nor the request the model
    state["alive"] = (core, compiled, array)
    state["call"] = request.infer
    request.infer()
    np.save(path, np.array(request.get_output_tensor().data, np.float32)[None])
    return {}


def run(seconds: float) -> dict[str, float]:
    """Seconds for a batch."""
    return {"openvino": median_time(state["call"], seconds)}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run})
