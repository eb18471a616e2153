"""Queues that never block: the two ends, and helpers for the receiving end."""

from __future__ import annotations

import queue
import time
from typing import Protocol, TypeVar, runtime_checkable

PushItemType = TypeVar("PushItemType", contravariant=True)
PullItemType = TypeVar("PullItemType", covariant=True)
_Item = TypeVar("_Item")

# the polling interval: long enough not to occupy a core, short compared with a model step
_POLL_SECONDS = 0.0005


@runtime_checkable
class MAXPushQueue(Protocol[PushItemType]):
    """The sending end of a queue that never blocks."""

    def put_nowait(self, item: PushItemType) -> None:
        """Puts an item into the queue, or raises at once if the queue is full.

        Args:
            item: The item to send.
        """
        ...


@runtime_checkable
class MAXPullQueue(Protocol[PullItemType]):
    """The receiving end of a queue that never blocks."""

    def get_nowait(self) -> PullItemType:
        """Removes and returns the next item.

        Raises:
            queue.Empty: The queue is empty.
        """
        ...


def drain_queue(pull_queue: MAXPullQueue[_Item], max_items: int | None = None) -> list[_Item]:
    """Removes and returns the items of a queue, without waiting.

    Args:
        pull_queue: The queue.
        max_items: The maximum number of items; None: all.

    Returns:
        The items in their order; an empty list when the queue is empty.

    Raises:
        ValueError: ``max_items`` is negative.
    """
    if max_items is not None and max_items < 0:
        raise ValueError(f"drain_queue: max_items is {max_items}; expected None or at least 0")
    items: list[_Item] = []
    while max_items is None or len(items) < max_items:
        try:
            items.append(pull_queue.get_nowait())
        except queue.Empty:
            break
    return items


def get_blocking(pull_queue: MAXPullQueue[_Item]) -> _Item:
    """Removes and returns the next item; waits while the queue is empty.

    Args:
        pull_queue: The queue.
    """
    while True:
        try:
            return pull_queue.get_nowait()
        except queue.Empty:
            time.sleep(_POLL_SECONDS)
