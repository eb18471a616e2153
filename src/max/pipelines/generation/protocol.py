"""The messages between the users of an engine and the process that runs it.

All messages are frozen dataclasses of numbers, strings and tuples: they can be pickled and encoded as msgpack, and
neither side depends on the state of the other. A conversation::

    engine -> EngineReady                         the model is loaded
    user   -> GenerationRequest, CancelRequest    at any time, from any thread
    engine -> PromptStarted                       per request: its first batch has begun
    engine -> TokensGenerated ...                 per request, in the order of its tokens
    engine -> TokensGenerated | RequestFailed     the last event of each request
    engine -> EngineStats                         at intervals, if the engine is configured to
    user   -> ForgetPrefixes
    engine -> PrefixesForgotten
    user   -> Shutdown
    engine -> EngineStopped                       the last event of all

The last event of a request is a :class:`TokensGenerated` whose status states why it ended, or a
:class:`RequestFailed`. A cancelled request ends with status ``CANCELLED``, unless it has ended before
the engine reads the cancellation. After :class:`EngineStopped` no request is open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import TypeAlias

import numpy as np

from max._dataclass import dataclass
from max.interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestID,
    SamplingParams,
    TextGenerationOutput,
)
from max.pipelines.core.context import TextAndVisionContext, TextContext
from max.pipelines.core.exceptions import (
    ConfigError,
    GrammarsWaitError,
    GrammarTooSlowError,
    InputError,
    ModelFilesError,
    NotFiniteError,
    UserError,
)
from max.pipelines.core.reasoning import ReasoningBudget

_USER_ERRORS: dict[str, type[UserError]] = {
    error.__name__: error
    for error in (
        UserError, InputError, ConfigError, ModelFilesError, NotFiniteError, GrammarTooSlowError, GrammarsWaitError,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen; the fields are those of ``SamplingParams``."""

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    ignore_eos: bool = False
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, params: SamplingParams) -> Sampling:
        """Extracts the fields of sampling parameters that an engine reads.

        Args:
            params: The parameters.

        Raises:
            ValueError: The parameters have logits processors, which are callables of this process.
        """
        if params.logits_processors:
            raise ValueError("logits processors cannot be sent to the process of an engine")
        values = {field.name: getattr(params, field.name) for field in fields(cls)}
        return cls(**{**values, "logit_bias": tuple((params.logit_bias or {}).items())})

    def to_params(self) -> SamplingParams:
        """Creates sampling parameters with these fields."""
        return SamplingParams(**{**asdict(self), "logit_bias": dict(self.logit_bias) or None})


@dataclass(frozen=True)
class GenerationRequest:
    """Requests tokens; the fields are those of ``TextContext``.

    Args:
        request_id: Identifies the request; no open request may have the same identifier.
        tokens: The prompt.
        max_length: The maximum number of tokens of the sequence, including the prompt.
        eos_token_ids: Tokens that end the sequence.
        eos_sequences: Token sequences that end the sequence.
        log_probabilities: The number of top log-probabilities per token; 0: none are returned.
        log_probabilities_echo: Whether log-probabilities of the prompt are returned too.
        ignore_eos: Whether the sequence continues after one of ``eos_token_ids``.
        json_schema: The JSON schema that the text must match; None: any text.
        grammar: The grammar that the text must match; None: any text.
        reasoning_budget: The limit of the reasoning; None: no limit.
        model_name: The requested model.
        sampling: How tokens are chosen.
        priority: Requests with lower values come first.
        client: The client that sent it; clients share the engine equally.
        cache_salt: Requests share cached prefixes only if theirs are equal.
        adapter: Identifies the weights that are added to the model's; empty: none.
    """

    request_id: str
    tokens: tuple[int, ...]
    max_length: int
    eos_token_ids: tuple[int, ...] = ()
    eos_sequences: tuple[tuple[int, ...], ...] = ()
    log_probabilities: int = 0
    log_probabilities_echo: bool = False
    ignore_eos: bool = False
    json_schema: str | None = None
    grammar: str | None = None
    reasoning_budget: ReasoningBudget | None = None
    model_name: str = ""
    sampling: Sampling = Sampling()
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    adapter: str = ""

    @classmethod
    def of(cls, context: TextContext) -> GenerationRequest:
        """The request that corresponds to a new context.

        Args:
            context: The context, for which nothing was generated yet.

        Raises:
            ValueError: The context has generated tokens, images or logits processors.
        """
        if len(context.generated_tokens):
            raise ValueError(
                f"request {context.request_id} has {len(context.generated_tokens)} generated "
                "tokens; only a new request can be sent to an engine"
            )
        if isinstance(context, TextAndVisionContext):
            raise ValueError(
                f"request {context.request_id} has images, which cannot be sent to an engine"
            )
        return cls(
            request_id=context.request_id.value,
            tokens=tuple(context.all_tokens.tolist()),
            max_length=context.max_length,
            eos_token_ids=tuple(sorted(context.eos_token_ids)),
            eos_sequences=tuple(map(tuple, context.eos_sequences)),
            log_probabilities=context.log_probabilities,
            log_probabilities_echo=context.log_probabilities_echo,
            ignore_eos=context.ignore_eos,
            json_schema=context.json_schema,
            grammar=context.grammar,
            reasoning_budget=context.reasoning_budget,
            model_name=context.model_name,
            sampling=Sampling.of(context.sampling_params),
            cache_salt=context.cache_salt,
            adapter=context.adapter,
        )

    def with_grammar(self, grammar: str | None) -> GenerationRequest:
        """A copy of the request with a grammar.

        Args:
            grammar: The grammar; None: any text.
        """
        return replace(self, grammar=grammar)

    def ending_with(self, tokens: Iterable[int]) -> GenerationRequest:
        """A copy of the request with additional end tokens.

        Args:
            tokens: The tokens.
        """
        return replace(self, eos_token_ids=tuple(sorted({*self.eos_token_ids, *tokens})))

    def to_context(self) -> TextContext:
        """Creates a new context from this request.

        Raises:
            InputError: The prompt is empty, or leaves no room for a token.
            ValueError: A sampling parameter is out of range.
        """
        return TextContext(
            request_id=RequestID(self.request_id),
            tokens=np.array(self.tokens, np.int64),
            max_length=self.max_length,
            eos_token_ids=set(self.eos_token_ids),
            eos_sequences=[list(run) for run in self.eos_sequences],
            log_probabilities=self.log_probabilities,
            log_probabilities_echo=self.log_probabilities_echo,
            ignore_eos=self.ignore_eos,
            json_schema=self.json_schema,
            grammar=self.grammar,
            reasoning_budget=self.reasoning_budget,
            model_name=self.model_name,
            sampling_params=self.sampling.to_params(),
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )


@dataclass(frozen=True)
class CancelRequest:
    """Ends a request.

    Args:
        request_id: The request; nothing happens if it has ended.
    """

    request_id: str


@dataclass(frozen=True)
class ForgetPrefixes:
    """Empties the prefix cache; running requests keep their pages.

    Args:
        number: Identifies the answer to this command.
    """

    number: int


@dataclass(frozen=True)
class PrefixesForgotten:
    """No request that starts after this event reuses tokens that were cached before it.

    Args:
        number: The number of the :class:`ForgetPrefixes` command.
    """

    number: int


@dataclass(frozen=True)
class Shutdown:
    """Stops the engine.

    Args:
        finish: Whether open requests are finished first; if not, they are cancelled.
    """

    finish: bool = False


@dataclass(frozen=True)
class ErrorInfo:
    """An error as plain data.

    Args:
        kind: The name of the exception's class. For errors that the user can correct: `UserError`, or its nearest
            subclass that both sides know (``InputError``, ``ModelFilesError``, ``NotFiniteError``, …).
        problem: The description of the error.
        remedy: How to correct it; empty if unknown.
    """

    kind: str
    problem: str
    remedy: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Converts an exception to plain data.

        Args:
            error: The exception.
        """
        if isinstance(error, UserError):
            # the receiver has only these classes, not classes derived from them
            kind = next(c.__name__ for c in type(error).__mro__ if c.__name__ in _USER_ERRORS)
            return cls(kind, error.problem, error.remedy)
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def to_exception(self) -> Exception:
        """The corresponding user error, or a RuntimeError that names the original class."""
        if self.kind in _USER_ERRORS:
            return _USER_ERRORS[self.kind](self.problem, self.remedy)
        return RuntimeError(f"generation failed: {self.problem}")


@dataclass(frozen=True)
class TokenLogProbabilities:
    """``LogProbabilities`` as plain data.

    Args:
        tokens: The log-probability of each token.
        top: For each token the most likely tokens, as pairs of token and log-probability.
    """

    tokens: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class TokensGenerated:
    """New tokens of a request.

    Args:
        request_id: The request.
        tokens: The tokens; empty if a cancellation ended the request.
        status: ``ACTIVE``, or the reason why the request has ended; then this is its last event.
        log_probabilities: One entry per token if they were requested.
    """

    request_id: str
    tokens: tuple[int, ...]
    status: GenerationStatus
    log_probabilities: tuple[TokenLogProbabilities, ...] | None = None

    @classmethod
    def of(cls, output: TextGenerationOutput) -> TokensGenerated:
        """The event that corresponds to an output.

        Args:
            output: The output of a pipeline.
        """
        entries = output.log_probabilities
        return cls(
            output.request_id.value,
            tuple(output.tokens),
            output.final_status,
            None
            if entries is None
            else tuple(
                TokenLogProbabilities(
                    tuple(entry.token_log_probabilities),
                    tuple(tuple(top.items()) for top in entry.top_log_probabilities),
                )
                for entry in entries
            ),
        )

    def to_output(self) -> TextGenerationOutput:
        """The output that corresponds to this event."""
        entries = self.log_probabilities
        return TextGenerationOutput(
            RequestID(self.request_id),
            list(self.tokens),
            self.status,
            None
            if entries is None
            else [
                LogProbabilities(list(entry.tokens), [dict(top) for top in entry.top])
                for entry in entries
            ],
        )


@dataclass(frozen=True)
class PromptStarted:
    """The first batch that contains a request has begun.

    Args:
        request_id: The request.
        at: The time in seconds since the epoch, as another process reads it.
        cached: The tokens of its prompt that the prefix cache had.
    """

    request_id: str
    at: float
    cached: int = 0


@dataclass(frozen=True)
class RequestFailed:
    """The last event of a request that an error has ended.

    Args:
        request_id: The request.
        error: The error.
    """

    request_id: str
    error: ErrorInfo


@dataclass(frozen=True)
class EngineReady:
    """The first event: the model is loaded.

    Args:
        max_batch_size: The maximum number of concurrent requests.
        page_size: Tokens per page of the KV cache.
        total_pages: The number of pages.
    """

    max_batch_size: int
    page_size: int
    total_pages: int


STEP_BOUNDS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
"""The upper bounds of the buckets of :class:`StepTimes`, in milliseconds; the last bucket is unbounded."""


@dataclass(frozen=True)
class StepTimes:
    """A histogram of step durations.

    Args:
        counts: The number of steps in each bucket of ``STEP_BOUNDS_MS``, then of those above the last bound.
        milliseconds: The sum of all durations.
    """

    counts: tuple[int, ...] = (0,) * (len(STEP_BOUNDS_MS) + 1)
    milliseconds: float = 0.0

    def __add__(self, other: StepTimes) -> StepTimes:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return StepTimes(counts, self.milliseconds + other.milliseconds)


@dataclass(frozen=True)
class EngineStats:
    """The load of the engine.

    Args:
        running: Requests whose whole prompt is in the cache.
        waiting: Requests whose prompt is not, or only partly, in the cache.
        used_pages: Pages of the KV cache that requests hold.
        preemptions: The number of times that a request lost its pages.
        prompt_tokens: The number of tokens of requests, counted each time that a request gets pages.
        reused_tokens: How many of these were already in the cache.
        prompt_steps: The durations of steps that read prompts.
        decode_steps: The durations of all other steps.
        drafted_tokens: The number of tokens that were drafted.
        accepted_tokens: How many of these were right.
    """

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prompt_steps: StepTimes = StepTimes()
    decode_steps: StepTimes = StepTimes()
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class EngineStopped:
    """The last event.

    Args:
        error: The reason why the engine could not be loaded or had to stop; None after a :class:`Shutdown`.
    """

    error: ErrorInfo | None = None


Command: TypeAlias = GenerationRequest | CancelRequest | ForgetPrefixes | Shutdown
"""The messages that an engine receives."""
Event: TypeAlias = (
    EngineReady
    | PromptStarted
    | TokensGenerated
    | RequestFailed
    | PrefixesForgotten
    | EngineStats
    | EngineStopped
)
"""The messages that an engine sends."""
