"""The common parts of the parsers: marks and JSON objects whose text arrives in pieces."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Sequence

from max.serve.requests.parts import AnswerPart, ArgumentsPart, ContentPart, ToolCallPart


def held_length(text: str, marks: Sequence[str]) -> int:
    """The length of the end of a text that may be the start of a mark.

    Args:
        text: The text; no mark is whole in it.
        marks: The marks.
    """
    # shorter than a mark: `first_mark` finds whole ones
    longest = min(max(map(len, marks)) - 1, len(text))
    for size in range(longest, 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """The first mark in a text, and its place; None where there is none."""
    return min(((at, m) for m in marks if (at := text.find(m)) >= 0), default=None)


class BufferedParser:
    """Collects the text of an answer in a buffer, and takes parts from it; a base of the parsers."""

    def __init__(self) -> None:
        self._buffer = ""
        self._late: list[str] = []
        """Text after the buffer, which changes nothing before more has come: to add each piece would copy all."""
        self._awaited = self._seen = ""
        self._needs_text = False
        """Whether space changes nothing."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Adds text, and returns the parts that are certain.

        Args:
            text: The new text.
        """
        self._late.append(text)
        if self._awaited:
            end = self._seen + text
            # the end that may be the start of the mark, one character less than it
            self._seen = end[max(len(end) - len(self._awaited) + 1, 0) :]
            if self._awaited not in end:
                return []
        elif text.isspace() and (self._needs_text or self._buffer.isspace()):
            return []  # more of the space that waits for what follows
        return self._take(last=False)

    def _await(self, mark: str) -> None:
        """Leaves text alone until a mark is whole, of which the buffer has a part at most; empty: any text is read."""
        self._awaited = mark
        self._seen = self._buffer[max(len(self._buffer) - len(mark) + 1, 0) :] if mark else ""

    def _take(self, last: bool) -> list[AnswerPart]:
        """The parts in the buffer that are certain.

        Args:
            last: Whether the answer has ended.
        """
        self._buffer += "".join(self._late)
        self._late.clear()
        self._await("")
        self._needs_text = False
        parts: list[AnswerPart] = []
        while self._step(parts, last):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        """Takes some text from the buffer; whether there may be more to take."""


class ObjectEnd:
    """Finds the end of a JSON object while its text arrives."""

    def __init__(self) -> None:
        self._depth, self._string, self._escaped = 0, False, False

    @property
    def begun(self) -> bool:
        """Whether the object's brace has come."""
        return self._depth > 0

    def take(self, text: str) -> int | None:
        """The length of the text up to the end of the object; None if the object goes on.

        Args:
            text: The next text; the first begins with a brace.
        """
        for place, character in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._string = False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


class CallParts:
    """Makes the parts of calls, and parts of content without the space around calls."""

    def __init__(self) -> None:
        self.calls = 0
        """The number of calls that have begun."""
        self._space: list[str] = []

    def begin(self, name: str) -> ToolCallPart:
        """The start of a call.

        Args:
            name: The tool.
        """
        self.calls += 1
        self._space = []
        return ToolCallPart(self.calls - 1, f"call_{secrets.token_hex(12)}", name)

    def arguments(self, text: str) -> ArgumentsPart:
        """More of the arguments of the last call.

        Args:
            text: JSON text.
        """
        return ArgumentsPart(self.calls - 1, text)

    def content(self, text: str) -> list[AnswerPart]:
        """Content; space at its end is held back, as space before a call is dropped."""
        bare = text.rstrip()
        if not bare:
            self._space.append(text)
            return []
        whole = "".join((*self._space, bare))
        self._space = [text[len(bare) :]]
        return [ContentPart(whole)]

    def finish(self) -> list[AnswerPart]:
        """The space that was held back, if there was no call."""
        space, self._space = "".join(self._space), []
        return [ContentPart(space)] if space and not self.calls else []


class CallParser(BufferedParser):
    """A base of the parsers of calls whose arguments are JSON objects."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = CallParts()
        self._object = ObjectEnd()

    def _take_object(self, parts: list[AnswerPart]) -> bool:
        """Takes the text of the arguments from the buffer; whether they have ended."""
        end = self._object.take(self._buffer)
        text = self._buffer if end is None else self._buffer[:end]
        if text:
            parts.append(self._parts.arguments(text))
        self._buffer = self._buffer[len(text) :]
        return end is not None
