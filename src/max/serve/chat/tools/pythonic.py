"""Calls in Python's syntax: ``[get_weather(city="Oslo", days=3), get_time()]`` (Llama 3.2 and 4, xLAM, ToolACE)."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from max.serve.chat.tools.marks import BufferedParser, CallParts
from max.serve.requests.parts import AnswerPart

BEGIN, END = "<|python_start|>", "<|python_end|>"
CALLS_PATTERN = r"\s*(<\|python_start\|>)?\s*\[\s*[A-Za-z_][0-9A-Za-z_.]*\("
"""The start of an answer that the parser takes as calls; in the syntax of llguidance."""
_NAME = re.compile(r"[A-Za-z_][0-9A-Za-z_.]*")
_CONSTANTS = {"true": True, "false": False, "null": None}
_BREAKS = {"\n": "\\n", "\r": "\\r"}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_BETWEEN = " \t\r\n,"


class PythonicParser(BufferedParser):
    """Finds a list of calls at the start of an answer; all other text is content.

    A call is returned when its closing parenthesis has arrived. Values are literals of Python or JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mark = ""  # the text before the first call; content if there is no call
        self._state = "begin"
        self._parts = CallParts()
        self._open: CallEnd | None = None
        self._read: list[str] = []
        """The text of the open call, before the buffer."""

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        if not self._parts.calls and not (cut and self._state == "calls"):
            parts += self._parts.content("".join((self._mark, *self._read, self._buffer)))
        self._buffer = ""
        return [*parts, *self._parts.finish()]

    def _step(self, parts: list[AnswerPart], last: bool) -> bool:
        if self._state == "begin":
            return self._begin(last)
        if self._state == "calls":
            return self._call(parts)
        text = self._buffer
        if self._state == "after":
            # the end of the list, and its mark
            bare = text.lstrip()
            if not bare or (END.startswith(bare) and bare != END and not last):
                return False
            text, self._state = bare.removeprefix(END), "text"
        parts += self._parts.content(text)
        self._buffer = ""
        return False

    def _begin(self, last: bool) -> bool:
        bare = self._buffer.lstrip()
        if not bare or (len(bare) < len(BEGIN) and BEGIN.startswith(bare)):
            if last and bare:
                self._state = "text"
            return last and bool(bare)
        bare = bare.removeprefix(BEGIN).lstrip()
        name = _NAME.match(bare[1:].lstrip()) if bare.startswith("[") else None
        inner = bare[1:].lstrip()
        if bare.startswith("[") and not last and (not inner or (name and name.end() == len(inner))):
            return False  # a name has begun, or may begin
        if not bare and not last:
            return False
        if name and inner[name.end() :].startswith("("):
            self._mark = self._buffer[: len(self._buffer) - len(inner)]
            self._state, self._buffer = "calls", inner
        else:
            self._state = "text"
        return True

    def _call(self, parts: list[AnswerPart]) -> bool:
        if self._open is None:
            text = self._buffer.lstrip(_BETWEEN)
            if text.startswith("]"):
                self._buffer, self._state = text[1:], "after"
                return True
            if not text:
                return False
            self._read = [self._buffer[: len(self._buffer) - len(text)]]
            self._buffer, self._open = text, CallEnd()
        end = self._open.take(self._buffer)
        self._read.append(self._buffer[:end])
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        text = "".join(self._read)
        self._open, self._read = None, []
        call = parsed_call(text.lstrip(_BETWEEN))
        if call is None:
            # calls that were returned stay; the rest is content
            self._buffer, self._mark = self._mark + text + self._buffer, ""
            self._state = "text"
            return True
        self._mark = ""
        parts.append(self._parts.begin(call[0]))
        parts.append(self._parts.arguments(json.dumps(call[1], ensure_ascii=False)))
        return True


class CallEnd:
    """Finds the end of a call while its text arrives; each character is read once."""

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._quote, self._escaped = "", False

    def take(self, text: str) -> int | None:
        """The length of the text up to the end of the call; None if the call goes on.

        Args:
            text: The next text.
        """
        for place, character in enumerate(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in _PAIRS:
                self._closing.append(_PAIRS[character])
            elif self._closing and character == self._closing[-1]:
                self._closing.pop()
                if not self._closing:
                    return place + 1
        return None


def parsed_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a call; None if the text is not a call."""
    try:
        source = _one_line(text.strip())
        # parsed, never run
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        if not all(keyword.arg for keyword in node.keywords):
            return None
        values = {str(keyword.arg): _value(keyword.value, source) for keyword in node.keywords}
        # raises for what JSON cannot write, such as complex numbers or bytes
        json.dumps(values, allow_nan=False)
        return ast.unparse(node.func), values
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _one_line(text: str) -> str:
    """A text without line breaks, which models write within quotes as they are."""
    if "\n" not in text and "\r" not in text:
        return text
    written, quote, escaped = "", "", False
    for character in text:
        if quote and character in _BREAKS:
            character = _BREAKS[character]
        elif quote and not escaped and character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        escaped = bool(quote) and character == "\\" and not escaped
        written += character
    return written


def _value(node: ast.expr, source: str) -> Any:
    # models write JSON's words among Python's
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each, source) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _value(value, source)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    value = ast.literal_eval(node)
    if isinstance(value, float) and not math.isfinite(value):
        return ast.get_source_segment(source, node)  # JSON has no such number
    return value
