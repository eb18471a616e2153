"""The bodies of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from max.interfaces import SamplingParamsInput
from max.serve.chat.reasoning import Effort
from max.serve.limits import MAX_INPUTS, MAX_MESSAGES, MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, Name, Objects, Stop, StrictBody
from max.serve.openai.sampling_fields import LlamaSamplingFields
from max.serve.requests.request_context import current_request


class OllamaOptions(LlamaSamplingFields):
    """How tokens are chosen, by Ollama's names."""

    num_predict: int | None = None
    stop: Stop = None
    # of Ollama's own engine
    num_ctx: int | None = None
    num_keep: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    num_batch: int | None = None
    repeat_last_n: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in texts if stop)

    def sampling_input(self) -> SamplingParamsInput:
        """The sampling parameters that are set."""
        # -1 and -2 stand for no limit
        sampling = self.sampling_with(self.num_predict)
        # 0 turns the penalties off
        if self.repeat_last_n == 0:
            sampling.repetition_penalty = 1.0
            sampling.presence_penalty = sampling.frequency_penalty = 0.0
        return sampling

    def note_unread(self) -> None:
        """Notes what has no effect, for a header of the response: penalties see the whole text."""
        if self.repeat_last_n not in (None, 0, -1):
            current_request().unread.append("options.repeat_last_n")


@with_config(ConfigDict(extra="allow", strict=True))
class OllamaMessage(TypedDict):
    """A message of a conversation."""

    role: str
    content: NotRequired[str | None]
    thinking: NotRequired[str | None]
    images: NotRequired[Annotated[list[str], FIRST_ERROR] | None]
    tool_calls: NotRequired[Objects | None]
    tool_name: NotRequired[str | None]


class OptionsBody(StrictBody):
    """A body with options."""

    options: OllamaOptions | None = None


class ChatBody(OptionsBody):
    """The body of ``/api/chat``."""

    model: Name
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES), FIRST_ERROR] = []
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    stream: bool | None = None
    think: bool | Effort | Literal[""] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class GenerateBody(OptionsBody):
    """The body of ``/api/generate``."""

    model: Name
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[str], FIRST_ERROR] | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    stream: bool | None = None
    think: bool | Effort | Literal[""] | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    context: list[int] | None = None


class EmbedBody(StrictBody):
    """The body of ``/api/embed``."""

    model: Name
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS), FIRST_ERROR]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class ShowBody(StrictBody):
    """The body of ``/api/show``."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


class EmbeddingsBody(StrictBody):
    """The body of ``/api/embeddings``."""

    model: Name
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class CreateBody(StrictBody):
    """The body of ``/api/create``."""

    model: Name | None = None
    name: Name | None = None
    from_: Annotated[Name | None, Field(alias="from")] = None
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    license: str | list[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES), FIRST_ERROR] = []
    quantize: str | None = None
    stream: bool | None = None


class CopyBody(StrictBody):
    """The body of ``/api/copy``."""

    source: Name
    destination: Name


class PullBody(StrictBody):
    """The body of ``/api/pull``."""

    model: Name | None = None
    name: Name | None = None
    insecure: Literal[False] | None = None
    stream: bool | None = None


class DeleteBody(StrictBody):
    """The body of ``/api/delete``."""

    model: Name | None = None
    name: Name | None = None
