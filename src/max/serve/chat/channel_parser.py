"""Splits answers that are lists of messages into reasoning, text and calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from max.serve.chat.tools.channels import Channels
from max.serve.chat.tools.layouts.layout import NAME
from max.serve.chat.tools.marks import BufferedParser, first_mark, held_length
from max.serve.requests.parts import AnswerParser, AnswerPart, ReasoningPart

_RECIPIENT = r"[^\s<>]{1,256}"


class ChannelParser(BufferedParser):
    """Takes messages of reasoning out of an answer, and removes what begins and ends each message.

    Args:
        answer: The parser of texts and calls.
        begun: Whether the prompt ends within reasoning.
        channels: The marks.
    """

    def __init__(self, answer: AnswerParser, begun: bool, channels: Channels) -> None:
        super().__init__()
        self._answer, self._channels = answer, channels
        self._state = "reasoning" if begun else "begin"
        self._first = True  # of a message: space at its start is dropped
        self._ends = tuple(
            dict.fromkeys(each.strip() for each in (channels.end, channels.answer_end) if each)
        )
        head = channels.call.strip().partition(NAME)
        # the name may come in pieces
        self._call_start = head[0]
        self._call = re.compile(_RECIPIENT.join(map(re.escape, (head[0], head[2])))) if head[1] else None  # fmt: skip
        self._call_end = head[2]

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        # one or two characters are likelier text than a mark that was cut off
        partial = held_length(self._buffer, self._ends) if cut else 0
        text = self._buffer[: len(self._buffer) - (partial if partial > 2 else 0)]
        if self._state == "reasoning":
            self._add(parts, text)
        elif self._state == "text":
            parts += self._answer.push(text)
        # else: the head of a message, which was cut off
        self._buffer = ""
        return [*parts, *self._answer.finish(cut)]

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        match self._state:
            case "begin":
                return self._begin(last)
            case "header":
                return self._header()
            case _:
                return self._body(parts)

    def _begin(self, last: bool) -> bool:
        """At the start of a message: reads what tells its kind."""
        bare, channels = self._buffer.lstrip(), self._channels
        for mark, state in ((channels.begin, "reasoning"), (channels.answer, "text")):
            mark = mark.strip()
            # space before a mark belongs to no message
            if mark and bare.startswith(mark):
                self._buffer, self._state, self._first = bare[len(mark) :], state, True
                return True
        if self._call is not None and (match := self._call.match(bare)):
            self._buffer, self._state, self._first = bare[match.end() :], "text", True
            return True
        if not last and self._may_begin(bare):
            return False
        if last and bare and self._may_begin(bare) and len(bare) > 2:
            return False  # the head was cut off
        # no head that is known: all of it is text for the user
        self._state = "text"
        return bool(self._buffer)

    def _may_begin(self, text: str) -> bool:
        """Whether a text may be the first part of what begins a message."""
        marks = (self._channels.begin.strip(), self._channels.answer.strip(), self._call_start)
        if any(mark.startswith(text) for mark in marks if mark):
            return True
        if self._call is None or not text.startswith(self._call_start):
            return False
        name, mark = re.fullmatch(f"({_RECIPIENT})?(.*)", text[len(self._call_start) :], re.DOTALL).groups()  # type: ignore[union-attr] # fmt: skip
        return not mark or self._call_end.startswith(mark)

    def _header(self) -> bool:
        """After a message: removes what stands before the next one."""
        # models may leave out the header, whose absence changes nothing
        bare, header = self._buffer.lstrip(), self._channels.header.strip()
        if header and bare.startswith(header):
            bare = bare[len(header) :]
        elif header and header.startswith(bare):
            return False  # its rest may come; at the end of an answer it was cut off
        self._buffer, self._state, self._first = bare, "begin", True
        return bool(bare)

    def _body(self, parts: list[AnswerPart]) -> bool:
        mark = first_mark(self._buffer, self._ends)
        end = len(self._buffer) - held_length(self._buffer, self._ends) if mark is None else mark[0]
        text, rest = self._buffer[:end], self._buffer[end:]
        if self._state == "reasoning":
            bare = text.rstrip()
            # space before a mark is dropped
            if mark is None:
                rest = text[len(bare) :] + rest
            self._add(parts, bare)
        else:
            text = text.lstrip() if self._first else text
            self._first = self._first and not text
            if text:
                parts += self._answer.push(text)
        if mark is None:
            self._buffer = rest
            return False
        self._buffer, self._state = rest[len(mark[1]) :], "header"
        return True

    def _add(self, parts: list[AnswerPart], text: str) -> None:
        text = text.lstrip() if self._first else text
        if text:
            self._first = False
            parts.append(ReasoningPart(text))
