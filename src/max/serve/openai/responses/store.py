"""Keeps the items of responses in memory, so that later requests can go on with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from max.serve.openai.responses.client_store import MOST_BYTES, MOST_ENTRIES, ClientStore


@dataclass(frozen=True, eq=False)
class StoredResponse:
    """A response and the conversation up to it.

    Args:
        client: Who may read it.
        previous: The response that it goes on with, which it keeps alive; None: it begins a conversation.
        inputs: The items of its input.
        response: The response, with its items.
        size: The bytes of its input and of the response.
    """

    client: str
    previous: StoredResponse | None
    inputs: tuple[dict[str, Any], ...]
    response: dict[str, Any]
    size: int

    def chain(self) -> Iterator[StoredResponse]:
        """This response and those before it, the latest first."""
        each: StoredResponse | None = self
        while each is not None:
            yield each
            each = each.previous

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        """The items before its input."""
        return () if self.previous is None else self.previous.items

    @property
    def items(self) -> tuple[dict[str, Any], ...]:
        """The items of the conversation, with those of the response."""
        responses = reversed(list(self.chain()))
        return tuple([i for each in responses for i in (*each.inputs, *each.response["output"])])

    def named_items(self) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
        """The items of its input and of the response, each after its client and identifier."""
        for item in (*self.inputs, *self.response["output"]):
            if isinstance(identifier := item.get("id"), str):
                yield (self.client, identifier), item


class ResponseStore(ClientStore[StoredResponse]):
    """The latest responses; those not used for the longest are dropped where they take too much memory.

    A response that was dropped or deleted takes memory as long as one that is kept goes on with it.

    Args:
        most_bytes: The maximum size of all.
        most_entries: The maximum number of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES) -> None:
        super().__init__(most_bytes, most_entries)
        # how many others keep a response alive: the table, and those that go on with it
        self._holders: Counter[StoredResponse] = Counter()
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        """The items of inputs and responses, by their client and identifier."""

    def find(self, identifier: str, client: str) -> StoredResponse | None:
        """A response of a client, now the last to be dropped; None if it is not kept, or another client's.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        found = super().find(identifier, client)
        if found is not None:
            self._entries.move_to_end(identifier)
        return found

    def find_item(self, identifier: str, client: str) -> dict[str, Any] | None:
        """An item of a client's responses or their inputs; None if it is not kept.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        return self._items.get((client, identifier))

    def _size_alone(self, entry: StoredResponse) -> int:
        return sum(each.size for each in entry.chain())

    def _hold(self, entry: StoredResponse) -> int:
        self._items.update(entry.named_items())
        added = 0
        for each in entry.chain():
            self._holders[each] += 1
            # in memory already, and so is all before it
            if self._holders[each] > 1:
                break
            added += each.size
        return added

    def _release(self, entry: StoredResponse) -> int:
        for key, item in entry.named_items():
            # a later response may have an item of the same name
            if self._items.get(key) is item:
                del self._items[key]
        freed = 0
        for each in entry.chain():
            self._holders[each] -= 1
            # another response goes on with this one, so it keeps all before it too
            if self._holders[each]:
                break
            del self._holders[each]
            freed += each.size
        return freed
