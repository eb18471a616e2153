"""A pipeline without tensors: each token depends on all tokens before it, read from pages of a fake cache."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from max.interfaces import LogProbabilities, SamplingParams
from max.pipelines.core import TextContext
from max.pipelines.generation.batch_pipeline import BatchPipeline
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.request_pages import RequestPages

PAGE_SIZE = 2


def next_token(sequence: Sequence[int], seed: int = 0) -> int:
    return zlib.crc32(np.array([seed, *sequence], np.int64).tobytes()) % 251


def expected(prompt: Sequence[int], new: int, seed: int = 0) -> list[int]:
    sequence = list(prompt)
    for _ in range(new):
        sequence.append(next_token(sequence, seed))
    return sequence[len(prompt) :]


def context(prompt: Sequence[int], new: int, seed: int = 0, **values) -> TextContext:
    return TextContext(
        max_length=len(prompt) + new,
        tokens=np.array(prompt, np.int64),
        sampling_params=SamplingParams(seed=seed),
        **values,
    )


class CountingPipeline(BatchPipeline):
    """Runs batches as a text pipeline does, with the number of steps that the scheduler sets.

    Args:
        pages: The number of pages.
        prefix: Whether requests share pages.
        seconds: How long a step takes.
    """

    repeats_steps = True
    pipeline_config = None

    def __init__(self, pages: int = 64, prefix: bool = False, seconds: float = 0) -> None:
        self.cache = RequestPages(PageManager(pages, PAGE_SIZE, prefix))
        self.memory = np.full((pages, PAGE_SIZE), -1)
        self.steps = 0
        self.sizes: list[int] = []
        self.before: Callable[[list[TextContext]], None] = lambda batch: time.sleep(seconds)
        self.after: Callable[[list[TextContext]], None] = lambda batch: None
        self.interrupts = 0

    @property
    def kv_managers(self):
        return [self.cache]

    def release(self, request_id) -> None:
        self.cache.close(request_id)

    def interrupt(self) -> None:
        self.interrupts += 1

    def execute(self, inputs):
        batch = list(inputs.batch.values())
        self.steps += 1
        self.sizes.append(len(batch))
        self.before(batch)
        for one in batch:
            self._run(one, inputs.num_steps)
        self.after(batch)
        self.cache.step(batch)
        return {one.request_id: one.to_generation_output() for one in batch}

    def _run(self, one: TextContext, steps: int) -> None:
        table = self.cache.pages.pages(one.request_id)
        sequence = [
            int(self.memory[table[i // PAGE_SIZE], i % PAGE_SIZE]) for i in range(one.start_idx)
        ]
        assert sequence == one.all_tokens[: one.start_idx].tolist(), "a stale cache"
        new = one.next_tokens.tolist()
        for _ in range(steps):
            for token in new:
                at = len(sequence)
                self.memory[table[at // PAGE_SIZE], at % PAGE_SIZE] = token
                sequence.append(token)
            new = [next_token(sequence, one.sampling_params.seed)]
            if not one.is_done:
                one.update(new[0], logs_of(one, new[0]))


def logs_of(one: TextContext, token: int) -> LogProbabilities | None:
    if not one.log_probabilities:
        return None
    return LogProbabilities([-token / 7], [{token: -token / 7, token + 1: float("-inf")}])
