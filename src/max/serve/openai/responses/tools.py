"""The tools of ``/v1/responses``: functions, custom tools, namespaces of both, and those that OpenAI itself runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from max.serve.chat.tools.definitions import Tool
from max.serve.errors import ApiError, short_text
from max.serve.limits import MAX_TOOLS
from max.serve.openai.fields import StrictBody
from max.serve.openai.tools import CustomField, CustomFormat, custom_tool
from max.serve.requests.request_context import current_request

_HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp", "local_shell", "shell",
    "apply_patch", "tool_search",
)  # fmt: skip
"""What the types of tools begin with that run at OpenAI, or that its models were trained for."""


class ResponseTool(StrictBody):
    """A tool of a request."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[dict[str, Any]] | None = None
    """The tools of a namespace."""


def full_name(namespace: object, name: str) -> str:
    """The name of a tool for the model.

    Args:
        namespace: Its namespace; None or empty: it has none.
        name: Its name there.
    """
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def tools_of(
    fields: Sequence[ResponseTool] | None, is_auto: bool
) -> tuple[tuple[Tool, ...], dict[str, tuple[str, str]]]:
    """The tools that the model is told of.

    Args:
        fields: The tools of the body.
        is_auto: Whether the model may leave all of them uncalled: then hosted tools are left out with a warning.

    Returns:
        The tools; and the namespace and the name there of each that has a namespace, by its full name.

    Raises:
        ApiError: A tool is none of these, or its fields do not fit.
    """
    tools: list[Tool] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for number, field in enumerate(fields or ()):
        where = f"tools.{number}"
        if field.type == "namespace":
            for inner, part in _parts(field, where):
                tool = _tool(inner, part, field.name)
                namespaces[tool.name] = (field.name or "", inner.name or "")
                tools.append(tool)
        # by their begin: types have dates, such as web_search_preview_2025_03_11
        elif field.type.startswith(_HOSTED) and is_auto:
            current_request().left_out.append(field.type)
        else:
            tools.append(_tool(field, where))
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"tools has {len(tools)} tools, at most {MAX_TOOLS} are read", param="tools")
    return tuple(tools), namespaces


def _parts(field: ResponseTool, where: str) -> list[tuple[ResponseTool, str]]:
    """The tools of a namespace, and where each is."""
    if not field.name:
        raise ApiError(f"{where}.name is missing", param=f"{where}.name")
    parts: list[tuple[ResponseTool, str]] = []
    # one more than may be, so that the caller counts too many
    for number, values in enumerate((field.tools or ())[: MAX_TOOLS + 1]):
        part = f"{where}.tools.{number}"
        try:
            parts.append((ResponseTool.model_validate(values), part))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join([part, *map(str, first["loc"])])
            raise ApiError(f"{path}: {first['msg']}", param=path) from error
    return parts


def _tool(field: ResponseTool, where: str, namespace: str | None = None) -> Tool:
    if field.type not in ("function", "custom"):
        raise ApiError(
            f"{where}.type is {short_text(field.type)}; this server has tools of type 'function', 'custom' and "
            "'namespace'",
            param=f"{where}.type",
        )
    if not field.name:
        raise ApiError(f"{where}.name is missing", param=f"{where}.name")
    name = full_name(namespace, field.name)
    if field.type == "custom":
        custom = CustomField(name=name, description=field.description, format=field.format)
        return custom_tool(custom, where)
    # no parameters: a call without arguments
    parameters = field.parameters or {"type": "object", "properties": {}}
    return Tool(name, field.description or "", parameters, bool(field.strict))
