"""Host memory for cached pages that do not fit into the device's cache. No tensors.

A cached page that is reallocated is first copied to a slot of the area. A request with equal first tokens, for example
one that was preempted, gets it back by a copy. A full area drops the page that was copied first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class PageCopies(Protocol):
    """Copies pages between the device and the slots of the area."""

    def save(self, page: int, slot: int) -> None:
        """Copies a page to a slot."""
        ...

    def restore(self, slot: int, page: int) -> None:
        """Copies a slot to a page."""
        ...


class SwapArea:
    """Maps the hashes of pages to slots.

    Args:
        num_slots: The number of slots.
        copies: Copies the pages.

    Raises:
        ValueError: There is no slot.
    """

    def __init__(self, num_slots: int, copies: PageCopies) -> None:
        if num_slots < 1:
            raise ValueError(f"SwapArea: {num_slots} slots; expected at least 1")
        self.num_slots, self._copies = num_slots, copies
        # in order of saving, the oldest first
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(num_slots)))
        self.saved, self.restored = 0, 0
        """The number of pages copied to the area, and back."""

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def save(self, page_hash: bytes, page: int) -> bytes | None:
        """Copies a page to the area, unless the area has its hash already.

        Args:
            page_hash: The hash of the page's tokens and of all before them.
            page: The page.

        Returns:
            The hash of the page that is lost by this, which may be the same one; None: none is.
        """
        if page_hash in self._slots:
            return None
        lost: bytes | None = None
        if not self._free:
            if not self._slots:
                return page_hash  # all slots are held for restoring
            lost, oldest = self._slots.popitem(last=False)
            self._free.append(oldest)
        slot = self._free.pop()
        self._copies.save(page, slot)
        self._slots[page_hash] = slot
        self.saved += 1
        return lost

    def hold(self, page_hash: bytes) -> int:
        """Removes a page from the area; its slot keeps the contents until :meth:`restore`.

        Args:
            page_hash: The hash of a page in the area.

        Returns:
            The slot.
        """
        # neither in `_slots` nor in `_free`: no `save` can take the slot before `restore`
        return self._slots.pop(page_hash)

    def restore(self, slot: int, page: int) -> None:
        """Copies a page back, and frees its slot.

        Args:
            slot: The slot, from :meth:`hold`.
            page: The page on the device.
        """
        self._copies.restore(slot, page)
        self._free.append(slot)
        self.restored += 1

    def clear(self) -> None:
        """Drops all pages."""
        self._free.extend(self._slots.values())
        self._slots.clear()

    def check(self) -> None:
        """Checks that each slot is free or holds one page; for tests.

        Raises:
            AssertionError: A slot is lost or counted twice.
        """
        slots = sorted([*self._free, *self._slots.values()])
        assert slots == list(range(self.num_slots)), "a slot is lost or doubled"
