"""Vectors of texts by ONNX Runtime, from what torch exported."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.embeddings import BATCHES, means, padded_batches, texts
from benchmarks.runner import serve

state: dict[str, Any] = {}


def setup(model: str, folder: str, count: int) -> dict[str, float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    file = Path(folder) / f"embeddings-{model}" / "model.onnx"
    state["session"] = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    state["texts"] = texts(count)
    return {}


def vectors(size: int) -> Any:
    """The vectors of all texts."""
    out: list[Any] = [None] * len(state["texts"])
    for numbers, ids, mask in padded_batches(state["texts"], size):
        (h,) = state["session"].run(None, {"ids": ids, "mask": mask})
        for i, vector in zip(numbers, means(h, mask), strict=True):
            out[i] = vector
    return out


def check(path: str) -> dict[str, float]:
    """Write the vectors."""
    np.save(path, np.stack(vectors(BATCHES[1])))
    return {}


def run() -> dict[str, float]:
    """Seconds for all texts, for each batch size."""
    seconds: dict[str, float] = {}
    for size in BATCHES:
        start = time.perf_counter()
        vectors(size)
        seconds[f"onnxruntime {size}"] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    serve({"setup": setup, "check": check, "run": run})
