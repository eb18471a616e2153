"""Boosted trees in LightGBM itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np

from benchmarks.imported import inputs_of
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str, folder: str) -> dict[str, float]:
    """Reads the booster's own file."""
    settings = {"num_threads": len(os.sched_getaffinity(0))}
    state["model"] = model
    state["booster"] = lightgbm.Booster(settings, model_file=Path(folder) / f"{model}.txt")
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Writes the results for a batch."""
    x = inputs_of(state["model"], batch)["x"]
    threads = len(os.sched_getaffinity(0))
    state["call"] = lambda: state["booster"].predict(x, num_threads=threads)
    np.savez(path, state["call"]().reshape(batch, 1))
    return {}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run})
