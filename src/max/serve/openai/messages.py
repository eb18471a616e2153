"""The messages of OpenAI's API: they stay dictionaries, which take less time and memory than objects."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from max.serve.limits import MAX_MESSAGES
from max.serve.openai.fields import FIRST_ERROR, Objects

_OPEN = ConfigDict(extra="allow", strict=True)


@with_config(_OPEN)
class MessagePart(TypedDict):
    """A part of a message."""

    type: str
    text: NotRequired[str | None]


@with_config(_OPEN)
class ChatMessage(TypedDict):
    """A message of a conversation; further fields go to the chat template."""

    role: str
    content: NotRequired[str | Annotated[list[MessagePart], FIRST_ERROR] | None]
    name: NotRequired[str | None]
    tool_calls: NotRequired[Objects | None]
    tool_call_id: NotRequired[str | None]


ChatMessages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), FIRST_ERROR
]


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as dictionaries of any fields; refusals of the assistant are texts."""
    return [
        _without_refusal(dict(message)) if message["role"] == "assistant" else dict(message)
        for message in messages
    ]


def _without_refusal(message: dict[str, Any]) -> dict[str, Any]:
    refusal, content = message.pop("refusal", None), message.get("content")
    if isinstance(content, list):
        message["content"] = [
            # chat templates know texts only
            {"type": "text", "text": part["refusal"]}
            if part["type"] == "refusal" and isinstance(part.get("refusal"), str)
            else part
            for part in content
        ]
    elif not content and isinstance(refusal, str):
        message["content"] = refusal
    return message
