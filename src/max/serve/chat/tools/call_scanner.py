"""Reads the JSON object of one call while its text arrives."""

from __future__ import annotations

import json
from typing import Any

from max.pipelines.core.text import json_value

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "tool_name")


class CallScanner:
    """Finds the name and the arguments in the object of a call, whatever their order.

    It takes text from the opening brace on. The arguments are returned while they arrive, if the
    name came before them and they are an object.

    Args:
        name_key: The key of the name, besides the usual ones.
        arguments_key: The key of the arguments, besides the usual ones.
    """

    def __init__(self, name_key: str = "name", arguments_key: str = "arguments") -> None:
        self._name_keys = {*NAME_KEYS, name_key}
        self._argument_keys = {*ARGUMENT_KEYS, arguments_key}
        self.raw = ""
        """The text of the object so far."""
        self.done = False
        """Whether the closing brace has arrived."""
        self.name: str | None = None
        """The name, if it has arrived."""
        self.sent = ""
        """The arguments that were returned so far."""
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._value: str | None = None  # of the key at depth 1; None: no value has begun
        self._text = ""  # of the string at depth 1 that may be a key
        self._arguments: str | None = None

    def push(self, text: str) -> str:
        """Takes text up to the end of the object.

        Args:
            text: The text.

        Returns:
            What comes after the object.
        """
        for place, character in enumerate(text):
            self.raw += character
            self._step(character)
            if self.done:
                self._finish()
                return text[place + 1 :]
        return ""

    def take_arguments(self) -> str:
        """The arguments that are new and certain; empty before the name has come."""
        if self.name is None or self._arguments is None:
            return ""
        # space at the end may belong to the enclosing object
        certain = self._arguments if self.done else self._arguments.rstrip()
        new = certain[len(self.sent) :]
        self.sent = certain
        return new

    def _step(self, character: str) -> None:
        if self._value is not None and not self._ends_value(character):
            self._value += character
            if self._key in self._argument_keys and self._value.lstrip().startswith("{"):
                self._arguments = self._value.lstrip()
        if self._in_string:
            self._text += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return
        if character == '"':
            self._in_string, self._text = True, '"'
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if self._depth == 1:
                self._end_value()
                self.done = True
            self._depth -= 1
        elif character == ":" and self._depth == 1 and self._value is None:
            self._key, self._value = _load_json(self._text), ""
        elif character == "," and self._depth == 1:
            self._end_value()

    def _ends_value(self, character: str) -> bool:
        return not self._in_string and self._depth == 1 and character in ",}"

    def _end_value(self) -> None:
        value = (self._value or "").strip()
        if self._key in self._name_keys and isinstance(name := _load_json(value), str):
            self.name = name
        elif self._key in self._argument_keys:
            loaded = _load_json(value)
            # some models write the arguments as a string
            self._arguments = loaded if isinstance(loaded, str) else value
        self._key, self._value = None, None

    def _finish(self) -> None:
        """Reads a call that is nested in ``function``, and completes arguments that are missing or null."""
        if self.name is None:
            call = _load_json(self.raw)
            inner = call.get("function") if isinstance(call, dict) else None
            if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                self.name = inner["name"]
                arguments = next((inner[key] for key in ARGUMENT_KEYS if key in inner), {})
                self._arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if self.name is not None and self._arguments in (None, "", "null"):
            self._arguments = "{}"


def _load_json(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return None
