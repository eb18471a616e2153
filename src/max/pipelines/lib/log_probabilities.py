"""Log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import LogProbabilities

Floats = npt.NDArray[np.floating[Any]]


def log_softmax(logits: Floats) -> npt.NDArray[np.float32]:
    """The log-probabilities of rows of logits.

    Args:
        logits: ``[rows, vocab]``.
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.sum(np.exp(shifted, dtype=np.float64), axis=-1, keepdims=True))
    return (shifted - total).astype(np.float32)


def of_rows(logits: Floats, tokens: Sequence[int], top_n: int) -> LogProbabilities:
    """The log-probabilities of one token a row, and the likeliest ones of each row.

    Args:
        logits: ``[rows, vocab]``.
        tokens: The token of each row.
        top_n: How many of the likeliest; the row's own token is always among what is returned.
    """
    logs = log_softmax(logits)
    own: list[float] = []
    top: list[dict[int, float]] = []
    for row, token in zip(logs, tokens, strict=True):
        own.append(float(row[token]))
        # of equal ones the lower token comes first, as in sampling
        likeliest = np.argsort(-row, kind="stable")[:top_n].tolist()
        top.append({int(t): float(row[t]) for t in dict.fromkeys([*likeliest, token])})
    return LogProbabilities(own, top)
