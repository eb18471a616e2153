"""Where the time of a start goes: a thread samples the main thread's stack and names the phase of each sample.

A phase is found by the files on the stack, so that the profile needs no hooks in the product. A sample stands for the
time since the last one: calls that hold Python's lock are counted when they return.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import PurePath
from types import FrameType

# the first pattern that any frame of the stack matches, the outermost frames included
PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("imports", ("<frozen importlib._bootstrap>",)),
    (
        "measuring",
        ("max/engine/tune/row_thresholds.py", "max/engine/tune/threshold_measurement.py"),
    ),
    ("packing", ("max/engine/load/load_time_results.py",)),
    (
        "LLVM, loading and linking of code",
        (
            "max/_backends/cpu/runtime/jit.py",
            "max/_backends/cpu/runtime/kernel_code.py",
            "max/_backends/cpu/runtime/llvm_compiler.py",
        ),
    ),
    ("kernel frontend", ("max/_compiler/lowering/kernel_tables.py", "max/kernel/frontend/")),
    ("passes", ("max/_compiler/passes/", "max/_backends/cpu/passes/")),
    ("lowering", ("max/_compiler/", "max/_backends/cpu/regions/")),
    ("casts of weights", ("graph/weights/_weight_data.py:astype", "weight_casts.py")),
    ("reading of weights", ("max/graph/weights/",)),
    (
        "key of the graph",
        ("program_store.py:_key", "program_store.py:_recipe_key", "staged_graphs.py"),
    ),
    ("linking of the program", ("max/engine/",)),
    (
        "tokenizer",
        (
            "max/pipelines/tokenization/",
            "max/pipelines/gguf/tokenizer.py",
            "max/pipelines/gguf/vocabulary.py",
        ),
    ),
    ("graph building", ("build_graph", "max/nn/", "max/graph/", "max/mlir/")),
    ("cache of pages", ("max/pipelines/kv_cache/",)),
    ("configuration", ("max/pipelines/config/", "max/pipelines/checkpoints/")),
)


class Sampler:
    """Samples the calling thread until `stop`.

    Args:
        period: Seconds between samples.
    """

    def __init__(self, period: float = 0.001) -> None:
        self.seconds: dict[str, float] = {}
        self._period = period
        self._watched = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Ends it; gives the seconds of each phase, the longest first."""
        self._stopped.set()
        self._thread.join()
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._stopped.wait(self._period):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter()
            phase = phase_of(frame)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - before
            before = now


def phase_of(frame: FrameType | None) -> str:
    """The phase that a stack belongs to."""
    places: list[str] = []
    while frame is not None:
        code = frame.f_code
        places.append(f"{PurePath(code.co_filename).as_posix()}:{code.co_name}")
        frame = frame.f_back
    for phase, patterns in PHASES:
        if any(pattern in place for place in places for pattern in patterns):
            return phase
    return "other"
