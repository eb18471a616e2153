"""Keeps the items of responses in memory, so that later requests can go on with them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 64 << 20
MOST_RESPONSES = 4096


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


class ResponseStore:
    """The latest responses; the oldest ones are dropped where they take too much memory.

    A response that was dropped or deleted takes memory as long as one that is kept goes on with it.

    Args:
        most_bytes: The maximum size of all.
        most_responses: The maximum number of them.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_responses: int = MOST_RESPONSES) -> None:
        self._most_bytes, self._most_responses = most_bytes, most_responses
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        # how many others keep a response alive: the table, and those that go on with it
        self._holders: Counter[StoredResponse] = Counter()
        self._items: dict[tuple[str, str], dict[str, Any]] = {}
        """The items of inputs and responses, by their client and identifier."""
        self._bytes = 0

    def put(self, identifier: str, response: StoredResponse) -> None:
        """Keeps a response, unless its conversation alone is too large.

        Args:
            identifier: Identifies it.
            response: The response.
        """
        self._drop(identifier)
        # no reason to drop all others
        if sum(each.size for each in response.chain()) > self._most_bytes:
            return
        self._responses[identifier] = response
        self._items.update(response.named_items())
        for each in response.chain():
            self._holders[each] += 1
            if self._holders[each] > 1:
                break
            self._bytes += each.size
        while self._bytes > self._most_bytes or len(self._responses) > self._most_responses:
            self._drop(next(iter(self._responses)))

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
        self._drop(identifier)
        return True

    def find_item(self, identifier: str, client: str) -> dict[str, Any] | None:
        """An item of a client's responses or their inputs; None if it is not kept.

        Args:
            identifier: Identifies it.
            client: The client.
        """
        return self._items.get((client, identifier))

    def _drop(self, identifier: str) -> None:
        """Removes a response from the table, and from the count what nothing keeps alive without it."""
        dropped = self._responses.pop(identifier, None)
        for key, item in () if dropped is None else dropped.named_items():
            # a later response may have an item of the same name
            if self._items.get(key) is item:
                del self._items[key]
        for each in () if dropped is None else dropped.chain():
            self._holders[each] -= 1
            if self._holders[each]:
                return
            del self._holders[each]
            self._bytes -= each.size
