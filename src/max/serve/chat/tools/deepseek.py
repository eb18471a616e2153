"""Calls as DeepSeek's models write them (V3, R1 and V3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from max.serve.chat.tools.marks import CallParser, ObjectEnd, first_mark, held_length
from max.serve.requests.parts import AnswerPart

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```json"


class DeepSeekParser(CallParser):
    """Finds calls: ``BEGIN name SEPARATOR {…} END``, or ``BEGIN function SEPARATOR name`` with a fenced block.

    Text outside of calls is content; of a call that the length limit cut off the part that has arrived stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state = "text"

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        if self._state == "text":
            # a mark that was cut off is no text
            partial = held_length(self._buffer, (CALLS_BEGIN, CALLS_END, CALL_BEGIN)) if cut else 0
            parts += self._parts.content(self._buffer[: len(self._buffer) - partial])
        return [*parts, *self._parts.finish()]

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        match self._state:
            case "text":
                return self._text(parts)
            case "head":
                return self._head(parts)
            case "arguments":
                return self._arguments(parts)
            case _:
                return self._tail()

    def _text(self, parts: list[AnswerPart]) -> bool:
        marks = (CALLS_BEGIN, CALLS_END, CALL_BEGIN)
        mark = first_mark(self._buffer, marks)
        if mark is None:
            end = len(self._buffer) - held_length(self._buffer, marks)
            parts += self._parts.content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        parts += self._parts.content(self._buffer[: mark[0]])
        self._buffer = self._buffer[mark[0] + len(mark[1]) :]
        self._state = "head" if mark[1] == CALL_BEGIN else "text"
        return True

    def _head(self, parts: list[AnswerPart]) -> bool:
        """Before the arguments: the name stands before the separator, or after it with a fence."""
        before, _, after = self._buffer.partition(SEPARATOR)
        brace = after.find("{")
        if brace < 0:
            return False
        # V3 and R1: `function` before the separator, then the name and a fenced block
        fenced = after[:brace].partition(_FENCE)
        name = fenced[0] if fenced[1] else before
        parts.append(self._parts.begin(name.strip()))
        self._buffer, self._state, self._object = after[brace:], "arguments", ObjectEnd()
        return True

    def _arguments(self, parts: list[AnswerPart]) -> bool:
        if not self._take_object(parts):
            return False
        self._state = "tail"
        return True

    def _tail(self) -> bool:
        """After the arguments: the end of the fence, and of the call."""
        _, mark, after = self._buffer.partition(CALL_END)
        if not mark:
            return False
        self._buffer, self._state = after, "text"
        return True
