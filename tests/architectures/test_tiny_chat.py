"""The bundled checkpoint against transformers, on real text."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from max.dtype import DType
from max.graph.weights import load_weights
from max.nn.transformer import ReturnLogits
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    wrong_tokens,
)

MODEL = Path(__file__).parents[2] / "models" / "tiny-chat"
TEXTS = [
    "import os\n\ndef walk(",
    "Sort: wizard anchor",
    "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n",
]


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()


@cache
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    heldout = (MODEL / "heldout.txt").read_text()
    # a stretch of Python besides, as long as a few pages
    return [tokenizer(text)["input_ids"] for text in [*TEXTS, heldout[5000:5700]]]


def server(backend: str, dtype: DType) -> Server:
    weights = {name: w.data() for name, w in load_weights([MODEL / "model.safetensors"]).items()}
    return Server(
        reference().config,
        weights,
        backend,
        dtype,
        page_size=128,
        pages=8,
        max_seq_len=512,
        return_logits=ReturnLogits.ALL,
    )


# the interpreter is for small things: it takes the short prompts only
@pytest.mark.parametrize(("backend", "count"), [("interpreter", 2), ("engine", 4)])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(DType.float32, 1e-4), (DType.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_logits(backend: str, count: int, dtype: DType, limit: float) -> None:
    batch = dict(enumerate(prompts()[:count]))
    step = server(backend, dtype).step(batch)
    for row, tokens in batch.items():
        wanted = reference_logits(reference(), tokens)
        assert relative_error(step.logits[row], wanted) < limit
        margin = 1e-3 if dtype is DType.float32 else 0.05
        assert not wrong_tokens(step.logits[row], wanted, margin)


def test_greedy_decoding_follows_the_reference() -> None:
    ours = server("engine", DType.float32)
    tokens = list(prompts()[2])
    wanted = list(tokens)
    step = ours.step({0: tokens})
    found: list[int] = []
    for _ in range(24):
        found.append(int(step.last[0].argmax()))
        wanted.append(int(reference_logits(reference(), wanted)[-1].argmax()))
        step = ours.step({0: found[-1:]})
    assert found == wanted[len(tokens) :]
    assert np.isfinite(step.last).all()
