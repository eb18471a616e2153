"""Finds calls of a layout in an answer while its text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from max.serve.chat.tools.arguments.alternatives import argument_schema
from max.serve.chat.tools.arguments.readings import (
    Readings,
    argument_readings,
    element_readings,
    fitting_values,
)
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.layouts.layout import (
    KEY,
    CallLayout,
    Style,
    common_end,
    common_start,
    has_field,
    name_in,
    pieces,
    run_end,
)
from max.serve.chat.tools.marks import CallParser, first_mark, held_length
from max.serve.chat.tools.pythonic import CallEnd, parsed_call
from max.serve.chat.tools.values import (
    BareObjectEnd,
    bare_object,
    typed_value,
    types_of,
)
from max.serve.requests.parts import AnswerPart

_MOST_NAME = 256
_CDATA = ("<![CDATA[", "]]>")


_TEXT = re.compile(r"\S")


class _Wait(Exception):
    """More text is needed."""


class LayoutParser(CallParser):
    """Finds calls of a layout; all other text is content.

    The marks of calls are no content, also if the answer ends within a call. White space between marks may
    differ from the layout's.

    Args:
        layout: The layout.
        tools: The tools, whose schemas tell the types of values between tags.
    """

    def __init__(self, layout: CallLayout, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self._layout, self._triggers = layout, layout.triggers
        self._section, self._head = pieces(layout.section), pieces(layout.head)
        self._tail, self._section_end = pieces(layout.tail), pieces(layout.section_end)
        self._separator = pieces(layout.separator)
        self._key_marks = _key_marks(layout) if layout.style is Style.TAGGED else ("", "")
        self._key, self._value_end = pieces(layout.key), layout.value_end.strip()
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._state = "text"
        self._name = ""
        self._values: list[tuple[str, Readings]] = []
        """The names of the arguments that were read, and their values."""
        self._written = 0
        """The number of those that are written: none after one that may be read as several values."""
        self._call_end: CallEnd | BareObjectEnd | None = None
        self._read: list[str] = []
        """The text of the arguments, or of a value between tags, before the buffer."""
        self._argument: tuple[str, str] | None = None
        """The name of the argument whose value is read, and the mark after that name."""

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back; what has arrived of a mark or of a call's head is dropped.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        # the answer may end within a call
        self._write_rest(parts)
        if self._state == "text":
            partial = held_length(self._buffer, self._triggers)
            # one or two characters are likelier text than the start of a mark that was cut off
            if partial < 3 or not cut:
                partial = 0
            parts += self._parts.content(self._buffer[: len(self._buffer) - partial])
        self._buffer = ""
        return [*parts, *self._parts.finish()]

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        before, state = self._buffer, self._state
        try:
            match self._state:
                case "text":
                    self._text(parts)
                case "head":
                    self._begin(parts)
                case "arguments":
                    self._arguments(parts, last)
                case "tail":
                    self._end()
                case _:
                    self._read_after_call()
        except _Wait:
            return False
        return (self._buffer, self._state) != (before, state)

    def _text(self, parts: list[AnswerPart]) -> None:
        mark = first_mark(self._buffer, self._triggers)
        if mark is None:
            end = len(self._buffer) - held_length(self._buffer, self._triggers)
            parts += self._parts.content(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return
        parts += self._parts.content(self._buffer[: mark[0]])
        self._buffer = self._buffer[mark[0] :]
        self._state = "head"

    def _begin(self, parts: list[AnswerPart]) -> None:
        """At the mark of a list or of a call: reads up to the arguments."""
        # models may leave out the list's mark
        at = self._match(self._section, 0) or 0
        head = None
        for start in range(max(len(self._layout.head_marks), 1)):
            # models may leave out the first marks of a call
            if (head := self._read_head(at, start)) is not None:
                break
        if head is None:
            if at:  # a list with something else in it
                self._buffer, self._state = self._buffer[at:], "text"
                return
            # a mark without a call is text
            parts += self._parts.content(self._buffer[:1])
            self._buffer, self._state = self._buffer[1:], "text"
            return
        self._name, end = head
        self._buffer, self._state = self._buffer[end:], "arguments"
        self._values, self._written = [], 0
        parts.append(self._parts.begin(self._name))

    def _read_head(self, at: int, start: int) -> tuple[str, int] | None:
        """The name of a call and the length of its head from a mark on; None where there is no head."""
        name = ""
        for piece in self._head[start:]:
            if not has_field(piece):
                end = self._match([piece], at)
                if end is None and name:
                    # models may leave out the call's identifier
                    end = self._match(self._head[-1:], at)
                    return None if end is None else (name, end)
                if end is None:
                    return None
                at = end
                continue
            at = self._space(at)
            size = run_end(self._buffer[at : at + _MOST_NAME])
            # more of the name may come
            if at + size == len(self._buffer):
                raise _Wait
            if not size:
                return None
            name = name_in(piece, self._buffer[at : at + size]) or name
            at += size
        return (name, at) if name else None

    def _match(self, marks: Sequence[str], at: int) -> int | None:
        """The end of marks that stand at a place, with any white space around them; None if they do not."""
        for mark in marks:
            begin = self._space(at)
            if self._buffer.startswith(mark, begin):
                at = begin + len(mark)
            elif mark.startswith(self._buffer[begin:]):
                raise _Wait
            else:
                return None
        return at

    def _space(self, at: int) -> int:
        while at < len(self._buffer) and self._buffer[at].isspace():
            at += 1
        if at == len(self._buffer):
            self._needs_text = True
            raise _Wait
        return at

    def _arguments(self, parts: list[AnswerPart], last: bool) -> None:
        match self._layout.style:
            case Style.JSON:
                self._json(parts)
            case Style.TAGGED:
                self._read_argument(parts, last)
            case Style.PYTHON:
                self._python(parts)
            case Style.BARE:
                self._bare(parts)

    def _json(self, parts: list[AnswerPart]) -> None:
        if not self._object.begun:
            at = self._space(0)
            if self._buffer[at] != "{":
                # no object: the call has no arguments
                self._finish_call(parts, {})
                return
            self._buffer = self._buffer[at:]
        if self._take_object(parts):
            self._state = "tail"

    def _read_argument(self, parts: list[AnswerPart], last: bool) -> None:
        """The name of an argument, its value, or the end of the call."""
        if self._argument is not None:
            self._read_value(parts, last, *self._argument)
            return
        ends = self._tail or self._section_end
        ended = ends and self._match(ends[:1], 0) is not None
        end = None if ended else self._match(self._key, 0)
        if end is None:
            # something else than an argument: the call has ended
            self._write_rest(parts)
            parts.append(self._parts.arguments("}" if self._values else "{}"))
            self._state = "tail"
            return
        start, close = self._key_marks
        at = self._buffer.find(start, end)
        if at < 0:
            self._await(start)
            return
        stop = self._buffer.find(close, at + len(start)) if close else at + len(start)
        if stop < 0:
            return
        begin = stop + len(close)
        # the mark tells texts from other values, so it is kept beside the name
        self._argument = self._buffer[end:at].strip(), self._buffer[at:begin]
        self._buffer, self._read = self._buffer[begin:], []

    def _read_value(self, parts: list[AnswerPart], last: bool, key: str, kind: str) -> None:
        """The value of an argument, up to its end if that has come."""
        finish = self._value_finish(key, last)
        if finish is None:
            return
        text, layout = "".join([*self._read, self._buffer[: finish[0]]]), self._layout
        # the line breaks around a value are part of the marks
        if layout.key_end[len(layout.key_end.rstrip()) :] == "\n":
            text = text.removeprefix("\n")
        if layout.value_end[:1] == "\n":
            text = text.removesuffix("\n")
        self._values.append((key, self._readings(key, text, kind)))
        if all(len(readings) == 1 for _, readings in self._values[self._written :]):
            self._write_values(parts, [readings[0] for _, readings in self._values])
        self._argument, self._buffer = None, self._buffer[finish[1] :]

    def _value_finish(self, key: str, last: bool) -> tuple[int, int] | None:
        """Where a value ends, and its mark: at a mark that an argument or the end of the call follows, which any text
        may be if nothing ends calls. Text up to a mark that ends nothing is moved out of the buffer."""
        mark = self._value_end.replace(KEY, key)
        followers = [each[0] for each in (self._key, self._tail, self._section_end) if each]
        # nothing ends the call: a value ends at its first mark
        if not (self._tail or self._section_end):
            followers = [""]
        at = certain = undecided = 0
        while (found := self._buffer.find(mark, at)) >= 0:
            at = found + len(mark)
            after = _first_text(self._buffer, at)
            left = len(self._buffer) - after
            # a mark within a value is text unless a key or the end of the call follows it
            if any(self._buffer.startswith(each, after) for each in followers) or (
                last and not left
            ):
                return found, at
            if any(
                left < len(each) and each.startswith(self._buffer[after:]) for each in followers
            ):
                # what follows it has not come
                undecided += 1
                self._needs_text = undecided == 1 and not left
            elif not undecided:
                certain = at
        # read up to here for good, so that a long value is not searched again
        if certain:
            self._read.append(self._buffer[:certain])
            self._buffer = self._buffer[certain:]
        if not undecided:
            self._await(mark)
        return None

    def _write_rest(self, parts: list[AnswerPart]) -> None:
        """Writes the arguments that were held back, as their values fit together."""
        if self._written < len(self._values):
            schema: Mapping[str, Any] = self._schemas.get(self._name) or {}
            self._write_values(parts, fitting_values(self._values, schema, schema))

    def _write_values(self, parts: list[AnswerPart], values: Sequence[Any]) -> None:
        """Writes the arguments that are not written yet; there is a value for each that was read."""
        for at in range(self._written, len(values)):
            key, value = (
                json.dumps(each, ensure_ascii=False) for each in (self._values[at][0], values[at])
            )
            parts.append(self._parts.arguments(f"{', ' if at else '{'}{key}: {value}"))
        self._written = len(values)

    def _readings(self, key: str, text: str, mark: str) -> Readings:
        """The values as which the text of an argument may be read."""
        schema: Mapping[str, Any] = self._schemas.get(self._name) or {}
        layout = self._layout
        # models that know XML write texts so
        if text.startswith(_CDATA[0]) and text.endswith(_CDATA[1]):
            return (text[len(_CDATA[0]) : -len(_CDATA[1])],)
        # the mark after the key tells texts from other values
        if layout.key_end != layout.other_key_end:
            is_text = "".join(mark.split()) == "".join(layout.key_end.split())
            if is_text:
                return (text,)
            return (typed_value(text, types_of(argument_schema(schema, key), schema) - {"string"}),)
        if KEY in layout.value_end:
            begin, _, end = self._value_end.partition(KEY)
            read = partial(element_readings, (self._key[-1], begin, end))
            return argument_readings(text, key, schema, read)
        return argument_readings(text, key, schema)

    def _python(self, parts: list[AnswerPart]) -> None:
        # the head has the bracket, and any name makes this a call
        if not isinstance(self._call_end, CallEnd):
            self._call_end, self._read = CallEnd(), ["f("]
            self._call_end.take("f(")
        end = self._call_end.take(self._buffer)
        self._read.append(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return
        call = parsed_call("".join(self._read))
        self._call_end = None
        self._finish_call(parts, call[1] if call else {})

    def _bare(self, parts: list[AnswerPart]) -> None:
        mark = self._value_end
        # the head has the brace
        if not isinstance(self._call_end, BareObjectEnd):
            self._call_end, self._read = BareObjectEnd(mark), ["{"]
            self._call_end.take("{")
        end = self._call_end.take(self._buffer)
        self._read.append(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if not self._call_end.done:
            return
        value = bare_object("".join(self._read), mark)
        self._call_end = None
        self._finish_call(parts, value or {})

    def _finish_call(self, parts: list[AnswerPart], values: dict[str, Any]) -> None:
        parts.append(self._parts.arguments(json.dumps(values, ensure_ascii=False)))
        self._state = "tail"

    def _end(self) -> None:
        """After the arguments: the marks that end the call, of which models may leave out some."""
        at, begun = 0, True
        for mark in self._tail:
            if not has_field(mark):
                end = self._match([mark], at)
                at, begun = end or at, end is not None
            elif begun:  # an identifier, whose mark is there
                at = self._space(at)
                at += run_end(self._buffer[at:])
                if at == len(self._buffer):
                    raise _Wait
        self._buffer, self._state = self._buffer[at:], "between"

    def _read_after_call(self) -> None:
        """After a call: another one, the end of the list, or text."""
        end = self._match(self._section_end, 0) if self._section_end else None
        if end is not None:
            self._buffer, self._state = self._buffer[end:], "text"
            return
        at = self._space(0)
        after = self._match(self._separator, at) if self._separator else None
        at = at if after is None else after
        begins = self._head if self._section else []
        # a separator alone announces a call whose head begins with its name
        if begins and has_field(begins[0]):
            follows = after is not None
        else:
            follows = bool(begins) and self._match(begins[:1], at) is not None
        if follows:
            self._buffer, self._state = self._buffer[at:], "head"
        else:
            self._state = "text"


def _first_text(text: str, at: int) -> int:
    """The place of the first character from a place on that is not space; the length of the text without one."""
    found = _TEXT.search(text, at)
    return len(text) if found is None else found.start()


def _key_marks(layout: CallLayout) -> tuple[str, str]:
    """What ends the name of an argument, and what begins its value; the type may stand between them."""
    if layout.key_end == layout.other_key_end:
        marks = pieces(layout.key_end)
        return marks[0], "" if len(marks) == 1 else marks[-1]
    start = common_start(layout.key_end, layout.other_key_end).rstrip()
    return start, common_end(layout.key_end, layout.other_key_end).strip()
