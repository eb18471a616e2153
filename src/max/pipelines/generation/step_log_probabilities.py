"""The log-probabilities of the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Tensor
from max.interfaces import LogProbabilities, TextGenerationContext
from max.pipelines.generation.prompt_logits import wants_prompt_logits
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.sampling.log_probabilities import of_rows

__all__ = ["last_logits", "log_probabilities_of_step"]


def last_logits(outputs: ModelOutputs) -> Tensor:
    """The logits of the last token of each request, ``[batch, vocab]``."""
    return outputs.logits if outputs.next_token_logits is None else outputs.next_token_logits


def log_probabilities_of_step(
    outputs: ModelOutputs, batch: Sequence[TextGenerationContext], tokens: npt.NDArray[np.int64]
) -> list[LogProbabilities | None]:
    """The log-probabilities of the tokens of a step; with echo, preceded by those of the prompt.

    Args:
        outputs: The outputs of the step.
        batch: The requests.
        tokens: The chosen tokens, ``[batch]``.

    Returns:
        The log-probabilities of each request; None for requests without log-probabilities.

    Raises:
        ValueError: A request includes log-probabilities of its prompt, but the model does not return these logits.
    """
    last = last_logits(outputs).to(CPU()).to_numpy()
    entries: list[LogProbabilities | None] = []
    offsets = None if outputs.logit_offsets is None else outputs.logit_offsets.to(CPU()).to_numpy()
    for row, context in enumerate(batch):
        if not context.log_probabilities:
            entries.append(None)
            continue
        rows, chosen = last[row : row + 1], [int(tokens[row])]
        if wants_prompt_logits(context):
            if offsets is None:
                raise ValueError(
                    "echo needs the logits of the prompt, which the model does not return"
                )
            rows = outputs.logits.to(CPU()).to_numpy()[int(offsets[row]) : int(offsets[row + 1])]
            if (
                context.active_idx < context.end_idx
            ):  # a chunk, which the prompt's next token follows
                chosen = [int(context.all_tokens[context.active_idx])]
            chosen = [*context.next_tokens[1:].tolist(), *chosen]
        entries.append(of_rows(rows, chosen, context.log_probabilities))
    return entries
