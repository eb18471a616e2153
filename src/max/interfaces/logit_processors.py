"""The arguments of logits processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from max.interfaces.text_generation import TextGenerationContext


@dataclass
class ProcessorInputs:
    """The arguments of a logits processor of one request.

    Args:
        logits: Logits of this request, a float32 ``max.driver.Tensor`` of shape ``[n, vocab]``,
            on the host; the processor changes it in place.
        context: The request's state.
    """

    logits: Any
    context: TextGenerationContext


@dataclass
class BatchProcessorInputs:
    """The arguments of a logits processor of a batch.

    Args:
        logits: Logits, a float32 ``max.driver.Tensor`` of shape ``[n_batch, vocab]``.
        logit_offsets: The first row of each request, then the number of rows, shape ``[batch + 1, 1]``; None if each
            request has one row.
        context_batch: The requests, in the order of the batch.
    """

    logits: Any
    logit_offsets: Any | None
    context_batch: Sequence[TextGenerationContext]


LogitsProcessor: TypeAlias = Callable[[ProcessorInputs], None]
BatchLogitsProcessor: TypeAlias = Callable[[BatchProcessorInputs], None]
