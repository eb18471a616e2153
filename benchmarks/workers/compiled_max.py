"""A network of torch that our backend of `torch.compile` compiled."""

from __future__ import annotations

from typing import Any

import max.torch  # noqa: F401  registers the backend
from benchmarks.runner import serve
from benchmarks.workers.compiled_torch import first, prepare, run


def setup(**arguments: Any) -> dict[str, float]:
    """Makes the network; the first call compiles it."""
    return prepare(**arguments, backend="max", dynamic=False)


if __name__ == "__main__":
    serve({"setup": setup, "first": first, "run": run})
