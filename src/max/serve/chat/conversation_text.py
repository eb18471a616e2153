"""The text of a conversation: its messages in the form that the model's chat template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from max.pipelines.core.text import utf8_size
from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.formats import description
from max.serve.chat.tools.layouts.probe import TemplateUse
from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.json_reader import INVALID_JSON, read_object
from max.serve.models.model import ServedModel
from max.serve.requests.threads import by_size, in_body_thread

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
SUMMARY = "The conversation so far, in short:\n"
"""Begins a message that stands for all earlier ones."""
_MANY = 32
"""Up to this number of messages and tools, formatting takes less than a millisecond."""


async def conversation_text(
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    options: dict[str, Any],
    continues: bool = False,
) -> str:
    """As :func:`prompt_text`, but formats many messages in a thread, so that streams go on meanwhile.

    Args:
        model: The model.
        messages: The messages, with OpenAI's fields.
        tools: The tools that may be called.
        options: More variables of the template.
        continues: Whether the text ends where the last message does.

    Raises:
        ApiError: A role is unknown, or the template refuses the conversation.
    """
    if len(messages) + len(tools) <= _MANY:
        return await by_size(prompt_text, model, messages, tools, options, continues)
    return await in_body_thread(prompt_text, model, messages, tools, options, continues)


async def prompt_tokens(
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    options: dict[str, Any] | None = None,
    continues: bool = False,
) -> int:
    """The number of a conversation's tokens, even if the context cannot hold them.

    Args:
        model: The model.
        messages: The messages, with OpenAI's fields.
        tools: The tools that may be called.
        options: More variables of the template.
        continues: Whether the text ends where the last message does.

    Raises:
        ApiError: A role is unknown, or the template refuses the conversation.
    """
    # a created model has messages of its own before them
    messages = model.recipe.before(messages)
    text = await conversation_text(model, messages, tools, options or {}, continues)
    model.check_text(utf8_size(text), "messages")
    return await by_size(model.count_tokens, text, special=False)


def prompt_text(
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Tool],
    options: dict[str, Any],
    continues: bool = False,
) -> str:
    """The text of a conversation by the model's chat template.

    Args:
        model: The model.
        messages: The messages, with OpenAI's fields.
        tools: The tools that may be called.
        options: More variables of the template.
        continues: Whether the text ends where the last message does.

    Raises:
        ApiError: A role is unknown, or the template refuses the conversation.
    """
    model.check_text(_text_size(messages), "messages")
    # templates write the tools into the prompt, so they have the same limit
    model.check_text(_text_size([tool.as_openai() for tool in tools]), "tools")
    plain = [_for_template(message, number, model) for number, message in enumerate(messages)]
    if tools and not model.template_use.describes_tools:
        text = description(tools, model.tool_format)
        if plain and plain[0]["role"] == "system":
            content = plain[0]["content"]
            system_text = content if isinstance(content, str) else _join_texts(content)
            plain[0] = {**plain[0], "content": f"{system_text}\n\n{text}"}
        else:
            plain.insert(0, {"role": "system", "content": text})
    shown_tools = [tool.as_openai() for tool in tools] or None
    if continues:
        return _text_to_continue(model, plain, shown_tools, options)
    return model.apply_template(plain, shown_tools, options)


def _text_to_continue(
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
) -> str:
    """The text of a conversation up to the end of the last message, which is the assistant's."""
    if not messages:
        raise ApiError("there is no message that can be continued", param="messages")
    last = messages[-1]
    content = last["content"] if isinstance(last["content"], str) else _join_texts(last["content"])
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise ApiError(
            "the last message is no text of the assistant; only such a message can be continued",
            param="messages",
        )
    if not content.strip():
        # an empty message says nothing: the answer begins a turn of its own
        return model.apply_template(
            messages[:-1], tools, {**options, "add_generation_prompt": True}
        )
    text = model.apply_template(messages, tools, {**options, "add_generation_prompt": False})
    # templates may strip the white space around a message
    for shown_text in (content, content.rstrip(), content.strip()):
        # the last place: an earlier message may have the same text
        at = text.rfind(shown_text)
        if at >= 0:
            return text[: at + len(shown_text)]
    raise ApiError(
        "the chat template changes the last message, so that it cannot be continued",
        param="messages",
    )


def _text_size(values: Sequence[Any]) -> int:
    """The bytes of all texts within values; parts of messages that are no text, such as images, count as none."""
    # a stack, as values may be nested as deep as bodies
    size, pending = 0, list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            size += utf8_size(value)
        elif isinstance(value, dict):
            if not (isinstance(value.get("role"), str) and isinstance(value.get("content"), list)):
                pending += value.values()
                continue
            pending.extend(v for k, v in value.items() if k != "content")
            pending.extend(each for each in value["content"] if each.get("type") == "text")
        elif isinstance(value, list):
            pending.extend(value)
    return size


def _for_template(message: dict[str, Any], index: int, model: ServedModel) -> dict[str, Any]:
    """A message as the model's chat template expects it."""
    role, use = message.get("role"), model.template_use
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(
            f"the role is {short_text(role)}; it must be one of {', '.join(sorted(ROLES))}",
            param=f"messages.{index}.role",
        )
    # templates test `content` without a look at null
    plain = {**message, "content": message.get("content") or ""}
    if role == "developer" and "developer" not in model.template:
        plain["role"] = "system"
    if use.short_ids and isinstance(identifier := plain.get("tool_call_id"), str):
        plain["tool_call_id"] = short_id(identifier)
    # they come back in the form that the template takes
    calls = plain.pop("tool_calls", None)
    if role == "assistant":
        plain |= _reasoning_for_template(plain, bool(calls), model.template)
    if not calls:
        return plain
    functions = [
        _function(call, f"messages.{index}.tool_calls.{i}") for i, call in enumerate(calls)
    ]
    if use.renders_calls:
        plain["tool_calls"] = [
            _call_for_template(call, function, arguments, use)
            for call, (function, arguments) in zip(calls, functions, strict=True)
        ]
        if use.null_content and not plain["content"]:
            plain["content"] = None
        return plain
    texts = [
        model.tool_format.render_call(each["name"], each["arguments"]) for each, _ in functions
    ]
    content = (
        plain["content"] if isinstance(plain["content"], str) else _join_texts(plain["content"])
    )
    plain["content"] = "\n".join(filter(None, [content, *texts]))
    return plain


_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The fields of messages with reasoning: of DeepSeek's and vLLM's API, of MAX's, and of Ollama's."""


def _reasoning_for_template(message: dict[str, Any], calls: bool, template: str) -> dict[str, str]:
    """The reasoning of an earlier message under the names that the template reads.

    Templates leave out that of earlier turns, and keep that between calls of tools. A prompt without it would not begin
    like the text that the model has generated, and would be read again.
    """
    texts = (message.get(name) for name in _REASONING)
    text = next((each for each in texts if isinstance(each, str) and each), None)
    if text is None:
        return {}
    # a template that reads `thinking` takes it beside calls only, in place of a text
    alone = calls and not message["content"]
    return {
        name: text
        for name in _REASONING
        if name in template and (name != "thinking" or alone) and not message.get(name)
    }


def _call_for_template(
    call: dict[str, Any], function: dict[str, Any], arguments: dict[str, Any], use: TemplateUse
) -> dict[str, Any]:
    """An earlier call in the form that the template takes."""
    taken = {
        **{name: value for name, value in call.items() if name != "custom"},
        "type": "function",
        # older templates write the text of the arguments as it is, newer ones format the object
        "function": {**function, "arguments": function["arguments"] if use.text_arguments else arguments},
    }  # fmt: skip
    if use.short_ids and isinstance(identifier := call.get("id"), str):
        taken["id"] = short_id(identifier)
    return taken


def short_id(identifier: str) -> str:
    """The identifier of a call in nine letters and digits, as some templates want them."""
    if len(identifier) == 9 and identifier.isascii() and identifier.isalnum():
        return identifier
    # the same for a call and its result, which name each other by it
    return sha256(identifier.encode(errors="replace")).hexdigest()[:9]


def _function(call: Any, param: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The function of an earlier call, and its arguments, which are checked to be the text of an object."""
    function = call.get("function") if isinstance(call, dict) else None
    custom = call.get("custom") if isinstance(call, dict) else None
    if function is None and isinstance(custom, dict):
        text = json.dumps({"input": str(custom.get("input") or "")}, ensure_ascii=False)
        function = {"name": custom.get("name"), "arguments": text}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{param}.function has no name", param=param)
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, dict):
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}, arguments
    try:
        # with the limits of bodies: it is a text within one, which had none of its own
        value = read_object(arguments.encode()) if isinstance(arguments, str) else None
        if not isinstance(value, dict):
            raise ValueError
    except (ValueError, ApiError) as error:
        place = f"{param}.function.arguments"
        if isinstance(error, ApiError) and error.code != INVALID_JSON:
            raise ApiError(f"{place}: {error.message}", param=place, code=error.code) from None
        raise ApiError(
            f"{place} is {short_text(arguments)}; expected JSON text of an object", param=place
        ) from None
    return {**function, "arguments": arguments}, value


def _join_texts(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join(str(part.get("text") or "") for part in parts)
