"""Audio: requests, batches, results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from max.interfaces.context import BaseContext
from max.interfaces.pipeline import PipelineInputs
from max.interfaces.request import Request, RequestID
from max.interfaces.sampling_params import SamplingParams
from max.interfaces.status import GenerationStatus

AudioGenerationContextType = TypeVar("AudioGenerationContextType", bound=BaseContext)


@dataclass(frozen=True)
class AudioGenerationRequest(Request):
    """Asks for speech.

    Args:
        request_id: Identifies the request.
        model: The model that shall make the audio.
        input: The text to speak, at most 4096 characters.
        audio_prompt_tokens: Speech tokens of the voice to take.
        audio_prompt_transcription: What that voice says.
        sampling_params: How tokens are chosen.
        prompt: Tokens or text to give to the model as they are, instead of ``input`` and the voice.
        streaming: Whether the audio is sent as it is made.
        buffer_speech_tokens: The last speech tokens of an earlier request, to go on from.
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
    """What is known about a piece of audio; ``None`` where it is not.

    Args:
        sample_rate: In Hz.
        duration: In seconds.
        chunk_id: The piece's place in the stream.
        timestamp: When it was made.
        final_chunk: Whether it is the last piece.
        model_name: The model that made it.
        request_id: The request it is for.
        tokens_generated: The speech tokens it is made of.
        processing_time: In seconds.
        echo: The prompt, or an identifier, as it came.
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
        """The fields that are set; the request's identifier as text."""
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
        final_status: Where the generation stands.
        steps_executed: The steps that were run for it.
        audio_data: Samples in [-1, 1], float32; empty where there are none yet.
        buffer_speech_tokens: Speech tokens that a later request can go on from.
        metadata: What is known about it.
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
