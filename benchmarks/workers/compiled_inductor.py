"""A network of torch that inductor compiled."""

from __future__ import annotations

from typing import Any

from torch._inductor import config

from benchmarks.runner import serve
from benchmarks.workers.compiled_torch import first, prepare, run


def setup(**arguments: Any) -> dict[str, float]:
    """Makes the network; the first call compiles it."""
    # weights become constants, which its products and convolutions repack
    config.freezing = True
    return prepare(**arguments, backend="inductor", dynamic=False)


if __name__ == "__main__":
    serve({"setup": setup, "first": first, "run": run})
