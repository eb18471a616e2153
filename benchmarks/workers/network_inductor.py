"""A network of torch that inductor compiled."""

from __future__ import annotations

from benchmarks.runner import serve
from benchmarks.workers.network_torch import compile_with_inductor, make, run

if __name__ == "__main__":
    serve({"setup": compile_with_inductor, "make": make, "run": run})
