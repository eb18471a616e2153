"""Tokens per second of a state-space model with random weights: Mamba 2 of 130M, beside llama.cpp and transformers on torch.

Prefill is the time to the first token. Both decode greedily, alone and 16 sequences at once.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.generation import LABELS, OURS, figures_of
from benchmarks.models import TOKENIZER_FROM
from benchmarks.peers import llama_python
from benchmarks.runner import Worker, interleave, ratio

# fields of transformers' Mamba2Config, as in state-spaces/mamba2-130m
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2-130m": {
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_heads": 24,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
}
DTYPES = ("float32", "bfloat16")
CASES = ((32, 1), (512, 1), (32, 16))
NEW_TOKENS = 32
# our dtypes and those of GGUF files
TYPES = {"float32": "f32", "bfloat16": "bf16"}
HEAD = ["| model | dtype | figure | " + " | ".join(LABELS.values()) + " | ours / llama.cpp | ours / transformers |"]  # fmt: skip
HEAD.append("|" + "---|" * (5 + len(LABELS)))


def make_checkpoint(shape: str, dtype: str, folder: Path) -> Path:
    """Writes the model of ``shape`` (a key of ``SHAPES``) in ``dtype`` under ``folder``; returns its folder."""
    target = folder / f"{shape}-{dtype}"
    if (target / "model.safetensors").exists():
        return target
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    config = Mamba2Config(**SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=0)
    Mamba2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER_FROM / name, target / name)
    return target


def make_gguf(checkpoint: Path, dtype: str) -> Path:
    """Writes a checkpoint as a GGUF file beside it."""
    target = checkpoint.with_suffix(".gguf")
    if not target.exists():
        from max.driver import CPU
        from max.engine import InferenceSession
        from max.pipelines.gguf.export import export_gguf

        aside = target.with_suffix(".part")
        export_gguf(checkpoint, aside, TYPES[dtype], InferenceSession(devices=[CPU()]))
        aside.rename(target)
    return target


def _start(checkpoint: Path, dtype: str) -> list[Worker]:
    """The engines that are installed, ours first."""
    workers = [Worker(f"benchmarks.workers.{OURS}", model=str(checkpoint), dtype=dtype)]
    interpreter = llama_python()
    if interpreter is not None:
        model = str(make_gguf(checkpoint, dtype))
        name = "benchmarks.workers.llama_cpp_llm"
        workers.append(Worker(name, python=interpreter, model=model, dtype=dtype))
    name = "benchmarks.workers.transformers_llm"
    return [*workers, Worker(name, model=str(checkpoint), dtype=dtype)]


def measure(
    folder: Path,
    shapes: Sequence[str] = tuple(SHAPES),
    dtypes: Sequence[str] = DTYPES,
    runs: int = 3,
    cases: Sequence[tuple[int, int]] = CASES,
) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    yield from HEAD
    tokens = random.Random(0).choices(range(5, 4000), k=2048)
    for shape in shapes:
        for dtype in dtypes:
            workers = _start(make_checkpoint(shape, dtype, folder), dtype)
            for prompt, batch in cases:
                arguments = {"prompt": tokens[:prompt], "new_tokens": NEW_TOKENS, "batch": batch}
                samples = interleave(workers, "generate", runs, **arguments)
                for figure, what in figures_of(prompt, batch).items():
                    found = {name: samples[name][figure] for name in LABELS if name in samples}
                    cells = [str(found.get(name, "")) for name in LABELS]
                    for peer in ("llama_cpp_llm", "transformers_llm"):
                        missing = peer not in found
                        cells.append("" if missing else f"{ratio(found[OURS], found[peer]):.2f}")
                    yield f"| {shape} | {dtype} | {what}, tok/s | {' | '.join(cells)} |"
            for worker in workers:
                worker.close()
