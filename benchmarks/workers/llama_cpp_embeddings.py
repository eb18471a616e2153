"""Vectors of texts by llama.cpp, through llama-cpp-python's low-level interface: the means of tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from benchmarks.embeddings import LONGEST, SIZES, batches, serve_vectors

state: dict[str, Any] = {}
MEAN = 1
"""llama.cpp's number of the pooling."""


def setup(model: str, folder: str) -> dict[str, float]:
    path = Path(folder) / f"embeddings-{model}" / "model.gguf"
    most = max(SIZES["llama.cpp"])
    state["model"] = lib.llama_model_load_from_file(
        str(path).encode(), lib.llama_model_default_params()
    )
    params = lib.llama_context_default_params()
    params.embeddings, params.pooling_type = True, MEAN
    # a text must be in one part of a batch
    params.n_ctx = params.n_batch = params.n_ubatch = most * LONGEST
    params.n_seq_max = most
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    state["context"] = lib.llama_init_from_model(state["model"], params)
    if not state["context"]:
        raise RuntimeError(f"{path}: llama.cpp made no context")
    state["size"] = lib.llama_model_n_embd(state["model"])
    state["batch"] = lib.llama_batch_init(most * LONGEST, 0, 1)
    return {}


def vectors(tokens: Sequence[Any], size: int, part: slice) -> dict[int, Any]:
    """The vectors of the texts of some batches."""
    batch, context = state["batch"], state["context"]
    out: dict[int, Any] = {}
    for numbers in batches(tokens, size, part):
        n = 0
        for sequence, i in enumerate(numbers):
            for position, token in enumerate(tokens[i].tolist()):
                batch.token[n], batch.pos[n] = token, position
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, sequence
                batch.logits[n] = True
                n += 1
        batch.n_tokens = n
        code = lib.llama_encode(context, batch)
        if code:
            raise RuntimeError(f"llama_encode gave {code}")
        for sequence, i in enumerate(numbers):
            found = lib.llama_get_embeddings_seq(context, sequence)
            out[i] = np.ctypeslib.as_array(found, (state["size"],)).copy()
    return out


if __name__ == "__main__":
    serve_vectors("llama.cpp", setup, vectors)
