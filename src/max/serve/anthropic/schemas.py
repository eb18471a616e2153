"""The bodies of Anthropic's API, and the conversations that they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from max.serve.anthropic.blocks import Blocks, Message
from max.serve.anthropic.context_edits import ContextManagement
from max.serve.chat.conversation_text import SUMMARY
from max.serve.chat.reasoning import Effort
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.errors import ApiError, short_text
from max.serve.limits import MAX_MESSAGES, MAX_TOOLS
from max.serve.openai.fields import FIRST_ERROR, CacheSalt, Name, StopTexts, StrictBody


class ToolBody(StrictBody):
    """A tool."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    allowed_callers: Annotated[list[str], Field(max_length=64), FIRST_ERROR] | None = None


class ToolChoiceBody(StrictBody):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(StrictBody):
    """The format of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class OutputConfig(StrictBody):
    """The format of an answer, and how much effort it takes."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class ThinkingBody(StrictBody):
    """Whether an answer begins with reasoning, and whether the client gets its text."""

    type: Literal["enabled", "disabled", "adaptive"]
    # checked where max_tokens is known, with an error that names it
    budget_tokens: Any = None
    display: Literal["summarized", "omitted"] | None = None


class CountBody(StrictBody):
    """The body of ``/v1/messages/count_tokens``."""

    model: Name | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR]
    system: str | Blocks | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS), FIRST_ERROR] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_format: OutputFormat | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def continues(self) -> bool:
        """Whether the answer goes on with the last message."""
        return self.messages[-1]["role"] == "assistant"


class MessagesBody(CountBody):
    """The body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: StopTexts | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_salt: CacheSalt | None = None


def tools_of(body: CountBody) -> tuple[Tool, ...]:
    """The tools of a request.

    Args:
        body: The request.

    Raises:
        ApiError: One is a tool that Anthropic runs itself.
    """
    tools: list[Tool] = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise ApiError(
                f"tools.{number}.type is {short_text(tool.type)}; this server runs no tools, give your own "
                "with an input_schema",
                param=f"tools.{number}.type",
            )
        if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
            raise ApiError(
                f"tools.{number}.allowed_callers has no 'direct'; this server runs no code that could call the tool",
                param=f"tools.{number}.allowed_callers",
            )
        schema = tool.input_schema or {"type": "object", "properties": {}}
        tools.append(Tool(tool.name, tool.description or "", schema, bool(tool.strict)))
    return tuple(tools)


def choice_of(body: CountBody) -> ToolChoice:
    """The choice of a request.

    Args:
        body: The request.

    Raises:
        ApiError: A name is missing.
    """
    choice = body.tool_choice
    if not body.tools and choice is not None and choice.type in ("any", "tool"):
        raise ApiError(
            f"tool_choice is {short_text(choice.type)}, and there are no tools", param="tool_choice"
        )
    if choice is None or not body.tools:
        return ToolChoice(ChoiceKind.AUTO if body.tools else ChoiceKind.NONE)
    several = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if not choice.name:
            raise ApiError("tool_choice.name is missing", param="tool_choice.name")
        return ToolChoice(ChoiceKind.NAMED, choice.name, several)
    kinds = {"auto": ChoiceKind.AUTO, "any": ChoiceKind.REQUIRED, "none": ChoiceKind.NONE}
    return ToolChoice(kinds[choice.type], "", several)


def messages_of(body: CountBody) -> list[dict[str, Any]]:
    """The messages of a request, with OpenAI's fields.

    Args:
        body: The request.

    Raises:
        ApiError: A block is not text, and not of tools.
    """
    plain: list[dict[str, Any]] = []
    if body.system:
        plain.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        where = f"messages.{number}.content"
        role, blocks = message["role"], message["content"]
        if isinstance(blocks, str):
            plain.append({"role": role, "content": blocks})
            continue
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in blocks:
            match block["type"]:
                case "text":
                    texts.append(block.get("text") or "")
                case "thinking":
                    thoughts.append(block.get("thinking") or "")
                case "redacted_thinking":
                    pass  # its text is another server's secret
                case "document" | "search_result":
                    texts.append(_block_text(block, where))
                case "compaction":
                    # stands for all that comes before it; without a summary it changes nothing
                    if isinstance(summary := block.get("content"), str) and summary:
                        texts, thoughts, calls = [], [], []
                        # instructions are not part of what was summarized
                        plain = [each for each in plain if each["role"] == "system"]
                        plain.append({"role": "user", "content": SUMMARY + summary})
                case "tool_use":
                    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                    function = {"name": block.get("name") or "", "arguments": arguments}
                    calls.append({"id": block.get("id"), "type": "function", "function": function})
                # results are messages of their own, before what the user says beside them
                case "tool_result":
                    content = _text(block.get("content") or "", where)
                    if block.get("is_error") is True:
                        content = _error_text(content)
                    plain.append(
                        {
                            "role": "tool",
                            "tool_call_id": block.get("tool_use_id"),
                            "content": content,
                        }
                    )
                case other:
                    raise ApiError(
                        f"{where} has a block of type {short_text(other)}; the model takes text",
                        param=where,
                    )
        # a message of results only has gone into messages of their own
        if texts or calls or any(thoughts):
            converted: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
            if any(thoughts):
                converted["reasoning_content"] = "\n".join(thoughts)
            plain.append({**converted, "tool_calls": calls} if calls else converted)
    return plain


def _error_text(text: str) -> str:
    """The result of a tool that failed: chat templates have no other place to say so."""
    # clients may write such a begin themselves
    if text.lstrip(" \n<").lower().startswith(("error", "tool_use_error")):
        return text
    return f"Error: {text or 'the tool failed'}"


def _block_text(block: Mapping[str, Any], where: str) -> str:
    """The text of a block of text, a document or a search result, with its title and where it is from."""
    kind, text = block.get("type"), block.get("text")
    if kind == "document":
        return _document_text(block, where)
    if kind == "search_result":
        _refuse_citations(block, where)
        heads = block.get("title"), block.get("source")
        return _with_heads(heads, _text(block.get("content"), where))
    if kind != "text" or not isinstance(text, str):
        raise ApiError(
            f"{where} has a block of type {short_text(kind)}; the model takes text", param=where
        )
    return text


def _refuse_citations(block: Mapping[str, Any], where: str) -> None:
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise ApiError(
            f"{where} has a {block['type']} with citations, which no model makes here", param=where
        )


def _document_text(block: Mapping[str, Any], where: str) -> str:
    """The text of a document, after its title and what is said of it."""
    _refuse_citations(block, where)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else source
    if not isinstance(source, dict) or kind not in ("text", "content"):
        raise ApiError(
            f"{where} has a document of type {short_text(kind)}; the model takes text", param=where
        )
    text = _text(source.get("data" if kind == "text" else "content"), where)
    return _with_heads((block.get("title"), block.get("context")), text)


def _with_heads(heads: Iterable[Any], text: str) -> str:
    """A text after those heads that are texts, each on a line."""
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), text])


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} is {short_text(content)}; expected a text, or blocks", param=where)
    blocks = (each if isinstance(each, dict) else {"type": each} for each in content)
    return "\n".join(_block_text(block, where) for block in blocks)
