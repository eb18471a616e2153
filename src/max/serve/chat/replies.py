"""Checks that calls of tools and their results in a conversation belong together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from max.serve.errors import ApiError, short_text


def check_replies(messages: Sequence[dict[str, Any]], field: str = "messages") -> None:
    """Checks that each result is that of an earlier call, and that no call lacks its result.

    Calls and results without identifiers, as in Ollama's API, belong together in their order.

    Args:
        messages: The messages, with OpenAI's fields.
        field: The field of the request that they come from.

    Raises:
        ApiError: A result or a call is alone.
    """
    check = _Check(field)
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            check.result(number, message.get("tool_call_id"))
            continue
        # the results of a message's calls stand right after it
        check.none_open()
        calls = message.get("tool_calls")
        check.begin(number, calls if isinstance(calls, list) else ())
    check.none_open()


class _Check:
    """The calls that have no result yet.

    Args:
        field: The field of the request with the messages.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._number = 0
        self._open: OrderedDict[str, None] = OrderedDict()
        # calls without identifiers, as of Ollama's clients: any result without a known name is theirs
        self._nameless = 0
        self._answered: set[str] = set()

    def begin(self, index: int, calls: Sequence[Any]) -> None:
        """A message of another role, with these calls."""
        if not calls:  # as most messages; none is open
            self._answered.clear()
            return
        names = [call.get("id") if isinstance(call, dict) else None for call in calls]
        self._open = OrderedDict.fromkeys(name for name in names if isinstance(name, str))
        self._nameless = sum(not isinstance(name, str) for name in names)
        self._number, self._answered = index, set()

    def result(self, index: int, identifier: Any) -> None:
        """A message with the result of a call."""
        if isinstance(identifier, str) and identifier in self._open:
            del self._open[identifier]
            self._answered.add(identifier)
        elif isinstance(identifier, str) and identifier in self._answered:
            return
        elif self._nameless:
            self._nameless -= 1
        elif isinstance(identifier, str):
            raise self._error(
                index,
                f"is the result of the tool call {short_text(identifier)}, and no message before it has such a "
                "call",
                "tool_call_id",
            )
        elif self._open:
            # a result without an identifier is that of the oldest open call
            self._open.popitem(last=False)
        else:
            raise self._error(
                index, "is the result of a tool, and no call before it lacks one", "role"
            )

    def none_open(self) -> None:
        """Raises an error if a call has no result."""
        if self._open or self._nameless:
            name = next(iter(self._open), None)
            call = "a tool call" if name is None else f"the tool call {short_text(name)}"
            raise self._error(
                self._number,
                f"has {call}, and no result of it comes after it; give a result for each call",
                "tool_calls",
            )

    def _error(self, index: int, text: str, name: str) -> ApiError:
        if self._field != "messages":  # its items have other numbers
            return ApiError(f"{self._field}: a message {text}", param=self._field)
        return ApiError(f"messages.{index} {text}", param=f"messages.{index}.{name}")
