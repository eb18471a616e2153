"""The library's matmul kernel, timed in programs of several launches, as in a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np

from benchmarks.runner import serve
from benchmarks.workers import limits
from tests.kernels.harness import Runner, pool, together

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LAUNCHES = 16
SHORT = 5e7  # operations
_made: dict[tuple[int, int, int, str, int], tuple[int, Callable[[], None], list[Runner]]] = {}


def setup() -> dict[str, object]:
    return {"workers": pool(2).num_threads}


def measure_limits() -> dict[str, float]:
    return limits.measure(pool(2))


def run(m: int, n: int, k: int, dtype: str, copies: int, repeats: int) -> dict[str, float]:
    key = (m, n, k, dtype, copies)
    if key not in _made:
        _made.clear()
        kind = DTYPES[dtype]
        rng = np.random.default_rng(0)
        x = rng.standard_normal((m, k), np.float32).astype(kind)
        one = rng.standard_normal((n, k), np.float32).astype(kind)
        runners = [
            Runner("mo.matmul", [x, one.copy()], [(kind, (m, n))], {"transpose_b": True})
            for _ in range(copies)
        ]
        # short ones together, as in a model; long ones alone, as torch is timed
        together_count = LAUNCHES if 2 * m * n * k < SHORT else 1
        launches = runners if copies > 1 else runners * min(together_count, repeats)
        _made[key] = (len(launches), together(launches), runners)
    launches, program, _ = _made[key]
    times: list[float] = []
    for _ in range(max(repeats // launches, 3)):
        start = time.perf_counter()
        program()
        times.append((time.perf_counter() - start) / launches)
    return {"seconds": statistics.median(times)}


if __name__ == "__main__":
    serve({"setup": setup, "limits": measure_limits, "run": run})
