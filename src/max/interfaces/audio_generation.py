"""Audio: requests, batches, results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from max.interfaces.context import BaseContext, GenerationStatus
from max.interfaces.pipeline import PipelineInputs
from max.interfaces.request import Request, RequestID
from max.interfaces.sampling_params import SamplingParams

AudioGenerationContextType = TypeVar("AudioGenerationContextType", bound=BaseContext)


@dataclass(frozen=True)
class AudioGenerationRequest(Request):
    """A request for speech.

    Args:
        request_id: The identifier of the request.
        model: The name of the model.
        input: The text to speak, at most 4096 characters.
        audio_prompt_tokens: Speech tokens of the voice.
        audio_prompt_transcription: The text of these tokens.
        sampling_params: The sampling parameters.
        prompt: Tokens or text for the model, instead of ``input`` and the voice.
        streaming: Whether the audio is sent in chunks.
        buffer_speech_tokens: The last speech tokens of an earlier request, to continue from.
    """

    model: str
    input: str | None = None
    audio_prompt_tokens: list[int] = field(default_factory=list)
    audio_prompt_transcription: str = ""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    _assistant_message_override: str | None = None
    prompt: list[int] | str | None = None
    streaming: bool = True
    buffer_speech_tokens: npt.NDArray[np.integer[Any]] | None = None

    def __post_init__(self) -> None:
        if self.input is None and self.prompt is None:
            raise ValueError("AudioGenerationRequest: neither input nor prompt is given")


@dataclass(kw_only=True)
class AudioGenerationMetadata:
    """Metadata of a piece of audio; ``None`` where unknown.

    Args:
        sample_rate: The sample rate in Hz.
        duration: The duration in seconds.
        chunk_id: The piece's index in the stream.
        timestamp: The time at which it was generated.
        final_chunk: Whether it is the last piece.
        model_name: The name of the model that generated it.
        request_id: The identifier of the request.
        tokens_generated: The number of its speech tokens.
        processing_time: The processing time in seconds.
        echo: The prompt or an identifier of the request.
    """

    sample_rate: int | None = None
    duration: float | None = None
    chunk_id: int | None = None
    timestamp: str | None = None
    final_chunk: bool | None = None
    model_name: str | None = None
    request_id: RequestID | None = None
    tokens_generated: int | None = None
    processing_time: float | None = None
    echo: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as a dictionary; the identifier of the request is a string."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        if self.request_id is not None:
            values["request_id"] = self.request_id.value
        return values


def _no_audio() -> npt.NDArray[np.float32]:
    return np.array([], dtype=np.float32)


@dataclass
class AudioGenerationOutput:
    """A piece of audio.

    Args:
        final_status: The state of the generation.
        steps_executed: The number of executed steps.
        audio_data: Samples in [-1, 1], float32; empty if none are ready.
        buffer_speech_tokens: Speech tokens that a later request can continue from.
        metadata: The metadata of the piece.
    """

    final_status: GenerationStatus
    steps_executed: int
    audio_data: npt.NDArray[np.float32] = field(default_factory=_no_audio)
    buffer_speech_tokens: npt.NDArray[np.integer[Any]] | None = None
    metadata: AudioGenerationMetadata = field(default_factory=AudioGenerationMetadata)

    @property
    def is_done(self) -> bool:
        """Whether this is the last piece."""
        return self.final_status.is_done


@dataclass(frozen=True)
class AudioGenerationInputs(PipelineInputs, Generic[AudioGenerationContextType]):
    """A batch of requests for audio.

    Args:
        batch: The requests' states by their identifiers.
    """

    batch: dict[RequestID, AudioGenerationContextType]
