"""Checks of what a model has computed in a step."""

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
    """Ends the requests whose logits are all NaN with an error, as no token can be chosen from them.

    Sampling ignores NaN, and takes token 0 if nothing else is left: only the logits of rows with token 0 are read.

    Args:
        outputs: The outputs of the step.
        batch: The requests; those without logits get status ``CANCELLED`` and a ``failure``.
        tokens: The chosen tokens, ``[batch]``.

    Raises:
        NotFiniteError: A context of such a request cannot hold an error.
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
