"""The fields of OpenAI's API for tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import of_lark
from max.pipelines.structured.validation import is_regex
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import ApiError, short_text
from max.serve.limits import MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, StrictBody
from max.serve.openai.lark_patterns import (
    LarkError,
    UnheldGrammarError,
    pattern_of_lark,
)
from max.serve.requests.request_context import current_request


class FunctionField(StrictBody):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(StrictBody):
    """The grammar of the text of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(StrictBody):
    """The format of the text of a custom tool; Responses have the fields of the grammar in it."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomField(StrictBody):
    """A tool that takes a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class ToolField(StrictBody):
    """A tool of a request."""

    type: Literal["function", "custom"]
    function: FunctionField | None = None
    custom: CustomField | None = None


ToolFields = Annotated[list[ToolField], Field(max_length=MAX_TOOLS), FIRST_ERROR]


class FunctionName(StrictBody):
    """The name of a function."""

    name: str


class NamedChoice(StrictBody):
    """The choice of one tool."""

    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None


class AllowedTool(StrictBody):
    """One of the tools that may be called."""

    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None
    name: str | None = None


class AllowedTools(StrictBody):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS), FIRST_ERROR]


class AllowedChoice(StrictBody):
    """The choice of some tools; Responses have the fields of ``allowed_tools`` in it."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None


def custom_tool(field: CustomField, place: str) -> Tool:
    """A tool that takes a text.

    Args:
        field: Its fields.
        place: Where they stand.

    Raises:
        ApiError: Its grammar is missing, or cannot be part of an answer.
    """
    form = field.format
    if form is None or form.type == "text":
        return Tool.of_text(field.name, field.description or "")
    syntax = form.grammar.syntax if form.grammar else form.syntax
    definition = form.grammar.definition if form.grammar else form.definition
    where = f"{place}.format.grammar"
    if definition is None or syntax is None:
        raise ApiError(f"{where} is missing", param=where)
    if syntax == "lark":
        return _tool_of_lark(field, definition, f"{where}.definition")
    if not is_regex(definition):
        raise ApiError(
            f"{where}.definition is no regular expression: {short_text(definition)}", param=where
        )
    return Tool.of_text(field.name, field.description or "", definition)


def _tool_of_lark(field: CustomField, definition: str, where: str) -> Tool:
    """A tool whose text fits a grammar in Lark's syntax, which the model sees too.

    Args:
        field: Its fields.
        definition: The grammar.
        where: Where it stands.

    Raises:
        ApiError: It is no grammar.
    """
    # the model reads the grammar, as a pattern in the schema would say less
    description = f"{field.description or ''}\n{definition}".strip()
    pattern, unheld = None, ""
    try:
        # calls are JSON, in whose texts only regular expressions can be held
        held = pattern_of_lark(definition)
        # expressions within the grammar are copied as they are
        if not is_regex(held.pattern):
            raise UnheldGrammarError("its expressions look around, or are wrong")
        pattern = held.pattern
        if held.depth is not None:
            unheld = f"below {held.depth + 1} levels of the same rule"
    except UnheldGrammarError as error:
        unheld = f"({error})"
    except LarkError as error:
        # the variant of the package of grammars has more
        try:
            of_lark(definition)
        except InputError:
            raise ApiError(f"{where} is no grammar: {error}", param=where) from error
        unheld = f"({error})"
    if unheld:
        current_request().hints.append(f"{field.name}: its grammar {unheld}")
    tool = Tool.of_text(field.name, description, pattern)
    return replace(tool, shown_parameters=Tool.of_text(field.name, "").parameters)


def tools_of(fields: Sequence[ToolField] | None) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        fields: Its field ``tools``.

    Raises:
        ApiError: One lacks its fields.
    """
    tools: list[Tool] = []
    for number, field in enumerate(fields or ()):
        place = f"tools.{number}.{field.type}"
        function = field.function
        if field.type == "custom" and field.custom is not None:
            tools.append(custom_tool(field.custom, place))
        elif field.type == "function" and function is not None:
            parameters = function.parameters or {"type": "object", "properties": {}}
            tools.append(
                Tool(function.name, function.description or "", parameters, bool(function.strict))
            )
        else:
            raise ApiError(f"{place} is missing", param=place)
    return tuple(tools)


def allowed_choice(field: AllowedChoice, several: bool) -> ToolChoice:
    """The choice of some tools.

    Args:
        field: The field.
        several: Whether an answer may have several calls.

    Raises:
        ApiError: It lists no tools, or one has no name.
    """
    mode = field.allowed_tools.mode if field.allowed_tools else field.mode
    tools = field.allowed_tools.tools if field.allowed_tools else field.tools
    names: list[str] = []
    for number, tool in enumerate(tools or ()):
        # chat completions nest the name, Responses do not
        inner = tool.function or tool.custom
        name = inner.name if inner is not None else tool.name
        if name is None:
            raise ApiError(
                f"tool_choice.allowed_tools.tools.{number} has no name", param="tool_choice"
            )
        names.append(name)
    return ToolChoice(ChoiceKind(mode or "auto"), "", several, tuple(names))


def choice_of(
    field: str | NamedChoice | AllowedChoice | None,
    parallel: bool | None,
    tools: Sequence[ToolField] | None,
) -> ToolChoice:
    """The choice of a request: by default ``auto`` where there are tools, else ``none``.

    Args:
        field: Its field ``tool_choice``.
        parallel: Its field ``parallel_tool_calls``.
        tools: Its field ``tools``.

    Raises:
        ApiError: A choice needs tools, and there are none; or it has no name.
    """
    several = parallel is not False
    if isinstance(field, AllowedChoice):
        return allowed_choice(field, several)
    if isinstance(field, NamedChoice):
        inner = field.function or field.custom
        if inner is None:
            raise ApiError("tool_choice has no name", param="tool_choice")
        return ToolChoice(ChoiceKind.NAMED, inner.name, several)
    if field in ("auto", "required") and not tools:
        raise ApiError(f"tool_choice is {field!r}, and there are no tools", param="tool_choice")
    return ToolChoice(ChoiceKind(field or ("auto" if tools else "none")), "", several)
