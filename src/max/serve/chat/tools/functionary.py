"""Answers of Functionary 3.2: parts that begin with a recipient, ``all`` or the name of a tool."""

from __future__ import annotations

from collections.abc import Sequence

from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.marks import CallParser, ObjectEnd, held_length
from max.serve.requests.parts import AnswerPart

SEPARATOR, EVERYONE = ">>>", "all"


class FunctionaryParser(CallParser):
    """Splits an answer into parts: ``recipient`` and a line break, then text or arguments, then ``>>>``.

    An answer that does not begin with a recipient is content.

    Args:
        tools: The tools.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._recipients = [EVERYONE, *(tool.name for tool in tools)]
        # the prompt ends in the separator, so the answer begins with a recipient
        self._state = "recipient"
        self._first = True

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        if self._state == "text":
            # a mark that was cut off is no text
            partial = held_length(self._buffer, (SEPARATOR,)) if cut else 0
            parts += self._parts.content(self._buffer[: len(self._buffer) - partial])
        elif self._first and not cut:
            parts += self._parts.content(self._buffer)
        return [*parts, *self._parts.finish()]

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        match self._state:
            case "recipient":
                return self._recipient(parts)
            case "arguments":
                return self._arguments(parts)
            case "after":
                return self._after()
            case _:
                return self._text(parts)

    def _recipient(self, parts: list[AnswerPart]) -> bool:
        text = self._buffer.lstrip().removeprefix(SEPARATOR)
        name, line, rest = text.partition("\n")
        if line and name.strip() in self._recipients:
            self._first = False
            self._buffer = rest
            if name.strip() == EVERYONE:
                self._state = "text"
                return True
            parts.append(self._parts.begin(name.strip()))
            self._state, self._object = "arguments", ObjectEnd()
            return True
        # the start of a recipient, or of the separator before it
        begun = SEPARATOR.startswith(self._buffer.lstrip()) or any(
            each.startswith(text.lstrip()) or each == text.strip() for each in self._recipients
        )
        if begun and not line:
            return False
        # an unknown recipient: what it is for is the user's to see
        self._state, self._first = "text", False
        return True

    def _text(self, parts: list[AnswerPart]) -> bool:
        before, mark, after = self._buffer.partition(SEPARATOR)
        if mark:
            parts += self._parts.content(before)
            self._buffer, self._state = after, "recipient"
            return True
        size = len(self._buffer) - held_length(self._buffer, (SEPARATOR,))
        parts += self._parts.content(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return False

    def _arguments(self, parts: list[AnswerPart]) -> bool:
        if not self._object.begun:
            self._buffer = self._buffer.lstrip()
            # no object: the call has no arguments
            if self._buffer and not self._buffer.startswith("{"):
                parts.append(self._parts.arguments("{}"))
                self._state = "after"
                return True
        if not self._take_object(parts):
            return False
        self._state = "after"
        return True

    def _after(self) -> bool:
        """After a call: the next part, or the end."""
        bare = self._buffer.lstrip()
        if not bare or (bare != SEPARATOR and SEPARATOR.startswith(bare)):
            return False
        self._state = "recipient" if bare.startswith(SEPARATOR) else "text"
        self._buffer = bare.removeprefix(SEPARATOR)
        return True
