"""Text: requests, their states, batches, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from max.interfaces.context import BaseContext, GenerationStatus
from max.interfaces.pipeline import PipelineInputs
from max.interfaces.request import Request, RequestID
from max.interfaces.sampling_params import SamplingParams

Tokens = npt.NDArray[np.integer[Any]]


@dataclass
class LogProbabilities:
    """Log-probabilities of one output position (or, with echo, of several).

    Args:
        token_log_probabilities: The log-probability of each token of the output.
        top_log_probabilities: For each position the log-probabilities of the most likely tokens, by token id. The
            output token is always included.
    """

    token_log_probabilities: list[float]
    top_log_probabilities: list[dict[int, float]]

    def __post_init__(self) -> None:
        if len(self.token_log_probabilities) != len(self.top_log_probabilities):
            raise ValueError(
                f"LogProbabilities: {len(self.token_log_probabilities)} token log-probabilities, "
                f"{len(self.top_log_probabilities)} top ones; expected one of each a position"
            )


class TextGenerationRequestFunction(TypedDict):
    """A function that the model may call."""

    name: str
    """The name."""
    description: str | None
    """A description of its purpose, for the model."""
    parameters: dict[str, Any]
    """The parameters, as a JSON schema."""


class TextGenerationRequestTool(TypedDict):
    """A tool that the model may use."""

    type: str
    """The kind, ``"function"``."""
    function: TextGenerationRequestFunction
    """The function."""


class TextGenerationResponseFormat(TypedDict):
    """The required format of the answer."""

    type: str
    """``"json_schema"``, ``"json_object"`` or ``"text"``."""
    json_schema: dict[str, Any]
    """The schema that the answer matches."""


class TextGenerationRequestMessage(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "function"]
    """The role of the speaker."""
    content: str | list[dict[str, Any]]
    """The text, or a list of parts, for example ``{"type": "text", "text": "..."}`` and
    ``{"type": "image_url", "image_url": {"url": "..."}}``."""


@dataclass(frozen=True)
class TextGenerationRequest(Request):
    """A request for text.

    Args:
        request_id: The identifier of the request.
        model_name: The name of the requested model.
        prompt: The text, or the tokens, to continue.
        messages: The conversation to answer, instead of a prompt.
        images: The images of the messages, in their order.
        tools: The functions that the model may call.
        response_format: The required format of the answer.
        timestamp_ns: The time of arrival.
        request_path: The endpoint of the request.
        logprobs: The number of top log-probabilities per token; 0: none.
        echo: Whether the prompt is returned too.
        stop: Texts that end the generation.
        chat_template_options: Additional variables of the chat template.
        sampling_params: The sampling parameters, and the conditions that end the generation.
        target_endpoint: The instance that answers, if there are several.

    Raises:
        ValueError: Both a prompt and messages are given.
    """

    model_name: str
    prompt: str | Sequence[int] | None = None
    messages: list[TextGenerationRequestMessage] | None = None
    images: list[bytes] | None = None
    tools: list[TextGenerationRequestTool] | None = None
    response_format: TextGenerationResponseFormat | None = None
    timestamp_ns: int = 0
    request_path: str = "/"
    logprobs: int = 0
    echo: bool = False
    stop: str | list[str] | None = None
    chat_template_options: dict[str, Any] | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    target_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.prompt is not None and self.messages:
            raise ValueError(
                "TextGenerationRequest: both prompt and messages are given; give the one to go on "
                "from, or the conversation to answer"
            )
        if self.logprobs < 0:
            raise ValueError(f"TextGenerationRequest: logprobs is {self.logprobs}; expected >= 0")


class BatchType(Enum):
    """The work of a batch."""

    CE = "CE"
    """Context encoding: prompts, or chunks of prompts, are read."""
    TG = "TG"
    """Token generation: one token per request and step."""


@runtime_checkable
class TextGenerationContext(BaseContext, Protocol):
    """The state of one request for text.

    The array of tokens, and the three indices into it::

        |  in the KV cache   |   next to process   |  later chunks of the prompt  |  room  |
        0              start_idx              active_idx                       end_idx
    """

    @property
    def eos_token_ids(self) -> set[int]:
        """The tokens that end the sequence."""
        ...

    @property
    def active_idx(self) -> int:
        """One past the last token of the next step."""
        ...

    @property
    def start_idx(self) -> int:
        """The first token of the next step: all tokens before it are in the KV cache."""
        ...

    @property
    def end_idx(self) -> int:
        """One past the last token."""
        ...

    @property
    def active_length(self) -> int:
        """The number of tokens of the next step: a prompt's or chunk's length, then 1."""
        ...

    @property
    def current_length(self) -> int:
        """The number of tokens that are in the cache or in the next step."""
        ...

    @property
    def needs_ce(self) -> bool:
        """Whether tokens of the prompt remain to be processed."""
        ...

    @property
    def is_initial_prompt(self) -> bool:
        """Whether no token was generated since the prompt (or since :meth:`reset`)."""
        ...

    @property
    def max_length(self) -> int | None:
        """The maximum length of the sequence in tokens."""
        ...

    @property
    def min_tokens(self) -> int:
        """The minimum number of new tokens before an end-of-sequence token."""
        ...

    @property
    def tokens(self) -> Tokens:
        """The whole array, with its unused capacity."""
        ...

    @property
    def all_tokens(self) -> Tokens:
        """Prompt and generated tokens."""
        ...

    @property
    def next_tokens(self) -> Tokens:
        """The tokens of the next step."""
        ...

    @property
    def prompt_tokens(self) -> Tokens:
        """The prompt of the request."""
        ...

    @property
    def generated_tokens(self) -> Tokens:
        """The generated tokens."""
        ...

    @property
    def log_probabilities(self) -> int:
        """The number of top log-probabilities per token; 0 for none."""
        ...

    @property
    def log_probabilities_echo(self) -> bool:
        """Whether to return the prompt's log-probabilities too."""
        ...

    @property
    def json_schema(self) -> str | None:
        """The schema that the text must match."""
        ...

    @property
    def matcher(self) -> Any | None:
        """The grammar matcher that constrains the text to the schema."""
        ...

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters."""
        ...

    def get_last_generated_token(self) -> int:
        """The newest token.

        Raises:
            ValueError: Nothing was generated yet.
        """
        ...

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """The forbidden tokens of each of the next steps.

        Args:
            num_steps: The number of steps.

        Returns:
            An array ``[n, 2]`` of (row, token) per step; the row is 0.
        """
        ...

    def set_matcher(self, matcher: Any) -> None:
        """Sets the grammar matcher.

        Args:
            matcher: The matcher, which determines the tokens that may follow.
        """
        ...

    def bump_token_indices(self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0) -> None:
        """Moves the indices.

        Args:
            start_idx: The increment of ``start_idx``.
            active_idx: The increment of ``active_idx``.
            end_idx: The increment of ``end_idx``.
        """
        ...

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
    ) -> None:
        """Sets indices; ``None`` leaves an index unchanged.

        Args:
            start_idx: The new ``start_idx``.
            active_idx: The new ``active_idx``.
            end_idx: The new ``end_idx``.
        """
        ...

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Appends the token of a step.

        Args:
            new_token: The token.
            log_probabilities: The log-probabilities of the token, if the request includes them.
        """
        ...

    def jump_ahead(self, new_token: int) -> None:
        """Appends a token that requires no step, for example a token that a grammar forces.

        Args:
            new_token: The token.
        """
        ...

    def reset(self) -> None:
        """Turns all tokens into a prompt that is processed again, after the cache pages of the request were evicted."""
        ...

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """The number of steps before the sequence is full.

        Args:
            max_seq_len: The maximum length of a sequence.
        """
        ...

    def to_generation_output(self) -> TextGenerationOutput:
        """The tokens since the last call."""
        ...


TextGenerationContextType = TypeVar("TextGenerationContextType", bound=TextGenerationContext)


@dataclass(kw_only=True)
class ImageMetadata:
    """An image within a prompt: the tokens ``[start_idx, end_idx)`` stand for it.

    Args:
        start_idx: Its first token.
        end_idx: One past its last token.
        pixel_values: Its pixels, in the model's format.
        image_hash: A hash of the pixels, for prefix caching; -1 without one.

    Raises:
        ValueError: The range is empty or begins before 0.
    """

    start_idx: int
    end_idx: int
    pixel_values: npt.NDArray[np.floating[Any]]
    image_hash: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.start_idx < self.end_idx:
            raise ValueError(
                f"ImageMetadata: tokens [{self.start_idx}, {self.end_idx}) are no range"
            )


@runtime_checkable
class VLMTextGenerationContext(TextGenerationContext, Protocol):
    """The state of one request for text about images."""

    @property
    def image_idx(self) -> int:
        """The first image that is not yet encoded."""
        ...

    @property
    def images(self) -> list[ImageMetadata]:
        """All images of the prompt."""
        ...

    @property
    def next_images(self) -> list[ImageMetadata]:
        """The images that are not yet encoded."""
        ...

    @property
    def needs_vision_encoding(self) -> bool:
        """Whether an image is not yet encoded."""
        ...

    def compute_image_aligned_idx(self, idx: int) -> int:
        """The index, or the start of the image that contains it.

        Args:
            idx: An index into the tokens.
        """
        ...


@dataclass
class TextGenerationOutput:
    """New tokens of one request.

    Args:
        request_id: The request.
        tokens: The tokens.
        final_status: The state of the generation.
        log_probabilities: One entry per token, if the request includes log-probabilities.
    """

    request_id: RequestID
    tokens: list[int]
    final_status: GenerationStatus
    log_probabilities: list[LogProbabilities] | None = None

    @property
    def is_done(self) -> bool:
        """Whether these are the last tokens."""
        return self.final_status.is_done


@dataclass
class TextGenerationInputs(PipelineInputs, Generic[TextGenerationContextType]):
    """A batch of requests for text.

    Args:
        batches: One dictionary per replica of the model.
        num_steps: The number of tokens to generate per request.
        input_tokens: The number of tokens of the first step; -1: counted from the contexts.
        batch_type: The work of the batch.
    """

    batches: list[dict[RequestID, TextGenerationContextType]]
    num_steps: int
    input_tokens: int = -1
    batch_type: BatchType = BatchType.TG

    def __post_init__(self) -> None:
        if self.input_tokens < 0:
            self.input_tokens = sum(c.active_length for c in self.batch.values())

    @property
    def batch(self) -> dict[RequestID, TextGenerationContextType]:
        """The requests of all replicas."""
        return {key: context for batch in self.batches for key, context in batch.items()}

    @property
    def enable_echo(self) -> bool:
        """Whether any request includes log-probabilities of its prompt."""
        return any(self.batch_echo)

    @property
    def enable_log_probs(self) -> bool:
        """Whether any request includes log-probabilities."""
        return any(self.batch_top_log_probs)

    @property
    def batch_top_log_probs(self) -> list[int]:
        """The number of top log-probabilities of each request."""
        return [context.log_probabilities for context in self.batch.values()]

    @property
    def batch_echo(self) -> list[bool]:
        """Whether each request includes log-probabilities of its prompt."""
        return [context.log_probabilities_echo for context in self.batch.values()]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def __bool__(self) -> bool:
        return len(self) > 0
