"""Checks of the results of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from max.driver import CPU
from max.interfaces import GenerationStatus, TextGenerationContext
from max.pipelines.core.context import TextContext
from max.pipelines.core.exceptions import NotFiniteError
from max.pipelines.generation.step_log_probabilities import last_logits
from max.pipelines.models.inputs import ModelOutputs

__all__ = ["fail_without_logits"]


def fail_without_logits(
    outputs: ModelOutputs, batch: Sequence[TextGenerationContext], tokens: npt.NDArray[np.int64]
) -> None:
    """Ends with an error the requests whose logits are all NaN, as no token can be chosen from them.

    Sampling ignores NaN and chooses token 0 if no other value is left, so only rows with token 0 are checked.

    Args:
        outputs: The outputs of the step.
        batch: The requests; those whose logits are all NaN get status ``CANCELLED`` and a ``failure``.
        tokens: The chosen tokens, ``[batch]``.

    Raises:
        NotFiniteError: The context of such a request has no field for an error.
    """
    if tokens.all():
        return
    logits = last_logits(outputs).to(CPU()).to_numpy()
    for row in np.flatnonzero(tokens == 0).tolist():
        if not np.isnan(logits[row]).all():
            continue
        context = batch[row]
        error = NotFiniteError(
            f"the logits after token {context.current_length} of request {context.request_id} are all NaN"
        )
        if not isinstance(context, TextContext):
            raise error
        context.status, context.failure = GenerationStatus.CANCELLED, error
