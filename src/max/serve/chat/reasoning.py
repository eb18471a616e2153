"""Separates the reasoning of a model from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from max.serve.chat.tools.marks import held_length
from max.serve.requests.parts import AnswerParser, AnswerPart, ReasoningPart

BEGIN, END = "<think>", "</think>"
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much an answer is thought about."""


def thinking_options(thinks: bool | None, effort: str | None = None) -> dict[str, Any]:
    """The variables of chat templates that turn reasoning on or off.

    Args:
        thinks: Whether the answer has reasoning; None: as the effort says, else as the template does.
        effort: How much; ``none``: no reasoning.
    """
    if thinks is None and effort == "none":
        thinks = False
    # most templates read the first one; those of DeepSeek and Granite the second
    switches = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    return switches if effort is None else {**switches, "reasoning_effort": effort}


class ReasoningParser:
    """Takes the text between two marks at the start of an answer as reasoning.

    Args:
        answer: The parser of the text after it.
        begun: Whether the prompt ends in the first mark, so that the answer begins with reasoning.
        marks: The marks.
    """

    def __init__(
        self, answer: AnswerParser, begun: bool, marks: tuple[str, str] = (BEGIN, END)
    ) -> None:
        self._answer = answer
        self._begin, self._end = marks
        self._inside, self._looking = begun, not begun
        self._buffer = ""
        self._space: list[str] = []
        """More space after that in the buffer, which waits for what follows."""
        # space at the start of the reasoning, and of the answer after it, is dropped
        self._first = True

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Adds text, and returns the parts that are certain.

        Args:
            text: The new text.
        """
        if text.isspace() and self._buffer.isspace():
            self._space.append(text)
            return []
        self._buffer = "".join((self._buffer, *self._space, text))
        self._space.clear()
        parts: list[AnswerPart] = []
        if self._looking:
            bare = self._buffer.lstrip()
            # an answer may begin with the mark, which has come in part
            if self._begin.startswith(bare) and bare != self._begin:
                return parts
            self._looking = False
            if bare.startswith(self._begin):
                self._inside, self._buffer = True, bare[len(self._begin) :]
            else:
                self._first = False
        if self._inside:
            self._reason(parts)
        if not self._inside:
            self._pass(parts)
        return parts

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts: list[AnswerPart] = []
        self._buffer += "".join(self._space)
        self._space.clear()
        if self._inside:
            # one or two characters are likelier text than a mark that was cut off
            partial = held_length(self._buffer, (self._end,)) if cut else 0
            self._add(parts, self._buffer[: len(self._buffer) - (partial if partial > 2 else 0)])
        else:
            parts += self._answer.push(self._buffer)
        self._buffer = ""
        return [*parts, *self._answer.finish(cut)]

    def _reason(self, parts: list[AnswerPart]) -> None:
        at = self._buffer.find(self._end)
        if at >= 0:
            self._add(parts, self._buffer[:at].rstrip())
            self._buffer, self._inside, self._first = (
                self._buffer[at + len(self._end) :],
                False,
                True,
            )
            return
        # a mark may have begun; space before it is dropped
        ready = self._buffer.rstrip()
        for size in range(min(len(self._end) - 1, len(ready)), 0, -1):
            if self._end.startswith(ready[-size:]):
                ready = ready[:-size].rstrip()
                break
        self._add(parts, ready)
        self._buffer = self._buffer[len(ready) :]

    def _add(self, parts: list[AnswerPart], text: str) -> None:
        text = text.lstrip() if self._first else text
        if text:
            self._first = False
            parts.append(ReasoningPart(text))

    def _pass(self, parts: list[AnswerPart]) -> None:
        text = self._buffer.lstrip() if self._first else self._buffer
        self._buffer = ""
        if text:
            self._first = False
            parts += self._answer.push(text)
