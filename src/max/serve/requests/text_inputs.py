"""The texts of calls of custom tools, from the JSON of their arguments as it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from max.pipelines.core.text import json_value
from max.serve.requests.parts import AnswerPart, ArgumentsPart, ToolCallPart

__all__ = ["TextInputs"]

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_HEAD = 256
"""The most characters that a head is looked for in."""
_WHOLE = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""Characters of a string of JSON, without the half of an escape."""


class _TextInput:
    """The text of one call: the string ``input`` of an object.

    The string is read as it arrives if it comes first in the object, as it does under a grammar; otherwise the object
    is parsed at its end. Each character is read once.
    """

    def __init__(self) -> None:
        self._held = ""  # the head, or the half of an escape
        self._pieces: list[str] = []  # of an object that begins in another way
        self._state = "head"

    def push(self, text: str) -> str:
        """The text of further arguments.

        Args:
            text: The JSON.
        """
        if self._state == "object":
            self._pieces.append(text)
        if self._state in ("object", "end"):
            return ""
        text, self._held = self._held + text, ""
        if self._state == "head":
            head = _HEAD.match(text)
            if head is None:
                self._held = text
                if len(text) > _LONGEST_HEAD:
                    self._pieces, self._held, self._state = [text], "", "object"
                return ""
            text, self._state = text[head.end() :], "string"
        return self._read_string(text)

    def _read_string(self, text: str) -> str:
        whole = _WHOLE.match(text)
        assert whole is not None  # it matches nothing, too
        rest = text[whole.end() :]
        # strict=False: models write line breaks as they are
        read: str = json.loads(f'"{whole.group()}"', strict=False)
        if read and "\ud800" <= read[-1] <= "\udbff":
            # the second half of the character follows
            # 6: the escape \ud800
            read, rest = read[:-1], whole.group()[-6:] + rest
        # a pair of escapes that lacks its last character is the longest rest
        if rest.startswith('"') or len(rest) > len("\\u0000\\u000"):
            self._state = "end"  # also at an escape that JSON does not have
        else:
            self._held = rest
        # halves of a character without the other one
        return read.encode(errors="replace").decode()

    def finish(self) -> str:
        """The text that is known only at the end of the arguments."""
        pieces = [*self._pieces, self._held] if self._state in ("head", "object") else []
        self._state = "end"
        try:
            value = json_value("".join(pieces))
        except ValueError:
            return ""
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else ""


class TextInputs:
    """Makes the arguments of calls of custom tools their texts.

    Args:
        names: The custom tools.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: dict[int, _TextInput] = {}

    def texts(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        """Parts in which the arguments of custom tools are texts. A text that the length limit cuts is what came.

        Args:
            parts: The parts of an answer.
        """
        made: list[AnswerPart] = []
        for part in parts:
            if isinstance(part, ToolCallPart):
                made += self.finish()
                if part.name in self._names:
                    self._open[part.index] = _TextInput()
            if isinstance(part, ArgumentsPart) and (own := self._open.get(part.index)) is not None:
                if text := own.push(part.text):
                    made.append(ArgumentsPart(part.index, text))
                continue
            made.append(part)
        return made

    def finish(self) -> list[AnswerPart]:
        """The texts that are known only at the end of their calls."""
        made: list[AnswerPart] = [
            ArgumentsPart(index, text)
            for index, own in self._open.items()
            if (text := own.finish())
        ]
        self._open.clear()
        return made
