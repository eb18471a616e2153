"""Start-up, each figure from fresh processes: imports, the CLI's help, one gelu, and from `LLM(...)` to ready.

Cold means an empty cache of compiled code, warm a filled one. CPU seconds are those of all threads: on a machine that
others use they say more than the clock. ``python -m benchmarks.startup --phases`` shows where the time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.random_models import random_checkpoint, random_gguf
from benchmarks.runner import ROOT, Samples, exit_on_sigterm
from max._host.machine import available_memory

IMPORT = "import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"

GELU = """
import time, json
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
session = InferenceSession(devices=[CPU()])
types = [TensorType(DType.float32, ("n", 1024), DeviceRef.CPU())]
if {after_another}:
    session.load(Graph("exp", ops.exp, types))
t0 = time.perf_counter()
with Graph("gelu", input_types=types) as graph:
    graph.output(ops.gelu(graph.inputs[0].tensor))
model = session.load(graph)
x = np.ones((4, 1024), np.float32)
model.execute(x)
print(time.perf_counter() - t0)
"""

EMPTY = """
import time, statistics
import numpy as np
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
session = InferenceSession(devices=[CPU()])
def timed(count):
    with Graph("chain", input_types=[TensorType(DType.float32, (16,), DeviceRef.CPU())]) as graph:
        x = graph.inputs[0].tensor
        for _ in range(count):
            x = x + 1.0
        graph.output(x)
    model = session.load(graph)
    x = Tensor.from_numpy(np.ones(16, np.float32))
    runs = []
    for _ in range(3000):
        t = time.perf_counter(); model.execute(x); runs.append(time.perf_counter() - t)
    return statistics.median(runs)
print(timed(1))
"""


HELP = """
import time; t = time.perf_counter()
from max.entrypoints.cli import cli
cli.main(["--help"], standalone_mode=False)
import sys; print(time.perf_counter() - t, file=sys.stderr)
"""


@dataclass(frozen=True)
class Case:
    """A start of a model.

    Args:
        shape: A key of `benchmarks.random_models.STARTUP_SHAPES`.
        stored: The dtype of the weight files, or their encoding in a GGUF file.
        encoding: What the model runs in.
        cold: Whether the cache of compiled code is empty.
    """

    shape: str
    stored: str
    encoding: str
    cold: bool = False

    @property
    def name(self) -> str:
        """The case in words."""
        cast = "" if self.stored.lower() == self.encoding else f" from {self.stored}"
        return f"{self.shape} {self.encoding}{cast}, {'cold' if self.cold else 'warm'}"

    def model(self, folder: Path) -> Path:
        """The model's folder or file, written where it does not exist."""
        if self.stored.islower():
            return random_checkpoint(self.shape, self.stored, folder)
        return random_gguf(self.shape, self.stored, folder)


CASES = (
    Case("llama-135m", "float32", "float32"),
    Case("llama-135m", "float32", "bfloat16"),
    Case("llama-135m", "Q8_0", "q8_0"),
    Case("llama-135m", "Q4_0", "q4_0"),
    Case("llama-1.07b", "bfloat16", "bfloat16"),
    Case("llama-135m", "float32", "float32", cold=True),
    Case("llama-1.07b", "bfloat16", "bfloat16", cold=True),
    Case("qwen3-0.6b", "bfloat16", "bfloat16"),
    Case("qwen3-0.6b", "bfloat16", "bfloat16", cold=True),
)
# 4.7 GB, and as much for its packed weights: written for these cases and deleted
LARGE_CASES = (
    Case("llama-8b", "Q4_K", "q4_k"),
    Case("llama-8b", "Q4_K", "q4_k", cold=True),
)
LARGE_DISK, LARGE_MEMORY = 24 << 30, 8 << 30
"""The free bytes that they need; packed weights are kept where the disk has room for two copies."""
HEAD = (
    "| start | ready, s | CPU, s | first token, s | modules | kernels from Python / LLVM / disk | peak / weights |",
    "|---|---|---|---|---|---|---|",
)


def environment(cache: str) -> dict[str, str]:
    """That of a measured process: bytecode is cached as in an installed package."""
    return {
        **os.environ,
        "MAX_CACHE_DIR": cache,
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }


def fresh(code: str, runs: int, cache: str | None = None) -> Samples:
    """Seconds that the code prints last, once a process; ``cache`` None gives each run an empty cache folder."""
    out = Samples()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment(cache or empty),
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
            )
        out.values.append(float((done.stderr or done.stdout).split()[-1]))
    return out


def start(case: Case, folder: Path, cache: str, *flags: str) -> dict[str, Any]:
    """The figures of one start of a model; the flags are those of `benchmarks.workers.start_llm`."""
    arguments = [str(case.model(folder)), case.encoding, *flags]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workers.start_llm", *arguments],
        # packed weights in an empty cache would be written for nothing, after the figures
        env=environment(cache) | ({"MAX_WEIGHT_CACHE_SIZE": "0"} if case.cold else {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout.splitlines()[-1])


def starts(case: Case, folder: Path, runs: int, phases: bool = False) -> list[dict[str, Any]]:
    """Several starts of a case; before warm ones the cache is filled."""
    flags = ["--phases"] if phases else []
    with tempfile.TemporaryDirectory() as cache:
        if not case.cold:
            start(case, folder, cache, "--fill")
            return [start(case, folder, cache, *flags) for _ in range(runs)]
    figures: list[dict[str, Any]] = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as cache:
            figures.append(start(case, folder, cache, *flags))
    return figures


def measure_starts(folder: Path, runs: int = 3, shapes: Sequence[str] = ()) -> Iterator[str]:
    """The rows of the table of `LLM(...)` to ready, medians; large models only where disk and memory have room.

    Args:
        folder: Where models are made.
        runs: Starts of each case.
        shapes: The shapes whose cases are measured; none: all, and the large ones.
    """
    for case in CASES:
        if not shapes or case.shape in shapes:
            yield _row(case, folder, runs)
    if not shapes and has_room(folder):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            for case in LARGE_CASES:
                yield _row(case, Path(temporary), runs)


def has_room(folder: Path) -> bool:
    """Whether the large cases can be measured."""
    disk = min(shutil.disk_usage(place).free for place in (folder, tempfile.gettempdir()))
    return disk >= LARGE_DISK and (available_memory() or 0) >= LARGE_MEMORY


def _row(case: Case, folder: Path, runs: int) -> str:
    path = case.model(folder)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    stored = sum(file.stat().st_size for file in files)
    weights = stored // 2 if (case.stored, case.encoding) == ("float32", "bfloat16") else stored
    runs_of = starts(case, folder, runs)
    middle = {k: statistics.median(r[k] for r in runs_of) for k in runs_of[0] if k != "phases"}
    kernels = "/".join(
        str(int(middle[f"kernels_{k}"])) for k in ("made", "compiled", "from_disk")
    )  # fmt: skip
    return (
        f"| {case.name} | {middle['ready_s']:.2f} | {middle['ready_cpu_s']:.2f} | "
        f"{middle['first_token_s']:.3f} | {int(middle['modules'])} | {kernels} | "
        f"{middle['peak_bytes'] / weights:.2f} |"
    )


def measure(runs: int = 5) -> dict[str, Samples]:
    """Every figure of this page, in milliseconds but for the names that say µs."""
    figures: dict[str, Samples] = {}
    for module in ("max.graph", "max.engine", "max.entrypoints.llm"):
        figures[f"import {module}, ms"] = fresh(IMPORT.format(module=module), runs)
    figures["max --help, ms"] = fresh(HELP, runs)
    gelu = GELU.format(after_another=False)
    figures["one gelu: stage, compile, run; cold, ms"] = fresh(gelu, runs)
    after = fresh(GELU.format(after_another=True), runs)
    figures["one gelu after another graph; cold, ms"] = after
    with tempfile.TemporaryDirectory() as cache:
        fresh(gelu, 1, cache)
        figures["one gelu: from the disk cache, ms"] = fresh(gelu, runs, cache)
    for samples in figures.values():
        samples.values = [v * 1e3 for v in samples.values]
    one_add = fresh(EMPTY, runs)
    one_add.values = [v * 1e6 for v in one_add.values]
    figures["execute of one add on 16 elements, µs"] = one_add
    return figures


def show_phases(folder: Path) -> None:
    """Prints where the time of each case's second start goes."""
    for case in CASES:
        figures = starts(case, folder, 1, phases=True)[0]
        print(f"{case.name}: {figures['ready_s']:.2f} s, CPU {figures['ready_cpu_s']:.2f} s")
        for phase, seconds in figures["phases"].items():
            print(f"    {1e3 * seconds:7.0f} ms  {phase}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--models", type=Path, help="where models are kept; default: a temporary folder"
    )
    parser.add_argument("--phases", action="store_true", help="show where the time of starts goes")
    parser.add_argument(
        "--shapes", nargs="+", choices=sorted({case.shape for case in CASES}), default=[],
        help="only the starts of models of these shapes",
    )  # fmt: skip
    args = parser.parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.models or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.phases:
            show_phases(folder)
            return
        if not args.shapes:
            for name, samples in measure(args.runs).items():
                print(f"{name}: {samples}")
        print(*HEAD, *measure_starts(folder, args.runs, args.shapes), sep="\n")


if __name__ == "__main__":
    main()
