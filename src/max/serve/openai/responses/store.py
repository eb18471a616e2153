"""Keeps the items of responses in memory, so that later requests can go on with them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 64 << 20
MOST_RESPONSES = 4096


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation up to it.

    Args:
        client: Who may read it.
        history: The items before its input.
        inputs: The items of its input.
        response: The response, with its items.
        size: The bytes of its input and of the response.
    """

    client: str
    history: tuple[dict[str, Any], ...]
    inputs: tuple[dict[str, Any], ...]
    response: dict[str, Any]
    size: int

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The items of the conversation, with those of the response."""
        return (*self.history, *self.inputs, *self.response["output"])


class ResponseStore:
    """The latest responses; the oldest ones are dropped where they take too much memory.

    Args:
        most_bytes: The maximum size of all.
        most_responses: The maximum number of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_responses: int = MOST_RESPONSES) -> None:
        self._most_bytes, self._most_responses = most_bytes, most_responses
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, identifier: str, response: StoredResponse) -> None:
        """Keeps a response.

        Args:
            identifier: Identifies it.
            response: The response.
        """
        self._responses[identifier] = response
        self._bytes += response.size
        while self._bytes > self._most_bytes or len(self._responses) > self._most_responses:
            _, dropped = self._responses.popitem(last=False)
            self._bytes -= dropped.size

    def find(self, identifier: str, client: str) -> StoredResponse | None:
        """A response of a client; None if it is not kept, or another client's.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = self._responses.get(identifier)
        if found is None or found.client != client:
            return None
        # now the last to be dropped
        self._responses.move_to_end(identifier)
        return found

    def delete(self, identifier: str, client: str) -> bool:
        """Drops a response; whether it was there.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        if self.find(identifier, client) is None:
            return False
        self._bytes -= self._responses.pop(identifier).size
        return True
