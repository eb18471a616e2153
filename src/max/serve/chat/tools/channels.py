"""The marks of answers that are lists of messages: reasoning, text for the user, calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

from max.serve.chat.tools.layouts.layout import NAME


@dataclass(frozen=True)
class Channels:
    """The marks around the messages of an answer, as in ``to=self<|message|>…<|eom|><|start|>assistant to=user…``.

    Args:
        begin: What begins reasoning.
        end: What ends a message.
        header: What stands after it, before the begin of the next message.
        answer: What begins the text for the user.
        answer_end: What ends it, where that is another mark.
        call: What begins a message with calls, with the name of the tool in it; empty: its first mark does.
    """

    begin: str
    end: str
    header: str = ""
    answer: str = ""
    answer_end: str = ""
    call: str = ""

    @property
    def marks(self) -> str:
        """All marks in one text."""
        return "\n".join(
            (self.begin, self.end, self.header, self.answer, self.answer_end, self.call)
        )

    @property
    def turn(self) -> str:
        """What stands between two messages."""
        return self.end + self.header

    def without_headers(self, text: str) -> str:
        """The calls that a template writes, without what begins each message.

        Args:
            text: What the template writes for an answer with calls.
        """
        if not self.call:
            # an empty reasoning and an empty text may stand before the calls
            empty = [each.strip() for each in (self.end, self.header, self.answer, self.answer_end)]
            while found := next((each for each in empty if each and text.startswith(each)), ""):
                text = text[len(found) :].lstrip()
            return text
        # any name stands in the place of the field
        head = r"[^\s<>]+".join(map(re.escape, self.call.split(NAME)))
        return re.sub(f"(?:{re.escape(self.turn)})?{head}", "", text)
