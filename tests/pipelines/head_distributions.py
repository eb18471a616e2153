"""Compares what a pipeline whose head drafts tokens samples with the exact distribution of its model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from max.interfaces import RequestID, SamplingParams
from max.pipelines import TextContext
from max.pipelines.core.predicted_text import PredictedText
from tests.pipelines.test_drafts import distribution, generated

PROMPT = [11, 7, 301, 12, 95]
TOKENS, COUNT = 4, 320

PARAMETERS = [
    dict(top_k=3, temperature=1.4),
    dict(top_k=5, top_p=0.8, frequency_penalty=0.9, presence_penalty=0.4),
    dict(top_k=6, min_p=0.2, repetition_penalty=1.4, temperature=0.7),
]
"""What leaves a small vocabulary: its texts of four tokens are counted."""


def check_distribution(
    drafting: Any, model: Any, values: dict[str, Any], prediction: Sequence[int] = ()
) -> None:
    """Chi-square of texts of four tokens, from many seeds, against the products of the model's probabilities.

    Args:
        drafting: The pipeline.
        model: The model, in PyTorch.
        values: The sampling parameters.
        prediction: The tokens of the prediction of each request; none: they have no prediction.
    """
    draw = np.random.default_rng(7)
    contexts = [
        TextContext(
            request_id=RequestID(f"{number}"), tokens=np.array(PROMPT),
            max_length=len(PROMPT) + TOKENS,
            sampling_params=SamplingParams(
                seed=int(draw.integers(2**62)), ignore_eos=True, **values
            ),
            prediction=PredictedText(prediction) if prediction else None,
        )
        for number in range(COUNT)
    ]  # fmt: skip
    before = np.array(drafting.draft_counts)
    seen: dict[tuple[int, ...], int] = {}
    for tokens in generated(drafting, contexts):
        seen[tuple(tokens)] = seen.get(tuple(tokens), 0) + 1
    drafted, accepted = np.array(drafting.draft_counts) - before
    assert 0 < accepted < drafted, "right and wrong drafts"
    expected = texts_of(model, SamplingParams(seed=0, **values))
    assert seen.keys() <= expected.keys()
    # neighbors by probability make one class until it is expected often enough
    classes, mean, count = list[tuple[float, int]](), 0.0, 0
    for text, share in sorted(expected.items(), key=lambda item: -item[1]):
        mean, count = mean + COUNT * share, count + seen.get(text, 0)
        if mean > 6:
            classes.append((mean, count))
            mean, count = 0.0, 0
    last_mean, last_count = classes.pop()
    classes.append((last_mean + mean, last_count + count))
    statistic = sum((count - mean) ** 2 / mean for mean, count in classes)
    freedom = len(classes) - 1
    assert freedom > 3
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def texts_of(model: Any, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each text of four tokens."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        starts = [*texts]
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *start] for start in starts])).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for start, row in zip(starts, logits.numpy(), strict=True):
            shares = distribution(row, list(start), params)
            longer |= {
                (*own, int(token)): texts[own] * float(shares[token])
                for own, token in product([start], np.flatnonzero(shares))
            }
        texts = longer
    return texts
