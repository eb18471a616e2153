"""The state of one request for speech."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import GenerationStatus
from max.pipelines.core.text_context import CHUNK_SIZE, TextContext, Tokens


def _no_tokens() -> Tokens:
    return np.array([], np.int64)


@dataclass
class TTSContext(TextContext):
    """The state of one request for speech: text tokens and speech tokens.

    Args:
        audio_prompt_tokens: Speech tokens of the voice.
        buffer_speech_tokens: The last speech tokens of an earlier request.
        audio_buffer: Samples that are not sent yet.
        prev_samples_beyond_offset: The number of samples of the last chunk beyond its end.
        streaming: Whether the audio is sent in chunks.
        decoded_index: The first speech token that is not decoded to audio.
        audio_generation_status: The state of the audio.
    """

    audio_prompt_tokens: Tokens = field(default_factory=_no_tokens)
    buffer_speech_tokens: Tokens | None = None
    audio_buffer: npt.NDArray[np.floating[Any]] | None = None
    prev_samples_beyond_offset: int = 0
    streaming: bool = False
    _speech_token_size: int = CHUNK_SIZE
    _speech_token_end_idx: int = 0
    _speech_tokens: Tokens = field(default_factory=_no_tokens)
    decoded_index: int = 0
    _block_counter: int = 0
    _arrival_time: float = field(default_factory=time.time)
    audio_generation_status: GenerationStatus = GenerationStatus.ACTIVE

    @property
    def is_done(self) -> bool:
        """Whether the audio is finished."""
        return self.audio_generation_status.is_done

    @property
    def speech_tokens(self) -> Tokens:
        """The generated speech tokens."""
        return self._speech_tokens[: self._speech_token_end_idx]

    @property
    def block_counter(self) -> int:
        """The number of generated blocks of speech tokens."""
        return self._block_counter

    def update_speech_tokens(self, new_tokens: Tokens) -> None:
        """Appends a block of speech tokens.

        Args:
            new_tokens: The tokens, 1-d.
        """
        end = self._speech_token_end_idx + len(new_tokens)
        if end > len(self._speech_tokens):
            # rounded up to whole chunks
            size = -(-end // self._speech_token_size) * self._speech_token_size
            room = np.zeros(size, np.int64)
            room[: self._speech_token_end_idx] = self.speech_tokens
            self._speech_tokens = room
        self._speech_tokens[self._speech_token_end_idx : end] = new_tokens
        self._speech_token_end_idx = end
        self._block_counter += 1

    def next_speech_tokens(
        self, audio_chunk_size: int | None = None, buffer: int | None = None
    ) -> tuple[Tokens, int]:
        """The next speech tokens to decode; the caller moves ``decoded_index``.

        Args:
            audio_chunk_size: The most tokens; None: all.
            buffer: The number of earlier tokens to prepend.

        Returns:
            The tokens, and the number of earlier tokens among them.
        """
        begin = max(0, self.decoded_index - (buffer or 0))
        end = self._speech_token_end_idx
        if audio_chunk_size is not None:
            end = min(end, self.decoded_index + audio_chunk_size)
        return self._speech_tokens[begin:end], self.decoded_index - begin
