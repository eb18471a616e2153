"""Vectors of texts by ONNX Runtime, from what torch exported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks.embeddings import means, padded_batches, serve_vectors, texts

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


if __name__ == "__main__":
    serve_vectors("onnxruntime", setup, vectors)
