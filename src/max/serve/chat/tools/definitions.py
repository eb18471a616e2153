"""The tools of a request of any API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from max.serve.errors import ApiError, short_text

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Args:
        name: Its name.
        description: What it does, in words for the model.
        parameters: A JSON schema of its arguments, an object.
        strict: Whether a schema that a grammar cannot hold is an error.
        custom: Whether it takes a text, which is its only argument ``input``.
        shown_parameters: What the model sees of the parameters; None: all of them.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}, hash=False
    )
    strict: bool = False
    custom: bool = False
    shown_parameters: dict[str, Any] | None = field(default=None, hash=False)

    @staticmethod
    def of_text(name: str, description: str, pattern: str | None = None) -> Tool:
        """A tool that takes a text.

        Args:
            name: Its name.
            description: What it does.
            pattern: A regular expression of the text; None: any.
        """
        text: dict[str, Any] = {"type": "string"}
        if pattern is not None:
            # a schema's pattern may be found anywhere in a text, a custom tool's is all of it
            text["pattern"] = f"^(?:{pattern})$"
        parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return Tool(name, description, parameters, custom=True)

    def as_openai(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters
            if self.shown_parameters is None
            else self.shown_parameters,
        }
        return {"type": "function", "function": function}


class ChoiceKind(Enum):
    """Whether tools are called."""

    NONE = "none"
    """No tool is called."""
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """At least one is called."""
    NAMED = "named"
    """One tool is called."""


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called, and which.

    Args:
        kind: Whether they are called.
        name: The tool, for ``NAMED``.
        parallel: Whether an answer may have several calls.
        allowed_tools: The tools that may be called; None: all.
    """

    kind: ChoiceKind = ChoiceKind.AUTO
    name: str = ""
    parallel: bool = True
    allowed_tools: tuple[str, ...] | None = None

    def may_call(self, name: str) -> bool:
        """Whether a tool may be called.

        Args:
            name: The tool.
        """
        if self.kind is ChoiceKind.NAMED:
            return name == self.name
        return self.allowed_tools is None or name in self.allowed_tools


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Checks that names fit, and that a choice is possible.

    Args:
        tools: The tools.
        choice: The choice.

    Raises:
        ApiError: They do not fit.
    """
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise ApiError(
                f"a tool has the name {short_text(name)}; give up to 64 letters, digits, and _ - . : /",
                param=f"tools.{number}.function.name",
            )
        if names.count(name) > 1:
            raise ApiError(f"there are two tools of the name {name!r}", param="tools")
    if choice.kind in (ChoiceKind.REQUIRED, ChoiceKind.NAMED) and not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    chosen = [choice.name] if choice.kind is ChoiceKind.NAMED else choice.allowed_tools or ()
    for name in chosen:
        if name not in names:
            raise ApiError(
                f"tool_choice names {short_text(name)}; the tools are {', '.join(names)}",
                param="tool_choice",
            )
    if choice.allowed_tools is not None and not choice.allowed_tools:
        raise ApiError("tool_choice.allowed_tools lists no tools", param="tool_choice")
