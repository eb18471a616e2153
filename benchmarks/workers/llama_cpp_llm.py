"""llama.cpp through llama-cpp-python's low-level interface: load, prefill and greedy decode of one or several sequences.

Runs in its own environment, without the rest of the project's packages (see `benchmarks.peers`).
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.runner import peak_memory, serve

state: dict[str, Any] = {}
CONTEXT, MAX_SEQUENCES = 2048, 16
CHUNK = 1024
CACHE_TYPES = {"f16": 1, "q8_0": 8}
"""The numbers of ggml's types."""
FLASH_ATTENTION = 1


def quantize(source: str, target: str, file_type: int, pure: bool = True) -> dict[str, float]:
    """Makes a quantized GGUF file of another."""
    params = lib.llama_model_quantize_default_params()
    params.ftype = file_type
    params.nthread = len(os.sched_getaffinity(0))
    params.pure = pure
    code = lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"{target}: quantize gave {code}")
    return {"bytes": os.path.getsize(target)}


def setup(model: str = "", dtype: str = "", length: int = 0, cache: str = "") -> dict[str, float]:
    """Without a model only `quantize` runs. With a cache type the length is that of one sequence, and attention is flash attention."""
    if not model:
        return {}
    start = time.perf_counter()
    state["model"] = lib.llama_model_load_from_file(
        model.encode(), lib.llama_model_default_params()
    )
    params = lib.llama_context_default_params()
    params.n_ctx = CONTEXT * 4
    params.n_batch = params.n_ubatch = CHUNK
    params.n_seq_max = MAX_SEQUENCES
    params.kv_unified = True
    if cache:
        params.n_ctx, params.n_seq_max = length, 2
        params.type_k = params.type_v = CACHE_TYPES[cache]
        if hasattr(params, "flash_attn_type"):
            params.flash_attn_type = FLASH_ATTENTION
        else:
            params.flash_attn = True
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    state["context"] = lib.llama_init_from_model(state["model"], params)
    state["vocabulary"] = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(state["model"]))
    state["batch"] = lib.llama_batch_init(4096, 0, MAX_SEQUENCES)
    return {"load_s": time.perf_counter() - start}


def _decode(tokens: list[list[int]], position: int, sequence: int = 0) -> list[int]:
    """Runs some tokens of each sequence from one on, all from one position; the likeliest next token of each."""
    batch, n = state["batch"], 0
    last = []
    for number, ids in enumerate(tokens, sequence):
        for i, token in enumerate(ids):
            batch.token[n], batch.pos[n] = token, position + i
            batch.n_seq_id[n], batch.seq_id[n][0] = 1, number
            batch.logits[n] = i == len(ids) - 1
            n += 1
        last.append(n - 1)
    batch.n_tokens = n
    code = lib.llama_decode(state["context"], batch)
    if code:
        raise RuntimeError(f"llama_decode gave {code}")
    found = []
    for row in last:
        logits = lib.llama_get_logits_ith(state["context"], row)
        found.append(int(np.ctypeslib.as_array(logits, (state["vocabulary"],)).argmax()))
    return found


def generate(prompt: list[int], new_tokens: int, batch: int = 1) -> dict[str, float]:
    """Greedy; prefill ends with the first token of each sequence."""
    lib.llama_memory_clear(lib.llama_get_memory(state["context"]), True)
    start = time.perf_counter()
    tokens = _decode([prompt] * batch, 0)
    prefill = time.perf_counter() - start
    for step in range(new_tokens - 1):
        tokens = _decode([[token] for token in tokens], len(prompt) + step)
    decode = time.perf_counter() - start - prefill
    return {
        "prefill_tok_s": batch * len(prompt) / prefill,
        "decode_tok_s": batch * (new_tokens - 1) / decode,
    }


def read(prompt: list[int]) -> dict[str, float]:
    """Fills the cache with a prompt but for its last token, after what earlier calls have read of it.

    Tokens of a chunk see only each other, which takes a fraction of the time: a later step reads as many keys and values.
    """
    start = time.perf_counter()
    memory, last = lib.llama_get_memory(state["context"]), len(prompt) - 1
    for begin in range(state.get("read", 0), last, CHUNK):
        _decode([prompt[begin : min(begin + CHUNK, last)]], begin, sequence=1)
        lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        lib.llama_memory_seq_rm(memory, 1, -1, -1)
    state["read"] = last
    return {"read_s": time.perf_counter() - start}


def resume(prompt: list[int], new_tokens: int) -> dict[str, float]:
    """Continues a prompt that `read` has read."""
    last = len(prompt) - 1
    lib.llama_memory_seq_rm(lib.llama_get_memory(state["context"]), 0, last, -1)
    tokens = _decode([prompt[last:]], last)
    start = time.perf_counter()
    for step in range(new_tokens - 1):
        tokens = _decode([tokens], len(prompt) + step)
    return {"decode_tok_s": (new_tokens - 1) / (time.perf_counter() - start)}


if __name__ == "__main__":
    serve(
        {
            "setup": setup,
            "generate": generate,
            "read": read,
            "resume": resume,
            "quantize": quantize,
            "memory": peak_memory,
        }
    )
