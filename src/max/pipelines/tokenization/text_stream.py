"""Text while it is generated: tokens become text without broken characters, and stop texts end it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_BROKEN = "\ufffd"
# the first bytes of a character are at most three; each may show as a broken character of its own
_PENDING = 3
_WINDOW = 8
# some window of these sizes begins with a character, whose bytes are at most four
_KEPT = range(4, _WINDOW + 1)
# so many tokens in a row that make no character will not begin to
_HOPELESS = 64


class TextStream:
    """Turns tokens into text as they come.

    A token can end amid a character, and a tokenizer can set spaces by the token before. So the
    last few tokens are decoded together, and a character whose bytes are not all there is held
    back. The pieces joined are what decoding all tokens at once gives.

    Args:
        decode: Turns a run of tokens into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._sent = 0

    def push(self, tokens: Iterable[int]) -> str:
        """Takes tokens and gives the text that is certain.

        Args:
            tokens: The new tokens.
        """
        self._window.extend(tokens)
        text = self._decode(self._window)
        # tokenizers with byte tokens show a whole run as broken until its last character is there
        end = len(text.rstrip(_BROKEN))
        if len(self._window) > _HOPELESS:
            end = max(end, len(text) - _PENDING)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if end == len(text) and len(self._window) > _WINDOW:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Forgets all but the last tokens, if what they decode to alone is the end of the text."""
        for kept in _KEPT:
            tail = self._decode(self._window[-kept:])
            if tail and _BROKEN not in tail and text.endswith(tail):
                self._window = self._window[-kept:]
                self._sent = len(tail)
                return

    def finish(self) -> str:
        """The text that was held back: characters that no token completed."""
        piece = self._decode(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return piece


class StopStrings:
    """Finds the first stop text in text that comes in pieces.

    Args:
        stops: The stop texts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False
        """Whether a stop text has come; the text before it was given out, nothing after it will."""

    def push(self, piece: str) -> str:
        """Takes text and gives what certainly is before any stop text.

        Args:
            piece: The new text.
        """
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), keep, -1):
                if text.endswith(stop[:size]):
                    keep = size
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, since it could have begun a stop text."""
        held, self._held = self._held, ""
        return held
