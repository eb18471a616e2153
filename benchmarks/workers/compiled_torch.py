"""A network of torch in eager mode."""

from __future__ import annotations

import logging
import os
import site
import time
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.compiled_models import inputs_of, network
from benchmarks.runner import serve
from benchmarks.timing import median_time

state: dict[str, Any] = {}


def prepare(model: str, packages: str, **compiled: Any) -> dict[str, float]:
    """Makes the network, and compiles it where arguments of `torch.compile` are given.

    Args:
        model: The model's name.
        packages: The folder with torchvision and timm, if they are not among our own packages.
        compiled: Arguments of `torch.compile`.
    """
    if packages:
        site.addsitedir(packages)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state["model"] = model
    made = network(model)
    state["network"] = torch.compile(made, **compiled) if compiled else made
    return {}


def first(path: str) -> dict[str, float]:
    """Writes the results of the first call; its seconds."""
    x = torch.from_numpy(inputs_of(state["model"]))

    def call() -> Any:
        with torch.no_grad():
            return state["network"](x)

    state["call"] = call
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    np.save(path, (result if isinstance(result, torch.Tensor) else result[0]).numpy())
    return {"first_s": seconds}


def run(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch."""
    return {"ms": median_time(state["call"], seconds) * 1e3}


if __name__ == "__main__":
    serve({"setup": prepare, "first": first, "run": run})
