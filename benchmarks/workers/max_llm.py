"""MAX, through its own command line, which reports what it measured. One run is one process.

Runs in its own environment (see `benchmarks.peers`). The compiled model is in MAX's cache after the first run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.runner import serve

state: dict[str, Any] = {}
FIGURES = {
    "prefill_tok_s": r"Prompt eval throughput.*: ([\d.]+)",
    "decode_tok_s": r"Eval throughput.*: ([\d.]+)",
}


def setup(model: str, dtype: str) -> dict[str, float]:
    state["command"] = [
        str(Path(sys.executable).with_name("max")), "generate", "--model-path", model,
        "--quantization-encoding", dtype, "--devices", "cpu", "--max-length", "2048", "--num-warmups", "2",
    ]  # fmt: skip
    start = time.perf_counter()
    _run("hello", 2)
    return {"load_s": time.perf_counter() - start}


def _run(prompt: str, new_tokens: int) -> str:
    env = {**os.environ, "MODULAR_TELEMETRY_ENABLED": "0"}
    arguments = ["--prompt", prompt, "--max-new-tokens", str(new_tokens)]
    done = subprocess.run(
        [*state["command"], *arguments], capture_output=True, text=True, env=env, cwd="/"
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stdout


def generate(text: str, new_tokens: int, **_: object) -> dict[str, float]:
    """Greedy, one sequence. The prompt is text: its own tokenizer makes the tokens."""
    out = _run(text, new_tokens)
    found = {name: re.search(pattern, out) for name, pattern in FIGURES.items()}
    return {name: float(match[1]) for name, match in found.items() if match}


if __name__ == "__main__":
    serve({"setup": setup, "generate": generate})
