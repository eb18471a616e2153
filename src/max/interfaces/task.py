"""The tasks of pipelines."""

from __future__ import annotations

from enum import Enum
from typing import Any

from max.interfaces.audio_generation import AudioGenerationOutput
from max.interfaces.embeddings import EmbeddingsGenerationOutput
from max.interfaces.request import RequestID
from max.interfaces.scheduler import SchedulerResult
from max.interfaces.text_generation import TextGenerationOutput


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
            PipelineTask.TEXT_GENERATION: TextGenerationOutput,
            PipelineTask.EMBEDDINGS_GENERATION: EmbeddingsGenerationOutput,
            PipelineTask.AUDIO_GENERATION: AudioGenerationOutput,
            # speech tokens are passed on as tokens; a later stage generates the audio
            PipelineTask.SPEECH_TOKEN_GENERATION: TextGenerationOutput,
        }
        return dict[RequestID, SchedulerResult[outputs[self]]]


class InputModality(str, Enum):
    """A kind of input of a request."""

    TEXT = "text"
    """Text."""
    IMAGE = "image"
    """Images."""
    VIDEO = "video"
    """Videos."""
