"""Answers of GPT-OSS in the harmony format: channels of reasoning, calls and text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from max.serve.chat.tools.marks import BufferedParser, CallParts, first_mark, held_length
from max.serve.requests.parts import AnswerPart, ContentPart, ReasoningPart

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
REASONING = f"{CHANNEL}analysis{MESSAGE}"
"""The start of a message of reasoning."""
NEXT, ANSWER = f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
"""The start of a message's header, and the rest of the header of a message for the user."""
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
# the prompt may end within a header, so the answer may start with its recipient
_OPENING = re.compile(r"\s*(t|to|to=[^\s<]*\s*)?")
_WHOLE_OPENING = re.compile(r"\s*to=[^\s<]+\s*")


class HarmonyParser(BufferedParser):
    """Splits an answer into messages: ``header <|message|> text <|end|>``.

    The channel ``analysis`` is reasoning, a message with a recipient is a call, all else is content. Text
    before the first mark is content too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kind: str | None = "content"  # of the open message; None: within a header
        self._fresh = True  # no part was returned yet
        self._parts = CallParts()

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        if self._kind is not None:
            partial = held_length(self._buffer, _ENDS) if cut else 0
            self._add(parts, self._buffer[: len(self._buffer) - (partial if partial > 2 else 0)])
        return parts

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        return self._header(parts) if self._kind is None else self._body(parts)

    def _header(self, parts: list[AnswerPart]) -> bool:
        header, mark, after = self._buffer.partition(MESSAGE)
        if not mark:
            return False
        if recipient := _RECIPIENT.search(header):
            self._kind = "call"
            parts.append(self._parts.begin(recipient[1]))
        else:
            channel = header.rpartition(CHANNEL)[2].split(CONSTRAIN)[0].strip()
            self._kind = "reasoning" if channel == "analysis" else "content"
        self._buffer = after
        return True

    def _body(self, parts: list[AnswerPart]) -> bool:
        mark = first_mark(self._buffer, _ENDS)
        if self._fresh:
            end = len(self._buffer) - held_length(self._buffer, (CHANNEL,))
            if mark is None and _OPENING.fullmatch(self._buffer[:end]):
                return False
            self._fresh = False
            # the answer begins within a header, which the buffer holds up to its channel
            if mark and mark[1] == CHANNEL and _WHOLE_OPENING.fullmatch(self._buffer[: mark[0]]):
                self._kind = None
                return True
        if mark is None:
            end = len(self._buffer) - held_length(self._buffer, _ENDS)
            self._add(parts, self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._add(parts, self._buffer[: mark[0]])
        self._kind = None
        # the mark of a new message belongs to its header
        keep = mark[1] in (START, CHANNEL)
        self._buffer = self._buffer[mark[0] + (0 if keep else len(mark[1])) :]
        return True

    def _add(self, parts: list[AnswerPart], text: str) -> None:
        if not text:
            return
        if self._kind == "reasoning":
            parts.append(ReasoningPart(text))
        elif self._kind == "call":
            parts.append(self._parts.arguments(text))
        else:
            parts.append(ContentPart(text))
