"""Hugging Face transformers on torch: load, prefill and greedy decode."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.runner import peak_memory, serve

state: dict[str, Any] = {}


def setup(model: str, dtype: str) -> dict[str, float]:
    start = time.perf_counter()
    state["model"] = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    return {"load_s": time.perf_counter() - start}


@torch.inference_mode()
def generate(prompt: list[int], new_tokens: int, batch: int = 1) -> dict[str, float]:
    """Greedy, token by token with the default cache; prefill is the first forward and its argmax."""
    model = state["model"]
    ids = torch.tensor([prompt] * batch)
    start = time.perf_counter()
    out = model(ids, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1].argmax(-1, keepdim=True)
    prefill = time.perf_counter() - start
    # state-space models have a cache of another name
    cache = "past_key_values" if "past_key_values" in out else "cache_params"
    for _ in range(new_tokens - 1):
        out = model(token, **{cache: out[cache]}, use_cache=True)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    decode = time.perf_counter() - start - prefill
    return {
        "prefill_tok_s": batch * len(prompt) / prefill,
        "decode_tok_s": batch * (new_tokens - 1) / decode,
    }


if __name__ == "__main__":
    serve({"setup": setup, "generate": generate, "memory": peak_memory})
