"""A cached prefix on the disk: the time to read it back, beside the time to compute it.

`python -m benchmarks.prefixes --tokens 8192`. Two processes: one computes the prompt and saves its pages under a name,
as `POST /slots/0?action=save` does; the other one restores them and answers the same prompt. Loading the model counts
in neither.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_models import STARTUP_SHAPES, random_checkpoint
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.registry.registry import PIPELINE_REGISTRY

NAME = "prefix"


def first_token(action: str, model: Path, tokens: int, folder: Path) -> dict[str, float]:
    """Answers a prompt of random tokens with one token, in this process.

    Args:
        action: ``save``, after the answer, or ``restore``, before it.
        model: The checkpoint.
        tokens: The tokens of the prompt.
        folder: Where prefixes are kept.

    Returns:
        The seconds of the action and of the answer, and the bytes of the file.
    """
    config = PipelineConfig(
        model_path=str(model),
        max_batch_size=1,
        max_length=tokens + 8,
        kv_cache_folder=folder,
        kv_cache_folder_gb=16,
    )
    _, loaded = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)
    pipeline: Any = loaded
    pipeline.warm_up()
    engine = Engine(pipeline, limits_of(pipeline))
    kept: dict[str, float] = {}

    def keep() -> None:
        begin = time.perf_counter()
        _, size = pipeline.keep_prefixes(action, NAME)
        kept.update(keep_s=time.perf_counter() - begin, bytes=size)

    if action == "restore":
        keep()
    prompt = np.array(random.Random(0).choices(range(5, 4000), k=tokens))
    engine.submit(
        TextContext(
            tokens=prompt,
            max_length=tokens + 1,
            request_id=RequestID(),
            ignore_eos=True,
            sampling_params=SamplingParams(top_k=1, ignore_eos=True),
        )
    )
    begin = time.perf_counter()
    while not engine.idle:
        for outcome in engine.step():
            if isinstance(outcome, Failure):
                raise RuntimeError("the request failed") from outcome.error
    kept["answer_s"] = time.perf_counter() - begin
    if action == "save":
        keep()
    return kept


def main() -> None:
    """Runs both processes and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-1.07b", choices=sorted(STARTUP_SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--action", choices=["save", "restore"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = random_checkpoint(options.shape, "bfloat16", options.models / "prefixes")
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": options.tokens + 8}))
    if options.action is not None:
        print(json.dumps(first_token(options.action, model, options.tokens, options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.prefixes", *sys.argv[1:],
                     "--action", action, "--folder", folder],
                    check=True, stdout=subprocess.PIPE, text=True,
                ).stdout.splitlines()[-1]
            )
            for action in ("save", "restore")
        ]  # fmt: skip
    computed, restored = runs[0]["answer_s"], runs[1]["keep_s"] + runs[1]["answer_s"]
    print(
        f"{options.tokens} tokens of {options.shape}, {runs[0]['bytes'] / 2**20:.0f} MiB: computed in {computed:.2f} s,"
        f" restored in {runs[1]['keep_s']:.2f} s and answered in {runs[1]['answer_s']:.2f} s more:"
        f" {computed / restored:.1f} times as fast; saved in {runs[0]['keep_s']:.2f} s"
    )


if __name__ == "__main__":
    main()
