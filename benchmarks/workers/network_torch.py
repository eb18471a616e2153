"""A network of torch in eager mode."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from benchmarks.imported import inputs_of
from benchmarks.imported_models import network
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def setup(model: str) -> dict[str, float]:
    """Makes the network."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state["model"] = model
    state["network"] = network(model)
    return {}


def compile_with_inductor(model: str) -> dict[str, float]:
    """Makes the network; a program is compiled for each batch size."""
    from torch._inductor import config

    # weights become constants, which its products and convolutions repack
    config.freezing = True
    setup(model)
    state["network"] = torch.compile(state["network"], backend="inductor", dynamic=False)
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Writes the results for a batch."""
    feed = [torch.from_numpy(value) for value in inputs_of(state["model"], batch).values()]

    def call() -> Any:
        with torch.no_grad():
            return state["network"](*feed)

    state["call"] = call
    results = call()
    np.savez(path, *(x.numpy() for x in (results if isinstance(results, tuple) else (results,))))
    return {}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run})
