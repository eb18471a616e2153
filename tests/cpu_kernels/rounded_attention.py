"""A reference of attention whose scores and probabilities are rounded where a graph casts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
NEAR = 2.0**-18
"""Relative distance from a tie below which a probability may round either way, as exponentials are not exact."""


FUSED = 2.0**-22
"""The same of a score, whose scale and mask may be one fused multiply-add or two roundings."""


def small_integers(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    """Elements of -1, 0 and 1, whose sums of products are exact in every float dtype."""
    return rng.integers(-1, 2, shape).astype(dtype)


def picks(rng: np.random.Generator, dtype: Any, keys: int, width: int) -> Array:
    """Values `[keys, width]` of zeros and at most one 1 a column, so that results are single probabilities."""
    values = np.zeros((keys, width), dtype)
    columns = min(keys, width)
    values[rng.permutation(keys)[:columns], np.arange(columns)] = 1
    return values


def attended(
    operands: Sequence[Array],
    scale: float,
    fills: Sequence[float | None],
    roundings: Sequence[Any],
) -> tuple[Array, Array]:
    """The result in float64, and its tolerance where probabilities are near a tie.

    Args:
        operands: Queries `[…, rows, size]`, keys `[…, keys, size]`, values, and masks.
        scale: The factor of scores.
        fills: For each mask None if it is added, else the score where it is false.
        roundings: NumPy dtypes, or None: of the scaled scores, of the scores after each mask, of the probabilities.
    """
    q, keys, values, *masks = operands

    def rounded(x: Array, dtype: Any) -> Array:
        return x if dtype is None else x.astype(dtype).astype(x.dtype)

    scores = q.astype(np.float32) @ np.swapaxes(keys, -1, -2).astype(np.float32)
    scores = scores * np.float32(scale)
    # how far a score moves if it is rounded to the other side of a tie
    moves = np.zeros(scores.shape)

    def rounded_scores(scores: Array, dtype: Any) -> Array:
        sides = (rounded(scores * np.float32(1 + by), dtype) for by in (-FUSED, FUSED))
        low, high = (np.nan_to_num(side.astype(np.float64)) for side in sides)
        if dtype is not None:
            moves[...] += np.abs(high - low)
        return rounded(scores, dtype)

    scores = rounded_scores(scores, roundings[0])
    for mask, fill, dtype in zip(masks, fills, roundings[1:-1], strict=True):
        if fill is None:
            scores = scores + mask.astype(np.float32)
        else:
            scores = np.where(mask, scores, np.float32(fill))
        scores = rounded_scores(scores, dtype)
    wide = scores.astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp(wide - wide.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True)
    low, middle, high = (rounded(exact * (1 + by), roundings[-1]) for by in (-NEAR, 0, NEAR))
    values = values.astype(np.float64)
    # a score that moves by d changes its weight by the factor e^d, and the sum of all weights
    moved = exact * np.expm1(moves + (exact * moves).sum(-1, keepdims=True))
    slack = (high - low + NEAR * exact + moved) @ np.abs(values)
    return middle @ values, slack


def assert_attended(got: Array, want: Array, slack: Array) -> None:
    """Compares a result with that of `attended`, rounded to the dtype of the result."""
    bounds = [(want + by * slack).astype(got.dtype).astype(np.float64) for by in (-1, 1)]
    wide = got.astype(np.float64)
    wrong = ~((bounds[0] <= wide) & (wide <= bounds[1]) | np.isnan(want) & np.isnan(wide))
    assert not wrong.any(), (
        f"{wrong.mean():.1%}: {wide[wrong][:4]}, expected {want[wrong][:4]} ± {slack[wrong][:4]}"
    )
