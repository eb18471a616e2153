"""Vectors of texts by ONNX Runtime, from what torch exported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks.embeddings import means, padded_batches, serve_vectors

state: dict[str, Any] = {}


def setup(model: str, folder: str) -> dict[str, float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    file = Path(folder) / f"embeddings-{model}" / "model.onnx"
    state["session"] = onnxruntime.InferenceSession(file, options, ["CPUExecutionProvider"])
    return {}


def vectors(tokens: Sequence[Any], size: int, part: slice) -> dict[int, Any]:
    """The vectors of the texts of some batches."""
    out: dict[int, Any] = {}
    for numbers, ids, mask in padded_batches(tokens, size, part):
        (h,) = state["session"].run(None, {"ids": ids, "mask": mask})
        for i, vector in zip(numbers, means(h, mask), strict=True):
            out[i] = vector
    return out


if __name__ == "__main__":
    serve_vectors("onnxruntime", setup, vectors)
