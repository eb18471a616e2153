"""Turns the tokens of a request into text as they arrive: whole characters, stop texts, log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.events import TokenLogProbabilities, TokensGenerated
from max.pipelines.tokenization.text_stream import StopStrings, TextStream


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
        tokens: The number of tokens that were generated.
        finish_reason: ``"stop"``, ``"length"`` or ``"cancelled"`` for the last piece.
        stop: The stop text that ended it.
    """

    text: str
    logs: tuple[TokenLog, ...] = ()
    prompt_logs: tuple[TokenLog, ...] = ()
    tokens: int = 0
    finish_reason: str | None = None
    stop: str | None = None


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
        eos_token_ids: frozenset[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._stream = TextStream(decode)
        self._eos, self._include_stop = eos_token_ids, include_stop
        self._search = StopStrings(stops)
        self._length, self._sent = 0, 0
        self._logs: deque[TokenLog] = deque()
        self.tokens = 0
        """The number of tokens that were generated."""

    def push(self, event: TokensGenerated) -> TextPiece:
        """Adds tokens.

        Args:
            event: The tokens.

        Returns:
            The new text. Where it has a ``finish_reason``, a stop text or the last token was found;
            nothing may be pushed after it.
        """
        self.tokens += len(event.tokens)
        visible = event.tokens
        ended = event.status is GenerationStatus.END_OF_SEQUENCE
        # the token that ends a sequence has no text
        if ended and visible and visible[-1] in self._eos:
            visible = visible[:-1]
        prompt_logs: tuple[TokenLog, ...] = ()
        if event.log_probabilities is None:
            text = self._find(self._stream.push(visible))
        else:
            prompt_logs, text = self._push_with_logs(visible, event.log_probabilities)
        reason = _REASONS.get(event.status)
        if reason is not None and self._search.stop is None:
            text += self._find(self._stream.finish())
            text += "" if self._search.found else self._search.finish()
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
        return TextPiece(text, tuple(logs), prompt_logs, self.tokens, reason, stop)

    def _push_with_logs(
        self, visible: Sequence[int], entries: Sequence[TokenLogProbabilities]
    ) -> tuple[tuple[TokenLog, ...], str]:
        # with echo, before that of the generated token, which may be the invisible end
        prompt_logs = [
            TokenLog(-1, log_probability, top, 0)
            for entry in entries
            for log_probability, top in zip(entry.tokens[:-1], entry.top[:-1], strict=True)
        ]
        text = ""
        for token, entry in zip(visible, entries, strict=False):
            self._logs.append(TokenLog(token, entry.tokens[-1], entry.top[-1], self._length))
            text += self._find(self._stream.push([token]))
            if self._search.found:
                break
        return tuple(prompt_logs), text

    def _find(self, piece: str) -> str:
        self._length += len(piece)
        return self._search.push(piece)
