"""The messages of OpenAI's API."""

from __future__ import annotations

from typing import Any

from max.serve.openai.fields import StrictBody


class MessagePart(StrictBody):
    """A part of a message."""

    type: str
    text: str | None = None


class ChatMessage(StrictBody):
    """A message of a conversation; further fields go to the chat template."""

    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
