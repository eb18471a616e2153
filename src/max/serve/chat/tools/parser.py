"""Finds the calls of tools in an answer while its text arrives."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from max.serve.chat.tools.call_scanner import CallScanner
from max.serve.chat.tools.deepseek import DeepSeekParser
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.formats import ToolFormat
from max.serve.chat.tools.functionary import FunctionaryParser
from max.serve.chat.tools.harmony import HarmonyParser
from max.serve.chat.tools.layouts.parser import LayoutParser
from max.serve.chat.tools.marks import BufferedParser, held_length
from max.serve.chat.tools.pythonic import PythonicParser
from max.serve.requests.parts import (
    AnswerParser,
    AnswerPart,
    ArgumentsPart,
    ContentPart,
    ToolCallPart,
)


def parser_of(tool_format: ToolFormat, tools: Sequence[Tool] = ()) -> AnswerParser:
    """A new parser of a format.

    Args:
        tool_format: The format.
        tools: The tools, whose schemas tell the types of values that are not written as JSON.
    """
    match tool_format.syntax:
        case "layout" if tool_format.layout is not None:
            return LayoutParser(tool_format.layout, tools)
        case "pythonic":
            return PythonicParser()
        case "deepseek":
            return DeepSeekParser()
        case "harmony":
            return HarmonyParser()
        case "functionary":
            return FunctionaryParser(tools)
        case _:
            return ToolParser(tool_format)


_FIRST_KEYS = ('{"name"', '{"tool_name"', '{"type"', '{"function"', '{"id"')
_BETWEEN = " \t\r\n,;[]"


class ToolParser(BufferedParser):
    """Finds calls in one of the formats; all other text is content.

    Text that starts like a call but is none becomes content, if no part of it was returned as a call.

    Args:
        tool_format: The format.
    """

    def __init__(self, tool_format: ToolFormat) -> None:
        super().__init__()
        self._format = tool_format
        self._calling = False  # after a trigger
        self._mark = ""  # the text since the trigger; content if no call follows
        self._scanner: CallScanner | None = None
        self._announced = False
        self._calls = 0
        self._begun = False  # whether content was returned: calls without a trigger come first
        self._space: list[str] = []  # space before a trigger belongs to the call

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back; what has arrived of a call's marks is dropped.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        trigger = self._format.trigger
        if self._scanner is not None and not self._announced:
            # without a mark an object may be the answer
            if not trigger and not (cut and _begins_call(self._scanner.raw)):
                self._content(parts, self._mark + self._scanner.raw)
        elif self._scanner is None and not self._calling:
            partial = held_length(self._buffer, (trigger,)) if cut and trigger else 0
            self._content(
                parts, self._buffer[: len(self._buffer) - (partial if partial > 2 else 0)]
            )
        self._buffer, self._scanner, self._calling = "", None, False
        if (space := "".join(self._space)) and not self._calls:
            parts.append(ContentPart(space))
        return parts

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        if self._scanner is not None:
            return self._scan(parts)
        if self._calling:
            return self._between(parts, last)
        return self._text(parts, last)

    def _text(self, parts: list[AnswerPart], last: bool) -> bool:
        trigger = self._format.trigger
        if not trigger:
            return self._text_without_trigger(parts, last)
        at = self._buffer.find(trigger)
        if at >= 0:
            self._content(parts, self._buffer[:at])
            self._enter(self._buffer[at : at + len(trigger)], at + len(trigger))
            return True
        ready = self._buffer[: len(self._buffer) - held_length(self._buffer, (trigger,))]
        self._buffer = self._buffer[len(ready) :]
        self._content(parts, ready)
        return False

    def _text_without_trigger(self, parts: list[AnswerPart], last: bool) -> bool:
        """Calls are at the start of the answer, after a mark or as a bare object."""
        if self._begun:
            self._content(parts, self._buffer)
            self._buffer = ""
            return False
        bare, mark = self._buffer.lstrip(), self._format.optional_trigger
        space = len(self._buffer) - len(bare)
        if mark and bare.startswith(mark):
            self._enter(self._buffer[: space + len(mark)], space + len(mark))
            return True
        # an object at the start may be a call without a mark
        if bare.startswith("{"):
            self._enter(self._buffer[:space], space)
            return True
        if not last and (not bare or (mark and mark.startswith(bare))):
            return False
        self._content(parts, self._buffer)
        self._buffer = ""
        return False

    def _enter(self, mark: str, end: int) -> None:
        self._calling, self._mark, self._announced = True, mark, False
        self._buffer = self._buffer[end:]

    def _between(self, parts: list[AnswerPart], last: bool) -> bool:
        """Between two objects of a list, or before the first one."""
        bare = self._buffer.lstrip(_BETWEEN)
        self._mark += self._buffer[: len(self._buffer) - len(bare)]
        self._buffer = bare
        if not bare:
            return False
        closing = self._format.after.strip()
        if bare.startswith("{"):
            keys = self._format.name_key, self._format.arguments_key
            self._scanner, self._announced = CallScanner(*keys), False
            return True
        if closing and bare.startswith(closing):
            self._buffer = bare[len(closing) :]
            self._leave(parts)
            return True
        # its rest may come
        if closing and closing.startswith(bare):
            return False
        self._leave(parts)
        return True

    def _leave(self, parts: list[AnswerPart]) -> None:
        """Goes back to text; a mark without a call after it is text."""
        if self._mark and not self._announced:
            self._content(parts, self._mark)
        self._calling, self._mark = False, ""
        self._begun = True

    def _scan(self, parts: list[AnswerPart]) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._buffer = scanner.push(self._buffer)
        arguments = scanner.take_arguments()
        # not before its arguments, as a name alone makes no call
        if scanner.name is not None and (arguments or scanner.done) and not self._announced:
            self._announced = True
            parts.append(ToolCallPart(self._calls, f"call_{secrets.token_hex(12)}", scanner.name))
        if arguments:
            parts.append(ArgumentsPart(self._calls, arguments))
        if not scanner.done:
            return False
        if self._announced:
            self._calls += 1
            self._mark = ""
        else:  # an object that is not a call
            self._content(parts, self._mark + scanner.raw)
            self._mark, self._calling = "", False
        self._scanner = None
        return bool(self._buffer)

    def _content(self, parts: list[AnswerPart], text: str) -> None:
        """Adds content; space at its end is held back, as space before a call is dropped."""
        bare = text.rstrip()
        if not bare:
            self._space.append(text)
            return
        self._begun = True
        parts.append(ContentPart("".join((*self._space, bare))))
        self._space = [text[len(bare) :]]


def _begins_call(text: str) -> bool:
    """Whether a text may be the first part of the object of a call."""
    bare = "".join(text.split())
    return any(bare.startswith(key) or key.startswith(bare) for key in _FIRST_KEYS)
