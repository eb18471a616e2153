"""Streams of generated text: whole characters only, ended by stop texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from max.interfaces import GenerationStatus, TextGenerationOutput

_BROKEN = "\ufffd"
# an incomplete character has at most three bytes; each may decode to one broken character
_PENDING = 3
_WINDOW = 8
# a character has at most four bytes, so a window of one of these sizes begins with a whole character
_KEPT = range(4, _WINDOW + 1)
# a longer run of tokens without a whole character is invalid UTF-8, and is not held back
_HOPELESS = 64


class TextStream:
    """Decodes a stream of tokens.

    A token can end inside a character, and spaces can depend on the previous token. So the last few
    tokens are decoded together, and an incomplete character is held back. The pieces joined equal the
    text of all tokens decoded at once.

    Args:
        decode: Decodes a sequence of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0

    def push(self, tokens: Iterable[int]) -> str:
        """Appends tokens, and returns the text that is complete.

        Args:
            tokens: The new tokens.
        """
        self._window.extend(tokens)
        text = self._decode(self._window)
        # tokenizers with byte tokens decode a whole run as broken until its last character is complete
        end = len(text.rstrip(_BROKEN))
        if len(self._window) > _HOPELESS:
            end = max(end, len(text) - _PENDING)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if end == len(text) and len(self._window) > _WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Drops all but the last tokens, if these decode to the end of the text."""
        for kept in _KEPT:
            tail = self._decode(self._window[-kept:])
            if tail and _BROKEN not in tail and text.endswith(tail):
                self._window = self._window[-kept:]
                self._sent = len(tail)
                return

    def finish(self) -> str:
        """The text that is held back: incomplete characters."""
        piece = self._decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return piece


class StopStrings:
    """Finds the first stop text in a stream of text: the one that is complete first, of those the longest.

    Args:
        stops: The stop texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stop: str | None = None
        """The stop text that has occurred; only the text before it is returned."""

    @property
    def found(self) -> bool:
        """Whether a stop text has occurred."""
        return self.stop is not None

    def push(self, piece: str) -> str:
        """Appends text, and returns the text that is certainly before any stop text.

        Args:
            piece: The new text.
        """
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        # by their ends: how the text is cut into pieces must not matter
        matches = [(index + len(s), index, s) for s in self._stops if (index := text.find(s)) >= 0]
        if matches:
            _, index, self.stop = min(matches)
            self._held = ""
            return text[:index]
        keep = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:size]):
                    keep = size
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that is held back, as it could begin a stop text."""
        held, self._held = self._held, ""
        return held


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
