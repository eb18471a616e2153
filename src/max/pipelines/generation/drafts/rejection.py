"""Rejection sampling of drafted tokens (https://arxiv.org/abs/2211.17192), which keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import SamplingParams
from max.pipelines.sampling.inputs import step_seed

__all__ = ["LEAST_LOGIT", "kept_tokens", "pad_rows", "sampled_logits", "softmax", "uniform_numbers"]

LEAST_LOGIT = -1e30
"""The logit of a token that is not sampled; finite, so that no difference of logits is NaN."""

Probabilities = npt.NDArray[np.floating[Any]]


def sampled_logits(
    logits: npt.NDArray[np.float32], params: Sequence[SamplingParams]
) -> npt.NDArray[np.float32]:
    """Logits whose softmax is the distribution that requests sample from.

    Args:
        logits: ``[rows, vocab]``, those of a model.
        params: The sampling parameters of each row: temperature, top_k, top_p and min_p, applied in this order.

    Returns:
        ``[rows, vocab]``; a token that is not sampled has `LEAST_LOGIT`. A greedy row has one other token.
    """
    rows = np.where(np.isnan(logits), LEAST_LOGIT, logits).astype(np.float64)
    sampled = np.full(rows.shape, LEAST_LOGIT, np.float32)
    for scores, own, out in zip(rows, params, sampled, strict=True):
        if own.temperature == 0 or own.top_k == 1:
            out[np.argmax(scores)] = 0
            continue
        scores = (scores - scores.max()) / own.temperature
        weights = np.exp(scores)
        order = np.argsort(-scores, kind="stable")
        if own.top_k > 0:
            order = order[: own.top_k]
        if own.top_p < 1:
            total = np.cumsum(weights[order])
            # the smallest set of the likeliest tokens whose probability reaches top_p
            order = order[: np.count_nonzero(total < own.top_p * total[-1]) + 1]
        # weights are relative to the likeliest token, whose weight is 1
        order = order[weights[order] >= own.min_p]
        out[order] = scores[order]
    return sampled


def kept_tokens(
    drafted_tokens: Sequence[int],
    draft: Probabilities,
    target: Probabilities,
    uniform: npt.NDArray[np.floating[Any]],
) -> tuple[int, list[int]]:
    """Decides how many drafted tokens of a request are kept.

    A token with the probability ``p`` in the target and ``q`` in the draft is kept with the probability ``min(p / q,
    1)``. In place of the first other one a token of the distribution ``max(p - q, 0)`` is taken; after the last one, a
    token of the target.

    Args:
        drafted_tokens: The drafted tokens, sampled from `draft`.
        draft: The probabilities of the draft ``[steps, vocab]``.
        target: Those of the target ``[steps + 1, vocab]``.
        uniform: Random numbers in [0, 1), ``[steps + 1, 2]``.

    Returns:
        The number of kept tokens, and the token that would take the place of each drafted one, and then the one after
        all of them.
    """
    count, replacements = len(drafted_tokens), list[int]()
    # backward, so that the first rejected token is the last to be noted
    for step in reversed(range(len(drafted_tokens))):
        p, q, token = target[step], draft[step], drafted_tokens[step]
        # kept with the probability min(1, p / q)
        if not uniform[step, 0] * q[token] < p[token]:
            count = step
        # of a rejected token the distribution is max(p - q, 0), scaled to 1
        rest = np.maximum(p - q, 0)
        # equal distributions reject nothing, so that any distribution is valid
        replacements.append(_inverse(rest if rest.sum() > 0 else p, uniform[step, 1]))
    replacements.reverse()
    return count, [*replacements, _inverse(target[-1], uniform[-1, 1])]


def _inverse(weights: Probabilities, uniform: float) -> int:
    """The token at a share of the sum of weights."""
    total = np.cumsum(weights, dtype=np.float64)
    return int(np.count_nonzero(total <= uniform * total[-1]))


def softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The probabilities of logits.

    Args:
        logits: ``[…, vocab]``.
    """
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def pad_rows(rows: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Rows with zeros at their ends, as a draft model may have fewer tokens.

    Args:
        rows: ``[rows, n]``.
        width: The length of the result's rows.
    """
    return np.pad(rows, ((0, 0), (0, width - rows.shape[-1])))


def uniform_numbers(seed: int, position: int) -> tuple[float, float]:
    """Two random numbers in [0, 1) for a position of a request, apart from the one that samples its token.

    Args:
        seed: The seed of the request.
        position: The position of the token.
    """
    first, second = (
        step_seed(seed ^ 0x5DEECE66D, position),
        step_seed(seed ^ 0x2545F4914F6C, position),
    )
    return (first >> 11) / 2**53, (second >> 11) / 2**53
