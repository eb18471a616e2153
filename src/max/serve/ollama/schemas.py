"""The bodies of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from max.interfaces import SamplingParamsInput
from max.serve.openai.fields import StrictBody
from max.serve.sampling_fields import LlamaSamplingFields


class OllamaOptions(LlamaSamplingFields):
    """How tokens are chosen, by Ollama's names."""

    num_predict: int | None = None
    stop: str | list[str] | None = None
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
        return self.sampling_with(self.num_predict)


class OllamaCall(StrictBody):
    """An earlier call of a tool; its arguments are an object."""

    function: dict[str, Any]


class OllamaMessage(StrictBody):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None


class ChatBody(StrictBody):
    """The body of ``/api/chat``."""

    model: str
    messages: list[OllamaMessage] = []
    tools: list[dict[str, Any]] | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class GenerateBody(StrictBody):
    """The body of ``/api/generate``."""

    model: str
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    stream: bool | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None


class EmbedBody(StrictBody):
    """The body of ``/api/embed``."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class ShowBody(StrictBody):
    """The body of ``/api/show``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class EmbeddingsBody(StrictBody):
    """The body of ``/api/embeddings``."""

    model: str
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class PullBody(StrictBody):
    """The body of ``/api/pull``."""

    model: str | None = None
    name: str | None = None
    insecure: Literal[False] | None = None
    stream: bool | None = None


class DeleteBody(StrictBody):
    """The body of ``/api/delete``."""

    model: str | None = None
    name: str | None = None
