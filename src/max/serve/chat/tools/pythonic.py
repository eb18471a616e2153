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


class PythonicParser(BufferedParser):
    """Finds a list of calls at the start of an answer; all other text is content.

    A call is returned when its closing parenthesis has arrived. Values are literals of Python or JSON.
    """

    def __init__(self) -> None:
        super().__init__()
        self._mark = ""  # the text before the first call; content if there is no call
        self._state = "begin"
        self._parts = CallParts()

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        parts = self._take(last=True)
        if not self._parts.calls and not (cut and self._state == "calls"):
            parts += self._parts.content(self._mark + self._buffer)
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
        text = self._buffer.lstrip(" \t\r\n,")
        if text.startswith("]"):
            self._buffer, self._state = text[1:], "after"
            return True
        end = end_of_call(text)
        if end is None:
            return False
        call = parsed_call(text[:end])
        if call is None:
            # calls that were returned stay; the rest is content
            self._buffer, self._mark = self._mark + self._buffer, ""
            self._state = "text"
            return True
        self._mark = ""
        parts.append(self._parts.begin(call[0]))
        parts.append(self._parts.arguments(json.dumps(call[1], ensure_ascii=False)))
        self._buffer = text[end:]
        return True


def end_of_call(text: str) -> int | None:
    """The length of the call that a text starts with; None if it is not complete."""
    closing: list[str] = []
    quote, escaped = "", False
    for place, character in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
            if not closing:
                return place + 1
    return None


def parsed_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the arguments of a call; None if the text is not a call."""
    try:
        source = _one_line(text.strip())
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        if not all(keyword.arg for keyword in node.keywords):
            return None
        values = {str(keyword.arg): _value(keyword.value, source) for keyword in node.keywords}
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
