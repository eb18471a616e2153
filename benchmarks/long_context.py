"""Decoding with a long context: float16 and q8_0 caches, beside llama.cpp with flash attention and the same cache.

A model of 6 layers of the 135M shape, in Q4_0: weights are a small part of what a step reads, keys and values the rest. The prompt is
read once, by llama.cpp in chunks that do not see each other; each run continues it anew, ours from the prefix cache.
Engines take turns, each in a process of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.generation import model_of
from benchmarks.models import make_gguf
from benchmarks.peers import llama_python
from benchmarks.runner import Worker, interleave, ratio

SHAPE, ENCODING = "llama-long", "q4_0"
LENGTHS = (8192, 32768)
NEW_TOKENS = 65
STEP = 4096
"""Tokens of the prompt that a call reads."""
FORMATS = {"float16": "f16", "q8_0": "q8_0"}
"""Our names of caches, and those of llama.cpp."""
HEAD = [
    "| context | cache | Supremum, tok/s | llama.cpp, tok/s | ours / llama.cpp |",
    "|---|---|---|---|---|",
]


def measure(
    folder: Path,
    runs: int = 3,
    lengths: Sequence[int] = LENGTHS,
    encoding: str = ENCODING,
    caches: Sequence[str] = tuple(FORMATS),
) -> Iterator[str]:
    """The rows of the table, as they are measured.

    Args:
        folder: Where models are made.
        runs: Runs of each case.
        lengths: Tokens of the context.
        encoding: The encoding of the weights.
        caches: The formats of the cache, keys of `FORMATS`.
    """
    setup: dict[str, Any] = dict(model_of(SHAPE, encoding, folder))
    interpreter = llama_python()
    for length in lengths:
        prompt = random.Random(0).choices(range(5, 4000), k=length)
        for ours in caches:
            room = length + NEW_TOKENS + 1
            name = "benchmarks.workers.supremum_llm"
            workers = [Worker(name, {}, batch=1, length=room, cache=ours, **setup)]
            if interpreter is not None:
                name, model = (
                    "benchmarks.workers.llama_cpp_llm",
                    str(make_gguf(SHAPE, encoding, folder)),
                )
                workers.append(
                    Worker(
                        name, {}, python=interpreter, model=model, length=room, cache=FORMATS[ours]
                    )
                )
            for worker in workers:
                for end in range(STEP, length + STEP, STEP):
                    worker.call("read", prompt=prompt[:end])
            samples = [
                found["decode_tok_s"]
                for found in interleave(
                    workers, "resume", runs, prompt=prompt, new_tokens=NEW_TOKENS
                ).values()
            ]
            for worker in workers:
                worker.close()
            peer = f"{samples[1]} | {ratio(samples[0], samples[1]):.2f}" if samples[1:] else "| "
            yield f"| {length} | {ours} | {samples[0]} | {peer} |"
