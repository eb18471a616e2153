"""The pages of one group of layers: their users, their contents by hash, and the order of reuse. No tensors.

A page is in one of three states:

- *in use*: in the table of one request, or of several requests that share a prefix;
- *cached*: in no table, but its keys and values may serve a request with equal first tokens;
- *empty*: in no table, without content.

Cached and empty pages are free. An allocation takes an empty page, else the cached page that was freed first. Only
full pages are shared, and a full page is never written again, so no copy-on-write is needed.

With a `SwapArea`, a cached page that is reallocated is first copied to the host and still counts as cached: a request
that needs it gets another page, filled from the copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max.pipelines.kv_cache.page_changes import PageChanges

if TYPE_CHECKING:
    from max.pipelines.kv_cache import swap_area
else:
    swap_area = lazy_module("max.pipelines.kv_cache.swap_area")


def pages_of(length: int, page_size: int) -> int:
    """The number of pages that hold a sequence of `length` tokens.

    Args:
        length: The number of tokens.
        page_size: Tokens per page.
    """
    return -(-length // page_size)


def held_pages(length: int, window: int | None, step: int, page_size: int) -> int:
    """The maximum number of pages that a sequence holds at once: of all tokens, or of those that a step reads and those
    that its first one sees, wherever they begin.

    Args:
        length: The number of tokens of the whole sequence.
        window: As of `PagePool`.
        step: The maximum number of tokens per step, at least 1.
        page_size: Tokens per page.
    """
    if window is None:
        return pages_of(length, page_size)
    # the first of these tokens may be the last one of its page
    return pages_of(min(length, window - 1 + step + page_size - 1), page_size)


class PagePool:
    """The pages of the layers of one shape and one window.

    Args:
        num_pages: The number of pages.
        window: The number of tokens that a token sees in these layers, including itself; None: all earlier tokens.
        swap: Receives the contents of cached pages that are reallocated; None: these are lost.

    Raises:
        ValueError: ``num_pages`` or ``window`` is less than 1.
    """

    def __init__(
        self, num_pages: int, window: int | None = None, swap: swap_area.SwapArea | None = None
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"PagePool: {num_pages} pages; expected at least 1")
        if window is not None and window < 1:
            raise ValueError(f"PagePool: a window of {window} tokens; expected at least 1")
        self.num_pages, self.window, self.swap = num_pages, window, swap
        # by page: the number of tables that hold it
        self._users = [0] * num_pages
        # free pages in allocation order; ordered by key, as reuse of a prefix removes pages from the middle
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        # inverses of one another: of two pages with equal contents only one is in them
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}
        self._takes = [0] * num_pages
        self._partial: set[bytes] = set()
        """The contents of pages that are not full: they serve by copies, and only in this process."""
        self.changes: PageChanges | None = None
        """Notes the full contents that it gains and loses, the swap area included; None: nobody asks for them."""
        self.copy: Callable[[int, int, int], None] | None = None
        """Copies the first tokens of a page to another one: source, target, number; None: pages are not copied."""

    @property
    def free_pages(self) -> int:
        """The number of pages in no table."""
        return len(self._free)

    def first_visible(self, length: int, page_size: int) -> int:
        """The first page that the next token sees after `length` tokens.

        Args:
            length: The number of tokens.
            page_size: Tokens per page.
        """
        # a token sees itself and the `window - 1` tokens before it
        return 0 if self.window is None else max(0, length - self.window + 1) // page_size

    def most_pages(self, length: int, step: int, page_size: int) -> int:
        """The maximum number of pages that a request holds at once.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.
            page_size: Tokens per page.
        """
        return held_pages(length, self.window, step, page_size)

    def is_cached(self, page_hash: bytes, on_device: bool = False) -> bool:
        """Whether a page or the swap area has a content.

        Args:
            page_hash: The hash of the content.
            on_device: Whether to ignore the swap area.
        """
        if page_hash in self._page_of_hash:
            return True
        return not on_device and self.swap is not None and page_hash in self.swap

    def has_room_for(self, hashes: Sequence[bytes]) -> bool:
        """Whether enough pages are free to restore those contents that are only in the swap area.

        Args:
            hashes: The hashes of cached contents.
        """
        # free cached pages among `hashes` will be held themselves, so they cannot receive other contents
        on_device = [self._page_of_hash[h] for h in hashes if h in self._page_of_hash]
        free = len(self._free) - sum(page in self._free for page in on_device)
        return len(hashes) - len(on_device) <= free

    def hold(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of cached contents, each with one more user; contents in the swap area are copied back.

        Args:
            hashes: The hashes; the pool has room for them (:meth:`has_room_for`).
        """
        for page_hash in hashes:
            page = self._page_of_hash.get(page_hash)
            if page is not None:
                self._free.pop(page, None)
                self._users[page] += 1
        # `take` may swap out another page and drop the oldest slot, so hold all needed slots first
        if self.swap is not None:
            swapped = [h for h in hashes if h not in self._page_of_hash]
            for page_hash, slot in [(h, self.swap.hold(h)) for h in swapped]:
                page = self.take()
                self.swap.restore(slot, page)
                self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash
        return [self._page_of_hash[page_hash] for page_hash in hashes]

    def take(self) -> int:
        """Allocates a free page for new tokens, with one user; the caller has checked that one is free."""
        page, _ = self._free.popitem(last=False)
        # first: a reader in another thread sees the count change before the content does
        self._takes[page] += 1
        page_hash = self._hash_of_page.pop(page, None)
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            # a part serves by copies within the device, so the swap area has no use for it
            if page_hash in self._partial:
                self._partial.discard(page_hash)
            else:
                self._note_loss(page_hash if self.swap is None else self.swap.save(page_hash, page))
        self._users[page] = 1
        return page

    def _note_loss(self, page_hash: bytes | None) -> None:
        """Notes that neither a page nor the swap area has a content any more; None: nothing was lost."""
        if self.changes is None or page_hash is None or page_hash in self._page_of_hash:
            return
        self.changes.note(page_hash, False)

    def takes(self, page: int) -> int:
        """The number of times that a page was allocated, incremented before a cached page is overwritten; thread-safe.

        Args:
            page: The page.
        """
        return self._takes[page]

    def drop(self, page: int) -> None:
        """Removes a page from a table. A page in no other table becomes free; a page without content is allocated next.

        Args:
            page: The page.
        """
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free[page] = None
            if page not in self._hash_of_page:
                self._free.move_to_end(page, last=False)

    def share(self, page: int, page_hash: bytes) -> None:
        """Makes a full page available to other requests; of two pages with equal contents only the first is shared.

        Args:
            page: The page, in use.
            page_hash: The hash of its content.
        """
        if page_hash not in self._page_of_hash:
            self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash
            if self.changes is not None:
                self.changes.note(page_hash, True)

    def share_part(self, page: int, page_hash: bytes) -> None:
        """Keeps a page that is not full after its release, so that its content can be copied.

        Args:
            page: The page, in use by one table, which is about to drop it.
            page_hash: The hash of its content.
        """
        if page not in self._hash_of_page and page_hash not in self._page_of_hash:
            self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash
            self._partial.add(page_hash)

    def copy_content(self, page_hash: bytes, length: int) -> int | None:
        """Copies the start of a cached content to a page of its own, with one user; None if no page is free for it.

        Args:
            page_hash: The hash of the content, which is on the device.
            length: The number of its first tokens to copy.
        """
        source = self._page_of_hash[page_hash]
        # a source that is free itself needs a second free page
        if self.copy is None or len(self._free) <= (source in self._free):
            return None
        # held meanwhile, as the page that is taken is the one that was freed first
        (held,) = self.hold([page_hash])
        page = self.take()
        self.copy(held, page, length)
        self.drop(held)
        return page

    def cached_contents(self) -> list[tuple[bytes, int]]:
        """The full cached contents that no table holds, as hashes and pages, in allocation order."""
        pages = [(self._hash_of_page[p], p) for p in self._free if p in self._hash_of_page]
        return [entry for entry in pages if entry[0] not in self._partial]

    def with_content(self) -> list[tuple[bytes, int]]:
        """All contents that may serve a request, as hashes and pages; pages in tables come last.

        The first page of a table comes after its later pages, as it can serve the most requests.
        """
        # the first pages of a sequence come last, as a list that is too long loses its start
        held = [entry for entry in self._hash_of_page.items() if self._users[entry[0]]]
        return self.cached_contents() + [(page_hash, page) for page, page_hash in reversed(held)]

    def fill(self, page_hash: bytes) -> int | None:
        """A free page that counts as cached from now on; the caller writes its content.

        Args:
            page_hash: The hash of the content.

        Returns:
            The page; None if the content is already cached, or no empty page is free.
        """
        # empty pages come first: if the first one has a content, all have
        page = next(iter(self._free), None)
        if page is None or page in self._hash_of_page or page_hash in self._page_of_hash:
            return None
        # now it counts as freed just now, and is taken last
        self._free.move_to_end(page)
        self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash
        if self.changes is not None:
            self.changes.note(page_hash, True)
        return page

    def renew(self, page_hash: bytes) -> None:
        """Lets a cached content count as freed just now, if no table holds it.

        Args:
            page_hash: The hash of the content.
        """
        page = self._page_of_hash.get(page_hash)
        if page in self._free:
            self._free.move_to_end(page)

    def forget(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
        self._page_of_hash.clear()
        self._hash_of_page.clear()
        self._partial.clear()
        # memory that was written before is allocated first: the first write to memory takes long
        self._free = OrderedDict.fromkeys(
            sorted(self._free, key=lambda page: not self._takes[page])
        )
        if self.changes is not None:
            self.changes.forget()
        if self.swap is not None:
            self.swap.clear()

    def check(self, uses: Sequence[int]) -> None:
        """Checks that every page is in exactly one state; for tests.

        Args:
            uses: The pages of all tables; a page occurs once per user.

        Raises:
            AssertionError: A page is lost or counted twice.
        """
        users = [0] * self.num_pages
        for page in uses:
            users[page] += 1
        assert users == self._users, "user counts differ from the tables"
        assert set(self._free) == {p for p, n in enumerate(users) if n == 0}, "a page is lost"
        assert {h: p for p, h in self._hash_of_page.items()} == self._page_of_hash, "stale hash"
        assert self._partial <= set(self._page_of_hash), "a page that is not full is lost"
        if self.swap is not None:
            self.swap.check()
