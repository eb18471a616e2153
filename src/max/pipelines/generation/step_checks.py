"""Checks of the results of a step."""

from __future__ import annotations

from max.interfaces import GenerationStatus, TextGenerationContext
from max.pipelines.core.context import TextContext
from max.pipelines.core.exceptions import NotFiniteError

__all__ = ["fail_without_logits"]


def fail_without_logits(context: TextGenerationContext) -> None:
    """Ends a request with an error, as its logits are all NaN: sampling gave a negative token.

    Args:
        context: The request; it gets status ``CANCELLED`` and a ``failure``.

    Raises:
        NotFiniteError: The context has no field for an error.
    """
    error = NotFiniteError(
        f"the logits after token {context.current_length} of request {context.request_id} are all NaN"
    )
    if not isinstance(context, TextContext):
        raise error
    context.status, context.failure = GenerationStatus.CANCELLED, error
