"""The tokens of a step: forced ones, missing ones, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.driver import CPU, Tensor
from max.interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestID,
    TextGenerationContext,
    TextGenerationOutput,
)
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.exceptions import NotFiniteError
from max.pipelines.core.reasoning import ReasoningLimit
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.steps.prompt_logits import wants_prompt_logits
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.sampling.sampler import changes_logits
from max.pipelines.structured.constraint import Constraints
from max.pipelines.tokenization.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from max.pipelines.sampling import log_probabilities
else:
    log_probabilities = lazy_module("max.pipelines.sampling.log_probabilities")

__all__ = [
    "append_tokens",
    "bounded_steps",
    "fail_without_logits",
    "jumps_ahead",
    "last_logits",
    "log_probabilities_of_step",
    "reasoning_limit",
    "steps_with_room",
    "with_closing_tokens",
]


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
        rows, chosen = last[row : row + 1], [int(tokens[row])]  # [1, vocab]
        if wants_prompt_logits(context):
            if offsets is None:
                raise ValueError(
                    "echo needs the logits of the prompt, which the model does not return"
                )
            rows = outputs.logits.to(CPU()).to_numpy()[int(offsets[row]) : int(offsets[row + 1])]
            # a chunk, which the prompt's next token follows
            if context.active_idx < context.end_idx:
                chosen = [int(context.all_tokens[context.active_idx])]
            # row i of a prompt predicts its token i + 1
            chosen = [*context.next_tokens[1:].tolist(), *chosen]
        logged = getattr(context, "logged_tokens", ())
        entries.append(log_probabilities.of_rows(rows, chosen, context.log_probabilities, logged))
    return entries


def reasoning_limit(context: TextGenerationContext) -> ReasoningLimit | None:
    """The limit on the reasoning of a request; contexts of other classes have no limit."""
    return context.reasoning_limit if isinstance(context, TextContext) else None


def steps_with_room(
    num_steps: int, context: TextGenerationContext, longest: int, later: int = 0
) -> int:
    """The number of steps for which a request has room, at least 1.

    Args:
        num_steps: The maximum.
        context: The request.
        longest: The number of tokens that the context of the model holds.
        later: The number of tokens that follow the steps.

    Raises:
        ValueError: There is no room for a token.
    """
    left = context.compute_num_available_steps(longest) - later
    if left <= 0:
        raise ValueError(
            f"request {context.request_id} has {context.current_length} tokens, and the context holds {longest}"
        )
    return min(num_steps, left)


def bounded_steps(num_steps: int, context: TextGenerationContext, tokenizer: object) -> int:
    """The number of steps that a batch with a request can take in one call.

    Args:
        num_steps: The maximum.
        context: The request.
        tokenizer: Its tokenizer; it must be a `TextTokenizer` if any reasoning has a budget.
    """
    if num_steps > 1 and (
        context.active_idx < context.end_idx  # a chunk yields no token
        or changes_logits(context)  # penalties depend on every token
        or draft_length(context)  # the number of its tokens is known after the step
        or wants_prompt_logits(context)  # the steps after that of the prompt run on the other model
    ):
        num_steps = 1
    limit = reasoning_limit(context)
    if limit is None:
        return num_steps
    # the next steps sample with it, so it has to know where reasoning stands
    if limit.sets_temperature:
        limit.observe(*_answer_of(context, tokenizer))
    return limit.bounded_steps(num_steps, len(context.generated_tokens))


def with_closing_tokens(
    chosen_tokens: npt.NDArray[np.int64],
    batch: Sequence[TextGenerationContext],
    tokenizer: object,
) -> npt.NDArray[np.int64]:
    """The tokens of a step, with closing tokens in place of the chosen ones if a reasoning budget is used up.

    Args:
        chosen_tokens: The tokens that the model chose, ``[batch]``.
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
        token = limit.forced_token(*_answer_of(context, tokenizer))
        if token is not None and token != chosen_tokens[row]:
            forced[row] = token
    if not forced:
        return chosen_tokens
    tokens = chosen_tokens.copy()
    tokens[list(forced)] = list(forced.values())
    return tokens


def _answer_of(
    context: TextGenerationContext, tokenizer: object
) -> tuple[Sequence[int], Callable[[Sequence[int]], str]]:
    """The tokens of an answer, and what decodes a part of them: only that part becomes a list, of a long answer too."""
    decode = cast(TextTokenizer, tokenizer).decode_now
    return cast(Any, context.generated_tokens), lambda part: decode(cast(Any, part).tolist())


def append_tokens(
    batch: Sequence[TextGenerationContext],
    tokens: Sequence[Sequence[int]],
    logs: Sequence[Sequence[LogProbabilities | None]],
    constraints: Constraints,
    rewound: Container[RequestID] = (),
) -> dict[RequestID, TextGenerationOutput]:
    """Adds any number of tokens to each request, up to the end of its sequence, and collects the outputs.

    Args:
        batch: The requests.
        tokens: The new tokens of each request; a negative one ends its request with an error.
        logs: For each step, the log-probabilities of each request; empty: none.
        constraints: Advances the grammars of the requests.
        rewound: Requests whose recurrent states have gone back: their next step begins where this one did.
    """
    outputs: dict[RequestID, TextGenerationOutput] = {}
    for row, (context, row_tokens) in enumerate(zip(batch, tokens, strict=True)):
        jumps = jumps_ahead(context)
        # all are forced that may follow the prompt; later ones were appended with the token before them
        known = jumps and constraints.take_plain(context, row_tokens)
        first = constraints.forced_tokens(context)[:1] if jumps and not known else []
        for step, chosen in enumerate(row_tokens):
            if context.is_done:
                break
            if chosen < 0:
                fail_without_logits(context)
                break
            token = first[0] if first and step == 0 else chosen
            chunk = context.end_idx
            log = logs[step][row] if step < len(logs) else None
            if isinstance(context, TextContext) and context.request_id in rewound:
                context.set_draft(())
                context.jump_ahead(token, log)
            else:
                context.update(token, log)
            if known or context.end_idx == chunk:
                continue  # nothing to follow, or the token followed a chunk and was dropped
            constraints.advance(context, token)
            if jumps and _jump_ahead(context, constraints, row_tokens[step + 1 :], token != chosen):
                break
        outputs[context.request_id] = context.to_generation_output()
    return outputs


def jumps_ahead(context: TextGenerationContext) -> bool:
    """Whether tokens that its grammar forces are appended to a request without a step.

    Args:
        context: The request.
    """
    return (
        isinstance(context, TextContext)
        and context.matcher is not None
        and context.active_idx == context.end_idx
        # forced tokens have no log-probabilities, and functions of the caller see each token
        and not context.log_probabilities
        and not context.sampling_params.logits_processors
    )


def _jump_ahead(
    context: TextGenerationContext, constraints: Constraints, later: Sequence[int], replaced: bool
) -> bool:
    """Appends the tokens that the grammar of a request forces; False if those that follow are tokens of the step.

    Args:
        context: The request.
        constraints: The grammars.
        later: The tokens of the step that follow.
        replaced: Whether the last token is not the one of the step, so that these do not follow.
    """
    forced = [] if context.is_done else constraints.forced_tokens(context)
    if not replaced and (not forced or (later and later[0] == forced[0])):
        return False
    for token in forced:
        if context.is_done:
            break
        context.jump_ahead(token)
        constraints.advance(context, token)
    return True


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
