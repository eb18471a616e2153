"""The perplexity of a text under a model: how well it predicts each token from those before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max.interfaces import PipelineTask, TextGenerationInputs
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import InputError
from max.pipelines.core.text_context import TextContext
from max.pipelines.registry.registry import PIPELINE_REGISTRY
from max.pipelines.tokenization.hf_tokenizer import active_tokenizer

__all__ = ["BATCH", "Perplexity", "log_probabilities", "perplexity", "predictions", "windows_of"]

BATCH = 8
"""The number of windows per batch."""


class Perplexity(NamedTuple):
    """A measured perplexity.

    Args:
        value: The perplexity.
        windows: The windows that were read.
        tokens: The tokens that were predicted.
    """

    value: float
    windows: int
    tokens: int


def windows_of(tokens: list[int], size: int, most: int | None = None) -> list[list[int]]:
    """Splits tokens into windows of equal size; a shorter last one is left out.

    Args:
        tokens: The tokens.
        size: Tokens of a part.
        most: How many parts at most.
    """
    parts = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
    return parts[:most]


def log_probabilities(pipeline: Any, windows: list[list[int]]) -> Iterator[list[float]]:
    """The log-probabilities of all tokens of each window but its first.

    Args:
        pipeline: A pipeline with ``enable_echo`` and batches of `BATCH`.
        windows: The tokens.
    """
    for start in range(0, len(windows), BATCH):
        contexts = [
            TextContext(max_length=len(window) + 1, tokens=np.array(window))
            for window in windows[start : start + BATCH]
        ]
        for context in contexts:
            context.log_probabilities, context.log_probabilities_echo = 1, True
        inputs = TextGenerationInputs([{c.request_id: c for c in contexts}], num_steps=1)
        outputs = pipeline.execute(inputs)
        for context in contexts:
            (first,) = outputs[context.request_id].log_probabilities
            yield first.token_log_probabilities[:-1]
            pipeline.release(context.request_id)


def predictions(
    text: str, window: int, most: int | None = None, **options: object
) -> npt.NDArray[np.float64]:
    """The log-probability of each token of a text but the first of each window; each window begins anew.

    Args:
        text: The text.
        window: Tokens of a window.
        most: The maximum number of windows; all of them by default.
        options: Of `PipelineConfig`: the model, its encoding and so on.

    Returns:
        float64 ``[windows, window - 1]``.

    Raises:
        InputError: The text has fewer tokens than a window.
        UserError: An option or the model's files do not fit.
    """
    batch = {"max_length": window + 1, "max_batch_size": BATCH, "enable_echo": True}
    config = PipelineConfig(**options, **batch)
    tokenizer = active_tokenizer(config.model_config.huggingface_model_repo)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    windows = windows_of(tokens, window, most)
    if not windows:
        raise InputError(
            f"the text has {len(tokens)} tokens, fewer than a window of {window}",
            "Give a longer text, or a smaller --window.",
        )
    pipeline = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    return np.array(list(log_probabilities(pipeline, windows)))


def perplexity(text: str, window: int, most: int | None = None, **options: object) -> Perplexity:
    """The perplexity of a text, read in windows of which each begins anew.

    Args:
        text: The text.
        window: Tokens of a window.
        most: The maximum number of windows; all of them by default.
        options: Of `PipelineConfig`: the model, its encoding and so on.

    Raises:
        InputError: The text has fewer tokens than a window.
        UserError: An option or the model's files do not fit.
    """
    logs = predictions(text, window, most, **options)
    return Perplexity(math.exp(-float(logs.mean())), len(logs), logs.size)
