"""The input of a response: items to messages."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from max.serve.chat.conversation_text import SUMMARY
from max.serve.errors import ApiError, short_text
from max.serve.openai.responses.hosted_calls import HOSTED, function_items
from max.serve.openai.responses.tools import full_name

_FORM = "summary:"
"""Begins what an item holds. The text is not secret: it is the client's own conversation."""
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The types of parts of a content, and their fields with the text."""


def items_of(given_input: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input.

    Args:
        given_input: A text, or items.
    """
    if isinstance(given_input, str):
        return [{"type": "message", "role": "user", "content": given_input}]
    return given_input


def messages_of(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input, with the fields of chat completions.

    Args:
        items: A text, or items: messages, calls of functions, their outputs, reasoning.

    Raises:
        ApiError: An item is of another type, or lacks a field.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for where, item in _plain_items(items):
        match item.get("type", "message"):
            case "message":
                role, content = item.get("role"), _text(item.get("content"), f"{where}.content")
                messages.append({"role": role, "content": content, **_reasoning(role, thoughts)})
            case "function_call" | "custom_tool_call" as kind:
                arguments = item.get("arguments")
                if kind == "custom_tool_call":
                    # templates write it as the argument `input` of a function
                    arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
                name = item.get("name")
                if isinstance(name, str):
                    name = full_name(item.get("namespace"), name)
                function = {"name": name, "arguments": arguments}
                # the form of chat completions, which templates know
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                last = messages[-1] if messages else {}
                # a text and the calls after it are one message
                if last.get("role") == "assistant" and not thoughts:
                    last.setdefault("tool_calls", []).append(call)
                else:
                    message = {"role": "assistant", "content": "", "tool_calls": [call]}
                    messages.append({**message, **_reasoning("assistant", thoughts)})
            case "function_call_output" | "custom_tool_call_output":
                content = _text(item.get("output"), f"{where}.output")
                messages.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
                )
            case "reasoning":
                # of another server's, which is encrypted, there is at most a summary
                parts = item.get("content") or []
                if not isinstance(parts, list):
                    raise ApiError(
                        f"{where}.content is {short_text(parts)}; expected a list of parts",
                        param=f"{where}.content",
                    )
                thoughts += [
                    part["text"]
                    for part in parts
                    if isinstance(part, dict) and isinstance(part.get("text"), str)
                ]
            case "compaction":
                text = SUMMARY + _summary_in(item, where)
                messages = _one_message_of_the_user(messages, text)
            case other:
                raise ApiError(
                    f"{where}.type is {short_text(other)}; expected message, item_reference, function_call, "
                    "function_call_output, custom_tool_call, custom_tool_call_output, reasoning or compaction",
                    param=f"{where}.type",
                )
    return messages


def _plain_items(items: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The items, each with its place; calls that others run as calls of functions."""
    for number, item in enumerate(items):
        where, kind = f"input.{number}", item.get("type")
        if not isinstance(kind, str) or kind not in HOSTED:
            yield where, item
            continue
        for each in function_items(item, where):
            yield where, each


def _one_message_of_the_user(messages: list[dict[str, Any]], summary: str) -> list[dict[str, Any]]:
    """The messages before a summary with it, which stands for answers, calls and results; those of the user are one, as
    templates may want turns that alternate."""
    kept = [m for m in messages if m["role"] not in ("user", "assistant", "tool")]
    texts = [message["content"] for message in messages if message["role"] == "user"]
    return [*kept, {"role": "user", "content": "\n\n".join([*texts, summary])}]


def _reasoning(role: object, thoughts: list[str]) -> dict[str, str]:
    """The field with the reasoning before a message of the assistant, which is taken from the list."""
    # of a message of another role it is dropped: templates show the assistant's only
    text = "\n".join(thoughts)
    thoughts.clear()
    return {"reasoning_content": text} if text and role == "assistant" else {}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            f"{where} is {short_text(content)}; expected a text, or a list of parts", param=where
        )
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = (
            part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        )
        if not isinstance(text, str):
            raise ApiError(
                f"{where} has a part of type {short_text(kind)}; the model takes text", param=where
            )
        texts.append(text)
    return "\n".join(texts)


def packed_summary(text: str) -> str:
    """The content of a compaction item.

    Args:
        text: The summary.
    """
    return base64.b64encode(msgspec.json.encode(_FORM + text)).decode()


def _summary_in(item: dict[str, Any], where: str) -> str:
    """The text of a compaction item."""
    try:
        text = msgspec.json.decode(
            base64.b64decode(item.get("encrypted_content", ""), validate=True), type=str
        )
    except (binascii.Error, msgspec.DecodeError, TypeError, ValueError):
        text = ""
    if not text.startswith(_FORM):
        raise ApiError(
            f"{where}.encrypted_content is not from /v1/responses/compact of this server",
            param=f"{where}.encrypted_content",
        )
    return text.removeprefix(_FORM)
