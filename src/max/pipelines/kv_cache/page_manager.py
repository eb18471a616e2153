"""The pages of a KV cache: page tables, reference counts, prefix caching. No tensors.

A page is in one of three states:

- *in use*: in the table of one request, or of several that share a prefix;
- *cached*: in no table, but its keys and values may serve a request with the same first tokens;
- *empty*: in no table, without content.

Cached and empty pages are free. A new page is an empty one, else the cached one that was freed
first. Only full pages are shared, and a full page is never written again, so no write needs a copy.

With a `SwapArea` a cached page that is taken is copied to the host, and counts as cached: a request that needs it gets
another page, and the copy back.

Where all layers have a window, a table gives back the pages that no layer can see any more; their places stay, so that
page ``i`` is at index ``i``. A prefix is reused where the pages of its last window are cached::

    tokens   0 ……………………………… length - window + 1 ……… length
    table    returned  returned  held             held   held
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import RequestID
from max.pipelines.kv_cache.swap_area import SwapArea

Tokens = npt.NDArray[np.integer[Any]]


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than a request needs.

    Args:
        needed: The pages that it needs.
        free: The free pages.
        total: All pages.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"KV cache: {needed} more pages are needed, {free} of {total} are free")
        self.needed, self.free, self.total = needed, free, total


def pages_of(length: int, page_size: int) -> int:
    """The number of pages that hold a sequence.

    Args:
        length: Its tokens.
        page_size: Tokens per page.
    """
    return -(-length // page_size)


@dataclass
class _Table:
    """The page table of a request."""

    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """A hash per full page, of all tokens up to the page's end."""
    returned: int = 0
    """The first pages that are not held: they were given back, or never taken as the window has passed them."""
    reused: int = 0
    """Reused tokens that are not in the manager's count yet."""


class PageManager:
    """Hands out the pages of a cache.

    Args:
        num_pages: The number of pages.
        page_size: Tokens per page.
        enable_prefix_caching: Whether requests with the same first tokens share pages.
        window: The most tokens that a token sees in any layer, itself included; None: all before it.
        swap: Where cached pages go that are taken; None: they are lost.

    Raises:
        ValueError: ``num_pages``, ``page_size`` or ``window`` is less than 1.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = False,
        window: int | None = None,
        swap: SwapArea | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"PageManager: {num_pages} pages of {page_size} tokens; expected at least 1 of each"
            )
        if window is not None and window < 1:
            raise ValueError(f"PageManager: a window of {window} tokens; expected at least 1")
        self.num_pages, self.page_size, self.window = num_pages, page_size, window
        self.enable_prefix_caching, self.swap = enable_prefix_caching, swap
        self._tables: dict[RequestID, _Table] = {}
        self._users = [0] * num_pages
        # the free pages, the next one first; a prefix that is reused removes from the middle
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}
        self.reused_tokens = 0
        """Tokens that prefix caching has saved; a request counts from its first step."""

    @property
    def free_pages(self) -> int:
        """The number of pages in no table."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """The number of pages in a table."""
        return self.num_pages - len(self._free)

    @property
    def requests(self) -> list[RequestID]:
        """The requests that have a table, oldest first."""
        return list(self._tables)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tables

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty table.

        Args:
            request_id: The request.

        Raises:
            ValueError: It has one.
        """
        if request_id in self._tables:
            raise ValueError(f"KV cache: request {request_id} has a page table already")
        self._tables[request_id] = _Table()

    def pages(self, request_id: RequestID) -> list[int]:
        """The table of a request: page ``i`` holds its tokens from ``i * page_size`` on.

        A page that the window has passed is ``num_pages``, which is none.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has none.
        """
        return list(self._table(request_id).pages)

    def reuse_prefix(self, request_id: RequestID, tokens: Tokens, salt: bytes = b"") -> int:
        """Fills an empty table with cached pages that hold the first tokens of a request.

        At least one token is left to process, since its logits are needed.

        Args:
            request_id: The request; its table is empty.
            tokens: All its tokens.
            salt: What the cache depends on besides the tokens, at most 64 bytes.

        Returns:
            The number of tokens that are in the cache, a multiple of the page size.

        Raises:
            KeyError: The request has no table.
            ValueError: Its table is not empty.
        """
        table = self._table(request_id)
        if table.pages:
            raise ValueError(f"KV cache: request {request_id} has pages; a prefix comes first")
        if not self.enable_prefix_caching:
            return 0
        hashes = self._hashes(tokens, salt)
        first, end = self._cached_run(hashes)
        needed = hashes[first:end]
        if not self._has_room_for(needed):
            first, end = self._cached_run(hashes, on_device=True)
            needed = hashes[first:end]
        held = self._hold(needed)
        table.returned, table.hashes = first, hashes[:end]
        table.pages = [self.num_pages] * first + held
        table.reused = end * self.page_size
        return table.reused

    def _has_room_for(self, needed: list[bytes]) -> bool:
        """Whether pages are free for those of some hashes that are in the swap area."""
        on_device = [self._page_of_hash[h] for h in needed if h in self._page_of_hash]
        free = len(self._free) - sum(page in self._free for page in on_device)
        return len(needed) - len(on_device) <= free

    def _hold(self, needed: list[bytes]) -> list[int]:
        """The pages of some hashes, with one user more; those of the swap area are copied back."""
        for page_hash in needed:
            page = self._page_of_hash.get(page_hash)
            if page is not None:
                self._free.pop(page, None)
                self._users[page] += 1
        # taking a page may save another one: first all slots are held
        swapped = [h for h in needed if h not in self._page_of_hash]
        if swapped and self.swap is not None:
            for page_hash, slot in [(h, self.swap.hold(h)) for h in swapped]:
                page = self._take()
                self.swap.restore(slot, page)
                self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash
        return [self._page_of_hash[page_hash] for page_hash in needed]

    def _is_cached(self, page_hash: bytes, on_device: bool = False) -> bool:
        if page_hash in self._page_of_hash:
            return True
        return not on_device and self.swap is not None and page_hash in self.swap

    def _hashes(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        """The hashes of the full pages before the last token; without a window those of cached pages and one more."""
        hashes: list[bytes] = []
        for index in range((len(tokens) - 1) // self.page_size):
            hashes.append(self._hash(hashes[-1] if hashes else salt, tokens, index))
            if self.window is None and not self._is_cached(hashes[-1]):
                break
        return hashes

    def _cached_run(self, hashes: list[bytes], on_device: bool = False) -> tuple[int, int]:
        """The longest prefix whose last window is cached: its first page that is needed, and the number of its pages."""
        first, end, run = 0, 0, 0
        for index, page_hash in enumerate(hashes):
            if not self._is_cached(page_hash, on_device):
                run = index + 1
            elif run <= self._first_visible((index + 1) * self.page_size):
                first, end = self._first_visible((index + 1) * self.page_size), index + 1
        return first, end

    def _first_visible(self, length: int) -> int:
        """The first page that the token after `length` tokens sees."""
        if self.window is None:
            return 0
        return max(0, length - self.window + 1) // self.page_size

    def most_pages(self, length: int, step: int) -> int:
        """The most pages that a request holds at once.

        Args:
            length: The tokens of its whole sequence.
            step: The most tokens of a step.
        """
        pages = pages_of(length, self.page_size)
        if self.window is None:
            return pages
        return min(pages, pages_of(self.window - 1 + step, self.page_size) + 1)

    def return_unseen(self, request_id: RequestID, length: int) -> list[int]:
        """Gives back the pages of a request that the window has passed.

        Args:
            request_id: The request.
            length: Its tokens that were processed: the next step begins after them.

        Returns:
            The pages that it no longer holds.

        Raises:
            KeyError: The request has no table.
        """
        table = self._table(request_id)
        end = min(self._first_visible(length), len(table.pages))
        unseen = table.pages[table.returned : end]
        for page in unseen:
            self._drop(page)
        if unseen:
            table.pages[table.returned : end] = [self.num_pages] * len(unseen)
            table.returned = end
        return unseen

    def missing_pages(self, request_id: RequestID, length: int) -> int:
        """The number of pages that a request lacks to hold a number of tokens.

        Args:
            request_id: The request.
            length: The tokens.

        Raises:
            KeyError: It has no table.
        """
        held = len(self._table(request_id).pages)
        return max(0, pages_of(length, self.page_size) - held)

    def reserve(self, request_id: RequestID, length: int) -> list[int]:
        """Extends a request's table to hold a number of tokens; all or nothing.

        Args:
            request_id: The request.
            length: The tokens, including those that the table holds already.

        Returns:
            The new pages.

        Raises:
            KeyError: The request has no table.
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        missing = self.missing_pages(request_id, length)
        if missing > len(self._free):
            raise OutOfPagesError(missing, len(self._free), self.num_pages)
        new = [self._take() for _ in range(missing)]
        self._tables[request_id].pages.extend(new)
        return new

    def commit(self, request_id: RequestID, tokens: Tokens, salt: bytes = b"") -> None:
        """Records tokens as cached; full pages can serve other requests from now on.

        Args:
            request_id: The request.
            tokens: All its tokens that are in the cache, from the first on.
            salt: As in :meth:`reuse_prefix`.

        Raises:
            KeyError: The request has no table.
            ValueError: The table does not hold that many.
        """
        table = self._table(request_id)
        if len(tokens) > len(table.pages) * self.page_size:
            raise ValueError(
                f"KV cache: {len(tokens)} tokens of request {request_id} in "
                f"{len(table.pages)} pages of {self.page_size}"
            )
        if not self.enable_prefix_caching:
            return
        self.reused_tokens += table.reused
        table.reused = 0
        for index in range(len(table.hashes), len(tokens) // self.page_size):
            parent = table.hashes[-1] if table.hashes else salt
            page_hash = self._hash(parent, tokens, index)
            table.hashes.append(page_hash)
            # of two requests that computed equal pages, the first one's page serves others
            if page_hash not in self._page_of_hash and index >= table.returned:
                page = table.pages[index]
                self._page_of_hash[page_hash] = page
                self._hash_of_page[page] = page_hash

    def release(self, request_id: RequestID) -> None:
        """Removes a request's table. Its full pages stay cached until they are needed.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has no table.
        """
        table = self._table(request_id)
        del self._tables[request_id]
        # the last page is freed first: more requests share the beginning of a prefix than its end
        for page in reversed(table.pages[table.returned :]):
            self._drop(page)

    def _drop(self, page: int) -> None:
        """Takes a page out of a table; a page that nobody else uses is free: the next one if it is empty."""
        self._users[page] -= 1
        if self._users[page] == 0:
            self._free[page] = None
            if page not in self._hash_of_page:
                self._free.move_to_end(page, last=False)

    def forget_prefixes(self) -> None:
        """Makes all cached pages empty, and lets no page in use serve another request."""
        self._page_of_hash.clear()
        self._hash_of_page.clear()
        if self.swap is not None:
            self.swap.clear()

    def check(self) -> None:
        """Checks that every page is in exactly one state; for tests.

        Raises:
            AssertionError: A page is lost or doubled.
        """
        users = [0] * self.num_pages
        for table in self._tables.values():
            held = table.pages[table.returned :]
            assert len(set(held)) == len(held), "a page twice in one table"
            assert len(table.hashes) <= len(table.pages), "more hashes than pages"
            assert set(table.pages[: table.returned]) <= {self.num_pages}, "a returned page is held"
            for page in held:
                users[page] += 1
        assert users == self._users, "user counts differ from the tables"
        assert set(self._free) == {p for p, n in enumerate(users) if n == 0}, "a page is lost"
        assert {h: p for p, h in self._hash_of_page.items()} == self._page_of_hash, "stale hash"
        if self.swap is not None:
            self.swap.check()

    def _table(self, request_id: RequestID) -> _Table:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"KV cache: request {request_id} has no page table") from None

    def _take(self) -> int:
        page, _ = self._free.popitem(last=False)
        page_hash = self._hash_of_page.pop(page, None)
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            if self.swap is not None:
                self.swap.save(page_hash, page)
        self._users[page] = 1
        return page

    def _hash(self, parent: bytes, tokens: Tokens, index: int) -> bytes:
        """The hash of a page's tokens and of all before them, which `parent` stands for."""
        block = tokens[index * self.page_size : (index + 1) * self.page_size]
        data = np.ascontiguousarray(block, dtype=np.int64).tobytes()
        return hashlib.blake2b(data, digest_size=16, key=parent).digest()
