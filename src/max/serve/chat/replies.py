"""Checks that calls of tools and their results in a conversation belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.serve.errors import ApiError, short_text


def check_replies(messages: Sequence[dict[str, Any]]) -> None:
    """Checks that each result is that of an earlier call, and that no call lacks its result.

    Calls and results without identifiers are not checked.

    Args:
        messages: The messages, with OpenAI's fields.

    Raises:
        ApiError: A result or a call is alone.
    """
    open_calls: dict[str, int] = {}
    answered: set[str] = set()
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            identifier = message.get("tool_call_id")
            if not isinstance(identifier, str):
                open_calls.clear()
                continue
            if identifier not in open_calls and identifier not in answered:
                raise ApiError(
                    f"messages.{number} is the result of the tool call {short_text(identifier)}, and no message "
                    "before it has such a call",
                    param=f"messages.{number}.tool_call_id",
                )
            open_calls.pop(identifier, None)
            answered.add(identifier)
            continue
        _check_none_open(open_calls)
        calls = message.get("tool_calls")
        open_calls, answered = {}, set()
        for call in calls if isinstance(calls, list) else ():
            identifier = call.get("id") if isinstance(call, dict) else None
            if isinstance(identifier, str):
                open_calls[identifier] = number
    _check_none_open(open_calls)


def _check_none_open(calls: dict[str, int]) -> None:
    if calls:
        identifier, number = next(iter(calls.items()))
        raise ApiError(
            f"messages.{number} has the tool call {short_text(identifier)}, and the messages after it have no "
            "result of it; give a message of the role tool with this tool_call_id",
            param=f"messages.{number}.tool_calls",
        )
