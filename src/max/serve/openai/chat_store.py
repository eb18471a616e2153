"""Keeps the chat completions that clients let store, in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from max.serve.openai.responses.store import MOST_BYTES, MOST_RESPONSES


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


class ChatStore:
    """The latest completions; the oldest ones are dropped where they take too much memory.

    Args:
        most_bytes: The maximum size of all.
        most_chats: The maximum number of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_chats: int = MOST_RESPONSES) -> None:
        self._most_bytes, self._most_chats = most_bytes, most_chats
        self._chats: OrderedDict[str, StoredChat] = OrderedDict()
        self._bytes = 0

    def put(self, chat: StoredChat) -> None:
        """Keeps a completion, in the place of one with its identifier, unless it alone is too large.

        Args:
            chat: The completion.
        """
        identifier = chat.completion["id"]
        before = self._chats.pop(identifier, None)
        self._bytes -= 0 if before is None else before.size
        # no reason to drop all others
        if chat.size > self._most_bytes:
            return
        self._chats[identifier] = chat
        self._bytes += chat.size
        while self._bytes > self._most_bytes or len(self._chats) > self._most_chats:
            self._bytes -= self._chats.popitem(last=False)[1].size

    def find(self, identifier: str, client: str) -> StoredChat | None:
        """A completion of a client; None if it is not kept, or another client's.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = self._chats.get(identifier)
        return None if found is None or found.client != client else found

    def of_client(self, client: str) -> list[StoredChat]:
        """The completions of a client, the oldest first.

        Args:
            client: The client.
        """
        found = [each for each in self._chats.values() if each.client == client]
        return sorted(found, key=lambda each: each.completion["created"])

    def delete(self, identifier: str, client: str) -> bool:
        """Drops a completion; whether it was there.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = self.find(identifier, client)
        if found is not None:
            del self._chats[identifier]
            self._bytes -= found.size
        return found is not None
