"""The messages that the process of an engine sends to its users.

All messages, also those of `commands`, are frozen dataclasses of numbers, strings and tuples: they can be pickled and
encoded as msgpack, and neither side depends on the state of the other. A conversation::

    engine -> EngineReady                         the model is loaded
    user   -> GenerationRequest, CancelRequest    at any time, from any thread
    engine -> PromptStarted                       per request: its first batch has begun
    engine -> PredictionVerified ...              per request with a prediction, before the tokens of such a step
    engine -> TokensGenerated ...                 per request, in the order of its tokens
    engine -> TokensGenerated | RequestFailed     the last event of each request
    engine -> EngineStats, PagesChanged           at intervals, if the engine is configured to
    user   -> ForgetPrefixes
    engine -> PrefixesForgotten

    user   -> KeepPrefixes
    engine -> PrefixesKept
    user   -> LoadAdapter, UnloadAdapter
    engine -> AdapterChanged
    user   -> Shutdown
    engine -> EngineStopped                       the last event of all

The last event of a request is a :class:`TokensGenerated` whose status states why it ended, or a
:class:`RequestFailed`. A cancelled request ends with status ``CANCELLED``, unless it has ended before
the engine reads the cancellation. After :class:`EngineStopped` no request is open.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import TypeAlias

from max._dataclass import dataclass
from max._host.machine import byte_size
from max.interfaces import (
    GenerationStatus,
    LogProbabilities,
    RequestID,
    TextGenerationOutput,
)
from max.pipelines.core.exceptions import (
    ConfigError,
    GrammarsWaitError,
    GrammarTooSlowError,
    InputError,
    ModelFilesError,
    NotFiniteError,
    UnknownAdapterError,
    UserError,
)

_USER_ERRORS: dict[str, type[UserError]] = {
    error.__name__: error
    for error in (
        UserError, InputError, ConfigError, ModelFilesError, NotFiniteError, GrammarTooSlowError, GrammarsWaitError,
        UnknownAdapterError,
    )
}  # fmt: skip


@dataclass(frozen=True)
class PrefixesForgotten:
    """No request that starts after this event reuses tokens that were cached before it.

    Args:
        number: The number of the :class:`ForgetPrefixes` command.
    """

    number: int


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
class AdapterChanged:
    """The answer to :class:`LoadAdapter` and :class:`UnloadAdapter`.

    Args:
        number: The number of the command.
        error: Why nothing was changed; None: it was.
    """

    number: int
    error: ErrorInfo | None = None


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
        cached_tokens: The tokens of its prompt that the prefix cache had.
        miss_reason: Why it did not have the token after these, a `MissReason`; empty: it had all but the last token, or
            caches no prefixes.
    """

    request_id: str
    at: float
    cached_tokens: int = 0
    miss_reason: str = ""


@dataclass(frozen=True)
class PredictionVerified:
    """Steps have verified drafts of a request's prediction.

    Args:
        request_id: The request.
        accepted_tokens: The tokens that were drafted and right since the last event of this kind, each counted once.
        rejected_tokens: Those that were not, less those of earlier events that were right after all.
    """

    request_id: str
    accepted_tokens: int
    rejected_tokens: int


@dataclass(frozen=True)
class PrefixesKept:
    """The answer to a :class:`KeepPrefixes` command.

    Args:
        number: The number of the command.
        tokens: The tokens whose pages were saved or restored.
        bytes: The size of the file.
        error: Why it failed; None: it did not.
    """

    number: int
    tokens: int = 0
    bytes: int = 0
    error: ErrorInfo | None = None


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
class StartCounts:
    """What the process of an engine has done to load its model.

    Args:
        compiled_parts: Programs and kernels that were compiled, as no cache had them.
        packed_weights: Programs whose weights were packed, of those whose packed weights are kept.
        fetched_entries: Entries of caches of other machines that were taken instead, packed weights too.
        fetched_bytes: Their bytes.
    """

    compiled_parts: int = 0
    packed_weights: int = 0
    fetched_entries: int = 0
    fetched_bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.compiled_parts} parts compiled, {self.packed_weights} weights packed"
        if self.fetched_entries:
            text += (
                f", {self.fetched_entries} from other machines ({byte_size(self.fetched_bytes)})"
            )
        return text


@dataclass(frozen=True)
class EngineReady:
    """The first event: the model is loaded.

    Args:
        max_batch_size: The maximum number of concurrent requests.
        page_size: Tokens per page of the KV cache.
        total_pages: The number of pages.
        start: What was done to load the model.
    """

    max_batch_size: int
    page_size: int
    total_pages: int
    # of the process, which may have loaded other models before
    start: StartCounts = field(default=StartCounts(), compare=False)


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

    def __add__(self, other: EngineStats) -> EngineStats:
        return EngineStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class OthersLoad:
    """The requests that other users of an engine have sent to it, and that have not ended.

    Args:
        open: Their number.
        unread: The tokens that are to be read for them before their first token.
    """

    open: int = 0
    unread: int = 0


HASH_BYTES = 16
"""The size of the hash of a page."""


@dataclass(frozen=True)
class PagesChanged:
    """What the prefix cache has gained and lost since the last event of this kind; the first one has all that it has.

    Args:
        new_pages: The hashes of pages that it has now, one after another.
        lost_pages: The hashes of those that it has lost.
        is_anew: Whether it was emptied before these changes.
        salt_key: The key of the digests of salts, which the hashes depend on; empty: no request had a salt yet.
    """

    new_pages: bytes = b""
    lost_pages: bytes = b""
    is_anew: bool = False
    salt_key: bytes = b""

    @staticmethod
    def hashes(data: bytes) -> list[bytes]:
        """The hashes of a field.

        Args:
            data: Its value.
        """
        return [data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES)]


@dataclass(frozen=True)
class EngineStopped:
    """The last event.

    Args:
        error: The reason why the engine could not be loaded or had to stop; None after a :class:`Shutdown`.
    """

    error: ErrorInfo | None = None


Event: TypeAlias = (
    EngineReady
    | PromptStarted
    | PredictionVerified
    | TokensGenerated
    | RequestFailed
    | PrefixesForgotten
    | PrefixesKept
    | AdapterChanged
    | EngineStats
    | PagesChanged
    | EngineStopped
)
"""The messages that an engine sends."""
