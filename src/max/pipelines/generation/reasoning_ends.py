"""Ends a reasoning section whose budget is used up: closing tokens replace the tokens that the model chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from max.interfaces import TextGenerationContext
from max.pipelines.core.context import TextContext
from max.pipelines.core.reasoning import ReasoningLimit
from max.pipelines.tokenization.tokenizer import TextTokenizer

__all__ = ["reasoning_limit", "with_ended_reasoning"]


def reasoning_limit(context: TextGenerationContext) -> ReasoningLimit | None:
    """The limit on the reasoning of a request; contexts of other classes have no limit."""
    return context.reasoning_limit if isinstance(context, TextContext) else None


def with_ended_reasoning(
    chosen: npt.NDArray[np.int64],
    batch: Sequence[TextGenerationContext],
    tokenizer: object,
) -> npt.NDArray[np.int64]:
    """The tokens of a step, with closing tokens in place of the chosen ones if a reasoning budget is used up.

    Args:
        chosen: The tokens that the model chose, ``[batch]``.
        batch: The requests.
        tokenizer: The requests' tokenizer; it must be a `TextTokenizer` if any reasoning has a budget.

    Returns:
        The same array, or a copy if a token was replaced, as the model's own tensor must not change.
    """
    forced: dict[int, int] = {}
    for row, context in enumerate(batch):
        limit = reasoning_limit(context)
        if limit is None or context.active_idx < context.end_idx:
            continue
        generated = context.generated_tokens.tolist()
        token = limit.forced_token(generated, cast(TextTokenizer, tokenizer).decode_now)
        if token is not None and token != chosen[row]:
            forced[row] = token
    if not forced:
        return chosen
    tokens = chosen.copy()
    tokens[list(forced)] = list(forced.values())
    return tokens
