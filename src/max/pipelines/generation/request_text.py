"""The text of a request during generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max.interfaces import GenerationStatus, TextGenerationOutput
from max.pipelines.tokenization.text_stream import StopStrings, TextStream


class RequestText:
    """The text of one request, decoded as its tokens arrive.

    Args:
        decode: Decodes tokens to text, without special tokens.
        eos_token_ids: Tokens that end the sequence; they are not decoded.
        stops: Strings that end the text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: set[int],
        stops: Sequence[str] = (),
    ) -> None:
        self._stream = TextStream(decode)
        self._eos = eos_token_ids
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was generated."""
        return self._stops.found

    def push(self, output: TextGenerationOutput) -> str:
        """Adds tokens, and returns the new text that no later token can change.

        Args:
            output: The tokens.
        """
        tokens = output.tokens
        ended = output.final_status == GenerationStatus.END_OF_SEQUENCE
        if ended and tokens and tokens[-1] in self._eos:
            tokens = tokens[:-1]
        piece = self._stops.push(self._stream.push(tokens))
        if output.is_done and not self.stopped:
            piece += self._stops.push(self._stream.finish())
            piece += "" if self.stopped else self._stops.finish()
        return piece
