"""The tasks of pipelines."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from max._lazy import lazy_module

if TYPE_CHECKING:
    from max.interfaces import audio_generation, embeddings, request, scheduler, text_generation
    from max.interfaces.request import RequestID
    from max.interfaces.scheduler import SchedulerResult
else:
    audio_generation = lazy_module("max.interfaces.audio_generation")
    embeddings = lazy_module("max.interfaces.embeddings")
    request = lazy_module("max.interfaces.request")
    scheduler = lazy_module("max.interfaces.scheduler")
    text_generation = lazy_module("max.interfaces.text_generation")


class PipelineTask(str, Enum):
    """The task of a pipeline, by its output."""

    TEXT_GENERATION = "text_generation"
    """Text."""
    EMBEDDINGS_GENERATION = "embeddings_generation"
    """Embeddings of texts."""
    AUDIO_GENERATION = "audio_generation"
    """Audio."""
    SPEECH_TOKEN_GENERATION = "speech_token_generation"
    """Speech tokens."""

    @property
    def output_type(self) -> type[dict[RequestID, SchedulerResult[Any]]]:
        """The type of a scheduler's reports for this task: a mapping from request to result."""
        outputs = {
            PipelineTask.TEXT_GENERATION: text_generation.TextGenerationOutput,
            PipelineTask.EMBEDDINGS_GENERATION: embeddings.EmbeddingsGenerationOutput,
            PipelineTask.AUDIO_GENERATION: audio_generation.AudioGenerationOutput,
            # speech tokens are passed on as tokens; a later stage generates the audio
            PipelineTask.SPEECH_TOKEN_GENERATION: text_generation.TextGenerationOutput,
        }
        return dict[request.RequestID, scheduler.SchedulerResult[outputs[self]]]


class InputModality(str, Enum):
    """A kind of input of a request."""

    TEXT = "text"
    """Text."""
    IMAGE = "image"
    """Images."""
    VIDEO = "video"
    """Videos."""
