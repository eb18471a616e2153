"""The fields of OpenAI's API for tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import ApiError
from max.serve.limits import MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, StrictBody


class FunctionField(StrictBody):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(StrictBody):
    """A tool of a request."""

    type: Literal["function"]
    function: FunctionField


ToolFields = Annotated[list[ToolField], Field(max_length=MAX_TOOLS), FIRST_ERROR]


class FunctionName(StrictBody):
    """The name of a function."""

    name: str


class NamedChoice(StrictBody):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


def tools_of(fields: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        fields: Its field ``tools``.
    """
    return tuple(
        Tool(
            each.function.name,
            each.function.description or "",
            each.function.parameters or {"type": "object", "properties": {}},
            bool(each.function.strict),
        )
        for each in fields or ()
    )


def choice_of(
    field: str | NamedChoice | None,
    parallel: bool | None,
    tools: Sequence[ToolField] | None,
) -> ToolChoice:
    """The choice of a request: by default ``auto`` where there are tools, else ``none``.

    Args:
        field: Its field ``tool_choice``.
        parallel: Its field ``parallel_tool_calls``.
        tools: Its field ``tools``.

    Raises:
        ApiError: A choice needs tools, and there are none.
    """
    several = parallel is not False
    if isinstance(field, NamedChoice):
        return ToolChoice(ChoiceKind.NAMED, field.function.name, several)
    if field in ("auto", "required") and not tools:
        raise ApiError(f"tool_choice is {field!r}, and there are no tools", param="tool_choice")
    return ToolChoice(ChoiceKind(field or ("auto" if tools else "none")), "", several)
