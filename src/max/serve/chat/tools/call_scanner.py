"""Reads the JSON object of one call while its text arrives."""

from __future__ import annotations

import json
import re
from typing import Any

from max.pipelines.core.text import finite_json_value

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")
_MARK = re.compile(r'["{}\[\]:,]')
_STRING_MARK = re.compile(r'["\\]')
"""What has a meaning within strings; the other one outside of them."""


class CallScanner:
    """Finds the name and the arguments in the object of a call, whatever their order.

    It takes text from the opening brace on. The arguments are returned while they arrive, if the name came before them
    and they are an object. The work is linear in the length of the text, in whatever pieces it comes.

    Args:
        name_key: The key of the name, besides the usual ones.
        arguments_key: The key of the arguments, besides the usual ones.
    """

    def __init__(self, name_key: str = "name", arguments_key: str = "arguments") -> None:
        self._name_keys = {*NAME_KEYS, name_key}
        self._argument_keys = {*ARGUMENT_KEYS, arguments_key}
        self.done = False
        """Whether the closing brace has arrived."""
        self.name: str | None = None
        """The name, if it has arrived."""
        self._raw: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False
        self._text: list[str] | None = None  # of the string at depth 1 that may be a key
        self._key: Any = None
        self._value: list[str] | None = None  # of the key at depth 1; None: no value has begun
        self._streams: bool | None = (
            None  # whether the value is returned while it arrives; None: only space so far
        )
        self._has_arguments = False
        self._new: list[str] = []  # of the arguments, not returned yet
        self._space: list[str] = []  # before it; of the arguments if more of them follow

    @property
    def raw(self) -> str:
        """The text of the object so far."""
        return "".join(self._raw)

    def push(self, text: str) -> str:
        """Takes text up to the end of the object.

        Args:
            text: The text.

        Returns:
            What comes after the object.
        """
        # where the open string or value begins in this text
        begin = 0
        # the text before ended in a backslash, whose character is the first one here
        at = int(self._escaped)
        self._escaped = self._escaped and not text
        while match := (_STRING_MARK if self._in_string else _MARK).search(text, at):
            mark, start, at = match.group(), match.start(), match.end()
            if self._in_string:
                if mark == '"':
                    self._in_string = False
                    if self._text is not None:
                        self._text.append(text[begin:at])
                elif at < len(text):
                    at += 1
                else:
                    self._escaped = True
            elif mark == '"':
                self._in_string = True
                if self._value is None:
                    self._text = [] if self._depth == 1 else None
                    begin = start
            elif mark in "{[":
                self._depth += 1
            # what is within values is only counted
            elif self._depth != 1:
                self._depth -= mark in "}]"
            elif mark == ":" and self._value is None:
                self._begin_value()
                begin = at
            elif mark != ":":
                self._add(text[begin : at if mark == "]" else start])
                self._end_value()
                if mark != ",":
                    self.done = True
                    self._raw.append(text[:at])
                    self._finish()
                    return text[at:]
        self._raw.append(text)
        if self._value is not None:
            self._add(text[begin:])
        elif self._in_string and self._text is not None:
            self._text.append(text[begin:])
        return ""

    def take_arguments(self) -> str:
        """The arguments that are new and certain; empty before the name has come."""
        if self.name is None:
            return ""
        new = "".join(self._new)
        self._new.clear()
        # space at the end may belong to the enclosing object
        certain = new if self.done else new.rstrip()
        if not certain and not self.done:
            self._space.append(new)
            return ""
        taken = "".join((*self._space, certain))
        self._space = [new[len(certain) :]]
        return taken

    def _begin_value(self) -> None:
        self._key = _load_json("".join(self._text or ()))
        self._key = self._key if isinstance(self._key, str) else None
        self._value, self._streams, self._text = [], None, None

    def _add(self, text: str) -> None:
        """Adds text to the value, if there is one and it matters."""
        is_arguments = self._key in self._argument_keys
        if self._value is None or not (is_arguments or self._key in self._name_keys):
            return
        if not self._value:  # space before it
            text = text.lstrip()
        if not text:
            return
        self._value.append(text)
        if self._streams is None:
            self._streams = is_arguments and text.startswith("{") and self._takes_arguments()
        if self._streams:
            self._new.append(text)

    def _takes_arguments(self) -> bool:
        """Whether a value becomes the arguments: of several, the first one once the name is there, else the last."""
        if self._has_arguments and self.name is not None:
            return False
        self._has_arguments = True
        # those of an earlier key were not returned, as the name had not come
        self._new, self._space = [], []
        return True

    def _end_value(self) -> None:
        value = "".join(self._value or ()).strip()
        if self._key in self._name_keys and isinstance(name := _load_json(value), str):
            self.name = name
        elif self._streams:
            new = "".join(self._new).rstrip()
            self._new = [new]
            # space after the object
            self._space = self._space if new else []
        elif self._key in self._argument_keys and not value.startswith("{"):
            loaded = _load_json(value)
            # some models write the arguments as a string
            text = loaded if isinstance(loaded, str) else value
            if text not in ("", "null") and self._takes_arguments():
                self._new = [text]
        self._key, self._value, self._streams = None, None, None

    def _finish(self) -> None:
        """Reads a call that is nested in ``function``, and completes arguments that are missing or null."""
        if self.name is None:
            call = _load_json(self.raw)
            inner = call.get("function") if isinstance(call, dict) else None
            if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                self.name = inner["name"]
                arguments = next((inner[key] for key in ARGUMENT_KEYS if key in inner), {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                self._has_arguments = text not in ("", "null")
                self._new, self._space = [text] if self._has_arguments else [], []
        if self.name is not None and not self._has_arguments:
            self._new = ["{}"]


def _load_json(text: str) -> Any:
    try:
        return finite_json_value(text)
    except ValueError:
        return None
