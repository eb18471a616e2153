"""The state of one request, from its prompt to its last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._lazy import lazy_module
from max.interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestID,
    SamplingParams,
    TextGenerationOutput,
)
from max.pipelines.core.draft_tree import chain_of, checked_parents
from max.pipelines.core.exceptions import InputError, check_prompt
from max.pipelines.core.log_probabilities import KeptLogProbabilities
from max.pipelines.core.reasoning import ReasoningBudget, ReasoningLimit
from max.pipelines.core.token_counts import TokenCounts

if TYPE_CHECKING:
    from max.pipelines.core import predicted_text
else:
    predicted_text = lazy_module("max.pipelines.core.predicted_text")

CHUNK_SIZE = 128
"""The token array grows in multiples of this."""

Tokens = npt.NDArray[np.integer[Any]]


@dataclass(kw_only=True)
class TextContext:
    """The state of one request for text.

    Its array of tokens, and the three indices into it::

        |  in the KV cache   |   next to process   |  later chunks of the prompt  |  room  |
        0              start_idx              active_idx                       end_idx

    Args:
        max_length: The most tokens of the sequence, the prompt included.
        tokens: The prompt, 1-d, an array or what becomes one; copied.
        request_id: Identifies the request.
        eos_token_ids: Tokens that end the sequence.
        eos_sequences: Sequences of tokens that end the sequence.
        log_probabilities: The number of top log-probabilities per token; 0 for none.
        log_probabilities_echo: Whether to return the prompt's log-probabilities too.
        ignore_eos: Whether to continue after one of ``eos_token_ids``.
        json_schema: The schema that the text must match.
        grammar: The grammar that the text must match (``max.pipelines.structured``).
        reasoning_budget: How long the answer may reason; None: as long as it does.
        sampling_params: How tokens are chosen.
        model_name: The name of the requested model.
        status: The state of the generation.
        target_endpoint: The instance that answers.
        cache_salt: Requests share cached prefixes only if theirs are equal.
        adapter: Identifies the weights that are added to the model's, equal for equal weights only; empty: none. Before
            an engine has the request, the name of the adapter.
        adapter_scale: The factor of these weights.
        logged_tokens: Tokens whose log-probabilities are returned besides the top ones, if there are top ones.
        reusable_tokens: The number of first tokens that later requests may find in the cache; None: all.
        prediction: The text that the answer may have, a source of drafts; None: nothing is known of it.

    Raises:
        InputError: The prompt is empty, not 1-d, or leaves no room for a new token.
    """

    max_length: int
    tokens: Tokens
    request_id: RequestID = field(default_factory=RequestID)
    eos_token_ids: set[int] = field(default_factory=set)
    eos_sequences: list[list[int]] = field(default_factory=list)
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    model_name: str = ""
    _matcher: Any | None = None
    status: GenerationStatus = GenerationStatus.ACTIVE
    _size: int = -1
    _start_idx: int = 0
    _active_idx: int = -1
    _end_idx: int = -1
    _completion_start_idx: int = -1
    _completion_end_idx: int = -1
    _prompt_len: int = -1
    _log_probabilities_data: dict[int, LogProbabilities] = field(default_factory=dict)
    _is_initial_prompt: bool = True
    _draft_offset: int = 0
    target_endpoint: str | None = None
    grammar: str | None = None
    reasoning_budget: ReasoningBudget | None = None
    _reasoning_limit: ReasoningLimit | None = None
    cache_salt: str = ""
    adapter: str = ""
    adapter_scale: float = 1.0
    _draft_tokens: tuple[int, ...] = ()
    failure: Exception | None = None
    """The error that has ended the generation."""
    _truncations: int = 0
    _jumped_tokens: int = 0
    """The number of last tokens that needed no step, and are processed with the one before them."""
    logged_tokens: tuple[int, ...] = ()
    reusable_tokens: int | None = None
    prediction: predicted_text.PredictedText | None = None
    _draft_parents: tuple[int, ...] = ()
    """Of a draft that is no chain (`max.pipelines.core.draft_tree`)."""
    _log_probabilities: KeptLogProbabilities = field(init=False)
    token_counts: TokenCounts = field(default_factory=TokenCounts, init=False, compare=False)

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.tokens)
        self._log_probabilities = KeptLogProbabilities(self._log_probabilities_data)
        if self.reasoning_budget is not None and self._reasoning_limit is None:
            self._reasoning_limit = ReasoningLimit(self.reasoning_budget)
        if self.tokens.ndim != 1:
            raise InputError(
                f"the prompt's tokens have shape {self.tokens.shape}; expected one dimension"
            )
        if self._end_idx < 0:  # a context from another process has its indices
            self._end_idx = len(self.tokens)
        if self._active_idx < 0:
            self._active_idx = self._end_idx
        if self._prompt_len < 0:
            self._prompt_len = self._end_idx
        if self._completion_start_idx < 0:
            self._completion_start_idx = self._prompt_len
        if self._completion_end_idx < 0:
            self._completion_end_idx = self._prompt_len
        if self.tokens.size == 0 or self._prompt_len >= self.max_length:
            check_prompt(self._prompt_len if self.tokens.size else 0, self.max_length)
        self._grow(self._end_idx)
        self._check()

    def _grow(self, length: int) -> None:
        """Grows the array to at least `length` tokens."""
        # the array has no room, or is one that a caller gave
        if len(self.tokens) < length or self._size < 0 or self.tokens.dtype != np.int64:
            size = -(-length // CHUNK_SIZE) * CHUNK_SIZE
            room = np.zeros(max(size, self._size), np.int64)
            room[: self._end_idx] = self.tokens[: self._end_idx]
            self.tokens, self._size = room, len(room)

    def _check(self) -> None:
        """Raises ValueError unless the indices are in order."""
        if not 0 <= self._start_idx < self._active_idx <= self._end_idx <= self._size:
            raise ValueError(
                f"request {self.request_id}: indices start {self._start_idx}, active "
                f"{self._active_idx}, end {self._end_idx}, size {self._size}; expected "
                "0 <= start < active <= end <= size"
            )

    @property
    def start_idx(self) -> int:
        """The first token of the next step: all tokens before it are in the KV cache."""
        return self._start_idx

    @property
    def active_idx(self) -> int:
        """One past the last token of the next step."""
        return self._active_idx

    @property
    def end_idx(self) -> int:
        """One past the last token."""
        return self._end_idx

    @property
    def active_length(self) -> int:
        """The number of tokens of the next step: a prompt's or chunk's length, then 1, or more with a draft."""
        return self._active_idx - self._start_idx + len(self._draft_tokens)

    @property
    def current_length(self) -> int:
        """The number of tokens so far: prompt and generated, processed or not."""
        return self._end_idx

    @property
    def all_tokens(self) -> Tokens:
        """Prompt and generated tokens."""
        return self.tokens[: self._end_idx]

    @property
    def next_tokens(self) -> Tokens:
        """The tokens of the next step, from ``start_idx`` to ``active_idx``, and its draft after them."""
        tokens = self.tokens[self._start_idx : self._active_idx]
        return np.append(tokens, self._draft_tokens) if self._draft_tokens else tokens

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        """The drafted tokens that the next step verifies: they may follow those of ``all_tokens``."""
        return self._draft_tokens

    @property
    def draft_parents(self) -> tuple[int, ...]:
        """The index of the drafted token before each drafted one; -1: the last token of ``all_tokens``."""
        return self._draft_parents or chain_of(len(self._draft_tokens))

    @property
    def truncations(self) -> int:
        """How often tokens were removed from the end of the text."""
        return self._truncations

    @property
    def draft_length(self) -> int:
        """The number of drafted tokens."""
        return len(self._draft_tokens)

    @property
    def prompt_tokens(self) -> Tokens:
        """The prompt of the request."""
        return self.tokens[: self._prompt_len]

    @property
    def generated_tokens(self) -> Tokens:
        """The generated tokens: from the prompt's end to ``end_idx``."""
        return self.tokens[self._prompt_len : self._end_idx]

    @property
    def needs_ce(self) -> bool:
        """Whether tokens of the prompt, or of a reset, are still to be processed."""
        # tokens that a grammar forced are processed with the one before them
        left = self._end_idx - self._start_idx - self._jumped_tokens
        return self._start_idx < self._prompt_len or left > 1

    @property
    def is_initial_prompt(self) -> bool:
        """Whether no token was generated since the prompt (or since :meth:`reset`)."""
        return self._is_initial_prompt

    @property
    def is_done(self) -> bool:
        """Whether the generation has ended."""
        return self.status.is_done

    @property
    def min_tokens(self) -> int:
        """The least number of new tokens before the end of the sequence."""
        return self.sampling_params.min_new_tokens

    @property
    def matcher(self) -> Any | None:
        """The grammar matcher that constrains the text to a schema."""
        return self._matcher

    @property
    def reasoning_limit(self) -> ReasoningLimit | None:
        """Names the tokens that end the reasoning where its budget is used up."""
        return self._reasoning_limit

    def set_matcher(self, matcher: object) -> None:
        """Sets the grammar matcher.

        Args:
            matcher: It determines which tokens may follow.
        """
        self._matcher = matcher

    def get_last_generated_token(self) -> int:
        """The newest token.

        Raises:
            ValueError: Nothing was generated yet.
        """
        if self._end_idx == self._prompt_len:
            raise ValueError(f"request {self.request_id}: nothing was generated yet")
        return int(self.tokens[self._end_idx - 1])

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """The tokens that are forbidden before ``min_tokens``: the ones that end the sequence.

        Args:
            num_steps: The number of steps.

        Returns:
            An array ``[n, 2]`` of (row, token) per step; the row is 0.
        """
        generated = self._end_idx - self._prompt_len
        eos = sorted(self.eos_token_ids)
        banned = np.zeros((len(eos), 2), np.int32)
        banned[:, 1] = eos  # [n, 2]: row 0, token
        free = np.zeros((0, 2), np.int32)
        return [banned if generated + i < self.min_tokens else free for i in range(num_steps)]

    def bump_token_indices(self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0) -> None:
        """Moves the indices.

        Args:
            start_idx: The increment of ``start_idx``.
            active_idx: The increment of ``active_idx``.
            end_idx: The increment of ``end_idx``.

        Raises:
            ValueError: The indices would be out of order; they stay unchanged.
        """
        self.set_token_indices(
            self._start_idx + start_idx, self._active_idx + active_idx, self._end_idx + end_idx
        )

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
    ) -> None:
        """Sets indices; ``None`` leaves one as it is.

        Args:
            start_idx: The new ``start_idx``.
            active_idx: The new ``active_idx``.
            end_idx: The new ``end_idx``.

        Raises:
            ValueError: The indices would be out of order; they stay unchanged.
        """
        before = self._start_idx, self._active_idx, self._end_idx
        self._start_idx = before[0] if start_idx is None else start_idx
        self._active_idx = before[1] if active_idx is None else active_idx
        self._end_idx = before[2] if end_idx is None else end_idx
        try:
            self._check()
        except ValueError:
            self._start_idx, self._active_idx, self._end_idx = before
            raise

    def set_draft(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Sets the tokens that the next step verifies; the next :meth:`update`, :meth:`truncate` or :meth:`reset` drops
        them.

        Args:
            tokens: The tokens; none: the next step gives one token.
            parents: As `draft_parents`; None: each token follows the one before it.

        Raises:
            ValueError: The next step ends before the end of the prompt, the sequence has no room for the tokens and for
                one more, or the parents are none of a tree, or of one with too many rows.
        """
        room = self.max_length - self._end_idx - 1  # the step gives one token besides
        if tokens and (self._active_idx < self._end_idx or len(tokens) > room):
            raise ValueError(
                f"request {self.request_id}: {len(tokens)} drafted tokens after token {self._active_idx} of "
                f"{self._end_idx}; expected at most {room}, after the last token"
            )
        own: tuple[int, ...] = ()
        if parents is not None:
            certain = self._active_idx - self._start_idx
            own = checked_parents(tokens, parents, certain, f"request {self.request_id}")
        self._draft_tokens, self._draft_parents = tuple(tokens), own

    def truncate(self, length: int) -> None:
        """Removes the last tokens, such as those that another process has refused; the generation goes on before them.

        The last remaining token is processed again, as its logits are needed. The matcher is made anew from the
        grammar, log-probabilities of removed tokens are dropped, and the reasoning budget counts the tokens that are
        left. `RequestPages.truncate` also removes the tokens from the KV cache.

        Args:
            length: The number of tokens to keep; nothing happens if there are not more.

        Raises:
            ValueError: The prompt, or tokens that were returned already, would be removed; nothing was changed.
        """
        returned = max(self._prompt_len, self._completion_start_idx)  # clients have these
        if length < returned:
            raise ValueError(
                f"request {self.request_id}: {length} of {self._end_idx} tokens are to be kept; the prompt and the "
                f"tokens that were returned are {returned}"
            )
        if length >= self._end_idx:
            return
        self._truncations += 1
        self._jumped_tokens = 0
        self._log_probabilities.take(length, self._end_idx)
        self._start_idx = min(self._start_idx, length - 1)
        self._active_idx = self._end_idx = self._completion_end_idx = length
        self._draft_tokens = self._draft_parents = ()
        # the next step makes it anew from the tokens that are left
        self._matcher = None
        if self._reasoning_limit is not None:
            self._reasoning_limit.rewind(length - self._prompt_len)
        # the token that ended the sequence may be among the removed ones
        if self.status in (GenerationStatus.END_OF_SEQUENCE, GenerationStatus.MAXIMUM_LENGTH):
            self.status = GenerationStatus.ACTIVE

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Appends the token of a step, and sets the status if the sequence has ended.

        The token after a chunk of a prompt is dropped, as the chunk is not the prompt's end; the
        indices move to the remaining part of the prompt.

        Args:
            new_token: The token.
            log_probabilities: Its log-probabilities, if the request includes them; with echo, after those of the
                prompt or of the chunk.
        """
        self._draft_tokens = self._draft_parents = ()
        # after a chunk the prompt goes on, so that its token is dropped
        if self._active_idx < self._end_idx:
            if self.log_probabilities_echo and log_probabilities is not None:
                self._log_probabilities.add_chunk(log_probabilities)
            self._start_idx, self._active_idx = self._active_idx, self._end_idx
            return
        self._append(new_token, log_probabilities)
        self._jumped_tokens = 0
        self._start_idx, self._active_idx = self._active_idx, self._end_idx

    def jump_ahead(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Appends a token that needs no step, for example a token that a grammar forces.

        It is part of the output, and is processed in the next step.

        Args:
            new_token: The token.
            log_probabilities: As of :meth:`update`.
        """
        if self._active_idx < self._end_idx:
            raise ValueError(f"request {self.request_id}: jump_ahead amid chunks of the prompt")
        self._append(new_token, log_probabilities)
        self._jumped_tokens += 1
        self._active_idx = self._end_idx

    def _append(self, token: int, log_probabilities: LogProbabilities | None) -> None:
        """Adds a token with its log-probabilities, and updates the status."""
        if len(self.tokens) <= self._end_idx:
            self._grow(self._end_idx + 1)
        self.tokens[self._end_idx] = token
        if log_probabilities is not None:
            self._log_probabilities.add(self._end_idx, log_probabilities)
        self._end_idx += 1
        self._completion_end_idx = self._end_idx
        self._is_initial_prompt = False
        if self._ends_with(token):
            self.status = GenerationStatus.END_OF_SEQUENCE
        elif self._end_idx >= self.max_length:
            self.status = GenerationStatus.MAXIMUM_LENGTH

    def _ends_with(self, token: int) -> bool:
        """Whether a token that was just added ends the sequence."""
        if self._end_idx - self._prompt_len < self.sampling_params.min_new_tokens:
            return False
        if token in self.eos_token_ids and not self.ignore_eos:
            return True
        if not self.eos_sequences:
            return False
        # an empty sequence is none: there is at least one generated token
        generated = self.generated_tokens
        return any(generated[-len(run) :].tolist() == run for run in self.eos_sequences)

    def reset(self) -> None:
        """Turns all tokens into a prompt to process again, after the request lost its cache pages."""
        self._start_idx, self._active_idx = 0, self._end_idx
        self._is_initial_prompt, self._jumped_tokens = True, 0
        self._draft_tokens = self._draft_parents = ()
        self._log_probabilities.forget_chunks()

    def resume(self, tokens: Sequence[int]) -> None:
        """Goes on with an answer that another process has begun: its tokens are processed with the prompt, and not
        returned again.

        Args:
            tokens: The tokens of the answer so far; none: nothing happens.

        Raises:
            ValueError: Tokens were generated here, or the tokens end the answer.
        """
        if not tokens:
            return
        if self._end_idx > self._prompt_len:
            raise ValueError(f"request {self.request_id}: tokens were generated already")
        for token in tokens:
            if self.is_done:
                break
            self._append(token, None)
        if self.is_done:
            raise ValueError(
                f"request {self.request_id}: the {len(tokens)} tokens to go on after end the answer"
            )
        self._completion_start_idx = self._end_idx
        self.reset()
        if self._reasoning_limit is not None:
            self._reasoning_limit.rewind(len(tokens))  # found anew

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """The number of tokens that can be generated before the sequence is full.

        Args:
            max_seq_len: The longest sequence.
        """
        return max_seq_len - self.current_length

    def to_generation_output(self) -> TextGenerationOutput:
        """The tokens since the last call."""
        begin, end = self._completion_start_idx, self._completion_end_idx
        self._completion_start_idx = end
        return TextGenerationOutput(
            request_id=self.request_id,
            tokens=self.tokens[begin:end].tolist(),
            final_status=self.status,
            log_probabilities=self._log_probabilities.take(begin, end) or None,
        )
