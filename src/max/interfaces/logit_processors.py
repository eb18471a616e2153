"""What a logits processor is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from max.interfaces.text_generation import TextGenerationContext


@dataclass
class ProcessorInputs:
    """What a logits processor of one request is given.

    Args:
        logits: Logits of this request, a float32 ``max.driver.Tensor`` of shape ``[n, vocab]``,
            on the host; the processor changes it in place.
        context: The request's state.
    """

    logits: Any
    context: TextGenerationContext


@dataclass
class BatchProcessorInputs:
    """What a logits processor of a whole batch is given.

    Args:
        logits: Logits, a float32 ``max.driver.Tensor`` of shape ``[n_batch, vocab]``.
        logit_offsets: Where each request's rows begin, shape ``[batch + 1, 1]``; None where there
            is one row a request.
        context_batch: The requests, in the batch's order.
    """

    logits: Any
    logit_offsets: Any | None
    context_batch: Sequence[TextGenerationContext]


LogitsProcessor: TypeAlias = Callable[[ProcessorInputs], None]
BatchLogitsProcessor: TypeAlias = Callable[[BatchProcessorInputs], None]
