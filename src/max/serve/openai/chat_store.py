"""Keeps the chat completions that clients let store, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from max.serve.openai.responses.client_store import ClientStore


@dataclass(frozen=True)
class StoredChat:
    """A chat completion and its conversation.

    Args:
        client: Who may read it.
        completion: The completion, with the metadata.
        messages: The messages of the request.
        size: The bytes of both.
    """

    client: str
    completion: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ChatStore(ClientStore[StoredChat]):
    """The latest completions; the oldest ones are dropped where they take too much memory."""

    def of_client(self, client: str) -> list[StoredChat]:
        """The completions of a client, the oldest first.

        Args:
            client: The client.
        """
        found = [each for each in self._entries.values() if each.client == client]
        return sorted(found, key=lambda each: each.completion["created"])
