"""`torch.compile` with our backend against inductor and eager torch: milliseconds for a batch, and seconds to the first results.

Each of the 40 models of `benchmarks.compiled_models` has random weights, which are the same in all engines. An engine has a process of its own
and all cores of the machine; the turns alternate. The results are compared with those of eager torch first. Seconds of compilation are those of
the first call with empty caches, less a later call. torchvision and timm come from the environment `exporters` of `benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.compiled_models import MODELS
from benchmarks.imported import compare
from benchmarks.peers import packages
from benchmarks.runner import Worker, exit_on_sigterm, interleave, machine, ratio
from benchmarks.summary import geometric_mean

HEAD = [
    "| model | Supremum, ms | inductor, ms | torch, ms | of inductor | of torch | compiled in, s | inductor, s |",
    "|" + "---|" * 8,
]


def _start(name: str, cache: str) -> list[Worker]:
    """Our backend, inductor, and eager torch."""
    env = {"MAX_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    return [
        Worker(
            f"benchmarks.workers.compiled_{engine}", env, model=name, packages=packages("exporters")
        )
        for engine in ("max", "inductor", "torch")
    ]


def _row(name: str, workers: Sequence[Worker], runs: int, seconds: float, results: Path) -> str:
    compiled: list[float] = []
    arrays: list[np.ndarray] = []
    for worker in workers:
        path = results / f"{worker.name}.npy"
        compiled.append(worker.call("first", path=str(path))["first_s"])
        arrays.append(np.load(path))
    for worker, array in zip(workers, arrays, strict=True):
        compare(f"{name}, {worker.name}", [array], arrays[-1:])
    found = interleave(workers, "run", runs, settle="ms", seconds=seconds)
    ours, inductor, eager = (found[worker.name]["ms"] for worker in workers)
    spent = [max(s - x.median / 1e3, 0.0) for s, x in zip(compiled, (ours, inductor), strict=False)]
    return (
        f"| {name} | {ours} | {inductor} | {eager} | {ratio(inductor, ours):.2f} | {ratio(eager, ours):.2f}"
        f" | {spent[0]:.1f} | {spent[1]:.1f} |"
    )


def measure(
    models: Sequence[str] = tuple(MODELS), runs: int = 5, seconds: float = 0.5
) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    yield from HEAD
    for name in models:
        with tempfile.TemporaryDirectory() as folder:
            workers = _start(name, folder)
            yield _row(name, workers, runs, seconds, Path(folder))
            for worker in workers:
                worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    rows: list[list[str]] = []
    for line in measure(args.models, args.runs, args.seconds):
        print(line, flush=True)
        rows.append(line.split("|"))
    means = [geometric_mean([float(row[i]) for row in rows[2:]]) for i in (5, 6)]
    shares = statistics.median(float(row[7]) / max(float(row[8]), 0.1) for row in rows[2:])
    print(
        f"Geometric means: {means[0]:.2f} of inductor, {means[1]:.2f} of eager torch. "
        f"Compilation takes {shares:.2f} of inductor's time (median)."
    )


if __name__ == "__main__":
    main()
