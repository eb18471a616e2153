"""Supremum: load, prefill and greedy decode, through the pipeline that `max generate` runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.runner import serve
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.lib.generation import Generation

state: dict[str, Any] = {}


def setup(model: str, dtype: str) -> dict[str, float]:
    start = time.perf_counter()
    config = PipelineConfig(model_path=model, quantization_encoding=dtype, max_length=1024)
    config.resolve()
    _, state["pipeline"] = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)
    state["generation"] = Generation.of(state["pipeline"])
    return {"load_s": time.perf_counter() - start}


def generate(prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Greedy; prefill ends with the first token."""
    context = TextContext(
        request_id=RequestID(),
        tokens=np.array(prompt, np.int32),
        max_length=len(prompt) + new_tokens,
        eos_token_ids=set(),
        sampling_params=SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True),
    )
    start = time.perf_counter()
    times: list[float] = []
    for output in state["generation"].stream([context]):
        times += [time.perf_counter() - start] * len(output.tokens)
    if len(times) != new_tokens:
        raise RuntimeError(f"{len(times)} tokens came, {new_tokens} were asked for")
    return {
        "prefill_tok_s": len(prompt) / times[0],
        "decode_tok_s": (new_tokens - 1) / (times[-1] - times[0]),
    }


if __name__ == "__main__":
    serve({"setup": setup, "generate": generate})
