"""Starts an `LLM` once and prints, as JSON, what that took: seconds, CPU seconds, phases, counts of work.

``python -m benchmarks.workers.start_llm MODEL ENCODING [--phases] [--fill] [--quantize=KIND]``; MODEL is a folder or a GGUF file.
With ``--fill`` it writes packed weights to the cache, however long that takes, as a process does that lives on.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from benchmarks.phases import Sampler


def cpu_seconds() -> float:
    """The CPU time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


llm: Any = None
"""The model, of `main`."""


def main(model: str, encoding: str, with_phases: bool, quantize: str | None) -> None:
    """Starts the model and prints the figures."""
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    sampler = Sampler() if with_phases else None
    from max.entrypoints.llm import LLM
    from max.pipelines import PipelineConfig

    imported = time.perf_counter()
    # alive until the process ends, as in the CLI and the server: its packed weights are then written
    global llm
    llm = LLM(PipelineConfig(model_path=model, quantization_encoding=encoding, quantize=quantize))
    ready, ready_cpu = time.perf_counter(), cpu_seconds()
    phases = sampler.stop() if sampler else {}
    modules = len(sys.modules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    llm.generate("hello", max_new_tokens=1, use_tqdm=False)
    token = time.perf_counter()

    from max._backends.cpu.runtime import jit
    from max._compiler.stats import stats

    print(
        json.dumps(
            {
                "imports_s": imported - begin,
                "llm_s": ready - imported,
                "ready_s": ready - begin,
                "ready_cpu_s": ready_cpu - begin_cpu,
                "first_token_s": token - ready,
                "peak_bytes": peak,
                "modules": modules,
                "kernels_made": stats.kernels,
                "programs_from_disk": stats.from_disk,
                "kernels_compiled": jit.stats.compiled,
                "kernels_from_disk": jit.stats.cached,
                "phases": phases,
            }
        )
    )


if __name__ == "__main__":
    kinds = [x.removeprefix("--quantize=") for x in sys.argv if x.startswith("--quantize=")]
    main(sys.argv[1], sys.argv[2], "--phases" in sys.argv, kinds[0] if kinds else None)
    if "--fill" in sys.argv:
        from max.engine.load import packed_weights

        packed_weights.write_now()
