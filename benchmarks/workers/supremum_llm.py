"""Supremum: load, prefill and greedy decode, through the pipeline that `max generate` runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import peak_memory, serve
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.generation import Generation

state: dict[str, Any] = {}


def setup(
    model: str, dtype: str, weights: str = "", batch: int = 16, length: int = 2048, cache: str = ""
) -> dict[str, float]:
    """``weights`` is a GGUF file, where they do not lie beside the model; ``cache`` the format of the KV cache."""
    start = time.perf_counter()
    given: dict[str, Any] = {"weight_path": [Path(weights)]} if weights else {}
    if cache:
        given["kv_cache_format"] = cache
    config = PipelineConfig(
        model_path=model,
        quantization_encoding=dtype,
        max_length=length,
        max_batch_size=batch,
        **given,
    )
    config.resolve()
    _, state["pipeline"] = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)
    state["generation"] = Generation.of(state["pipeline"])
    return {"load_s": time.perf_counter() - start}


def _context(prompt: list[int], new_tokens: int) -> TextContext:
    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    return TextContext(
        request_id=RequestID(),
        tokens=np.array(prompt, np.int32),
        max_length=len(prompt) + new_tokens,
        eos_token_ids=set(),
        sampling_params=sampling,
    )


def generate(prompt: list[int], new_tokens: int, batch: int = 1, **_: object) -> dict[str, float]:
    """Greedy; prefill ends with the first token of each sequence."""
    # each prompt starts with a token of its own, so that none finds its pages in the prefix cache
    state["runs"] = state.get("runs", 0) + 1
    first = [(state["runs"] * batch + i) % 4000 for i in range(batch)]
    contexts = [_context([5 + one, *prompt[1:]], new_tokens) for one in first]
    start = time.perf_counter()
    times: list[float] = []
    for output in state["generation"].stream(contexts):
        times += [time.perf_counter() - start] * len(output.tokens)
    if len(times) != batch * new_tokens:
        raise RuntimeError(f"{len(times)} tokens came, {batch * new_tokens} were asked for")
    prefill = times[batch - 1]
    return {
        "prefill_tok_s": batch * len(prompt) / prefill,
        "decode_tok_s": batch * (new_tokens - 1) / (times[-1] - prefill),
    }


def read(prompt: list[int]) -> dict[str, float]:
    """Reads a prompt, whose pages then are in the prefix cache."""
    start = time.perf_counter()
    for _ in state["generation"].stream([_context(prompt, 1)]):
        pass
    return {"read_s": time.perf_counter() - start}


def resume(prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Continues a prompt that `read` has read."""
    start = time.perf_counter()
    times: list[float] = []
    for output in state["generation"].stream([_context(prompt, new_tokens)]):
        times += [time.perf_counter() - start] * len(output.tokens)
    return {"decode_tok_s": (len(times) - 1) / (times[-1] - times[0])}


if __name__ == "__main__":
    serve(
        {
            "setup": setup,
            "generate": generate,
            "read": read,
            "resume": resume,
            "memory": peak_memory,
        }
    )
