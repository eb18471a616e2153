"""The text of generated tokens as they arrive: whole characters, stop texts, log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from max._dataclass import dataclass
from max.interfaces import GenerationStatus
from max.pipelines.core.native_calls import tokenizer_calls

_BROKEN = "\ufffd"
# an incomplete character has at most three bytes; each may decode to one broken character
_PENDING = 3
_WINDOW = 8
# a character has at most four bytes, so a window of one of these sizes begins with a whole character
_KEPT = range(4, 8)
# a longer run of tokens without a whole character is invalid UTF-8, and is neither held back nor kept
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
        self._decode_tokens = decode
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
        hopeless = len(self._window) > _HOPELESS
        if hopeless:
            end = max(end, len(text) - _PENDING)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if hopeless or (end == len(text) and len(self._window) > _WINDOW):
            self._shorten(text)
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        # not as a block of `tokenizer_calls`, which costs as much as the call
        try:
            return self._decode_tokens(tokens)
        except BaseException as error:
            tokenizer_calls.check(error)
            raise

    def _shorten(self, text: str) -> None:
        """Drops all but the last tokens, if these decode to the end of the text; else tokens without a text."""
        held = len(text) - self._sent
        for kept in _KEPT:
            tail = self._decode(self._window[-kept:])
            # without a text the next token would have no other before it, on which its space may depend
            if tail and text.endswith(tail) and held <= len(tail):
                self._window = self._window[-kept:]
                self._sent = len(tail) - held
                return
        half = self._window[: len(self._window) // 2]
        if self._decode(half) == text:
            self._window = half

    def push_last(self, tokens: Iterable[int]) -> str:
        """Appends the last tokens, and returns all text that is left, incomplete characters too.

        Args:
            tokens: The last tokens.
        """
        self._window.extend(tokens)
        return self.finish()

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

    def __len__(self) -> int:
        return len(self._stops)

    @property
    def found(self) -> bool:
        """Whether a stop text has occurred."""
        return self.stop is not None

    def push(self, piece: str) -> str:
        """Appends text, and returns the text that is certainly before any stop text.

        Args:
            piece: The new text.
        """
        if self.found:
            return ""
        text = self._held + piece
        # by their ends: how the text is cut into pieces must not matter
        matches = [(index + len(s), index, s) for s in self._stops if (index := text.find(s)) >= 0]
        if matches:
            _, index, self.stop = min(matches)
            self._held = ""
            return text[:index]
        keep = 0
        for stop in self._stops:
            # a whole stop text would have been found
            for size in range(len(stop), keep, -1):
                if text.endswith(stop[:size]):
                    keep = size
                    break
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that is held back, as it could begin a stop text."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class TokenLog:
    """The log-probability of a token of the text.

    Args:
        token: The token.
        log_probability: Its log-probability.
        top: The likeliest tokens and their log-probabilities, the likeliest first.
        offset: Where in the generated text the token's text begins.
    """

    token: int
    log_probability: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class TextPiece:
    """New text of a request.

    Args:
        text: The text; no later token changes it.
        logs: The log-probabilities of the tokens whose text has begun, if they are requested.
        prompt_logs: Those of the prompt's tokens from the second, with echo.
        tokens: The number of tokens so far.
        finish_reason: ``"stop"``, ``"length"`` or ``"cancelled"`` for the last piece.
        stop: The stop text that ended it.
        token_ids: The new tokens, whether they have a text or not, up to the one that completes a stop text.
    """

    text: str
    logs: tuple[TokenLog, ...] = ()
    prompt_logs: tuple[TokenLog, ...] = ()
    tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None
    token_ids: tuple[int, ...] = ()


class TokenEntry(Protocol):
    """The log-probabilities of the tokens of one step."""

    @property
    def tokens(self) -> Sequence[float]:
        """The log-probability of each token: with echo, those of the prompt's from the second, then the new one."""
        ...

    @property
    def top(self) -> Sequence[tuple[tuple[int, float], ...]]:
        """For each token the likeliest tokens and their log-probabilities."""
        ...


_REASONS = {
    GenerationStatus.END_OF_SEQUENCE: "stop",
    GenerationStatus.MAXIMUM_LENGTH: "length",
    GenerationStatus.CANCELLED: "cancelled",
}


class GeneratedText:
    """Makes text of the tokens of one request.

    Args:
        decode: Decodes tokens into text.
        eos_token_ids: Tokens that end the sequence; they have no text.
        stops: Texts that end it.
        include_stop: Whether the stop text is part of the text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Collection[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._stream = TextStream(decode)
        self._eos, self._include_stop = eos_token_ids, include_stop
        self._search = StopStrings(stops)
        self._length, self._sent = 0, 0
        self._logs: deque[TokenLog] = deque()
        self.tokens = 0
        """The number of tokens so far, without those that were generated after a stop text."""

    def push(
        self,
        tokens: Sequence[int],
        status: GenerationStatus,
        log_probabilities: Sequence[TokenEntry] | None = None,
    ) -> TextPiece:
        """Adds tokens.

        Args:
            tokens: The tokens.
            status: ``ACTIVE``, or the reason why they are the last ones.
            log_probabilities: One entry per token; None: they are not requested.

        Returns:
            The new text. Where it has a ``finish_reason``, a stop text or the last token was found;
            nothing may be pushed after it.
        """
        # the token that ends a sequence has no text
        ended = status is GenerationStatus.END_OF_SEQUENCE
        visible = tokens[:-1] if ended and tokens and tokens[-1] in self._eos else tokens
        prompt_logs: tuple[TokenLog, ...] = ()
        reason = _REASONS.get(status)
        used = len(visible)
        # one token at a time where each has a log-probability, or may be the last before a stop text
        if log_probabilities is None and (len(visible) < 2 or not self._search):
            push = self._stream.push if reason is None else self._stream.push_last
            text = self._find(push(visible))
        else:
            prompt_logs, text, used = self._push_each(visible, log_probabilities)
            if reason is not None and self._search.stop is None:
                text += self._find(self._stream.finish())
        if reason is not None and self._search.stop is None:
            text += self._search.finish()
        stop = self._search.stop
        if stop is not None:
            reason = "stop"
            text += stop if self._include_stop else ""
        self._sent += len(text)
        logs: list[TokenLog] = []
        # sent with the text in which its token begins; at the end all that are left
        while self._logs and (
            self._logs[0].offset < self._sent or (reason is not None and stop is None)
        ):
            logs.append(self._logs.popleft())
        taken = tuple(tokens if stop is None else tokens[:used])
        self.tokens += len(taken)
        return TextPiece(text, tuple(logs), prompt_logs, self.tokens, reason, stop, taken)

    def _push_each(
        self, visible: Sequence[int], entries: Sequence[TokenEntry] | None
    ) -> tuple[tuple[TokenLog, ...], str, int]:
        """The log-probabilities of the prompt, the new text, and the number of tokens up to the end of a stop text."""
        # with echo, before that of the generated token, which may be the invisible end
        prompt_logs = [
            TokenLog(-1, log_probability, top, 0)
            for entry in entries or ()
            for log_probability, top in zip(entry.tokens[:-1], entry.top[:-1], strict=True)
        ]
        text, used = "", 0
        for used, token in enumerate(visible, 1):
            if entries is not None:
                entry = entries[used - 1]
                self._logs.append(TokenLog(token, entry.tokens[-1], entry.top[-1], self._length))
            text += self._find(self._stream.push([token]))
            if self._search.found:
                break
        return tuple(prompt_logs), text, used

    def _find(self, piece: str) -> str:
        self._length += len(piece)
        return self._search.push(piece)
