"""Which page of the KV cache holds what: page tables, reference counts, prefix caching. No tensors.

A page is in one of three states:

- *in use*: in the table of one request or more (more than one only for pages of a common prefix);
- *cached*: in no table, but what it holds may serve a request that begins with the same tokens;
- *empty*: in no table, and holds nothing of use.

Cached and empty pages are free. A new page is an empty one, else the cached one that was freed
first. Only full pages are ever shared, and a full page is never written again, so nothing needs to
be copied on a write.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import RequestID

Tokens = npt.NDArray[np.integer[Any]]


class OutOfPagesError(RuntimeError):
    """There are fewer free pages than a request needs.

    Args:
        needed: The pages that it needs.
        free: The free pages.
        total: All pages.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"KV cache: {needed} more pages are needed, {free} of {total} are free")
        self.needed, self.free, self.total = needed, free, total


@dataclass
class _Entry:
    """What a request holds."""

    pages: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """The hashes of its full pages so far: each stands for all tokens up to the page's end."""


class PageManager:
    """Hands out the pages of a cache.

    Args:
        num_pages: The number of pages.
        page_size: Tokens a page.
        enable_prefix_caching: Whether requests with a common beginning share its pages.

    Raises:
        ValueError: ``num_pages`` or ``page_size`` is less than 1.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = False) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"PageManager: {num_pages} pages of {page_size} tokens; expected at least 1 of each"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._entries: dict[RequestID, _Entry] = {}
        self._users = [0] * num_pages
        # free pages, the next to be taken first; an ordered dictionary also removes from the middle
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}
        self.reused_tokens = 0
        """Tokens that prefix caching has saved so far."""

    @property
    def free_pages(self) -> int:
        """Pages that are in no table."""
        return len(self._free)

    @property
    def used_pages(self) -> int:
        """Pages that are in a table."""
        return self.num_pages - len(self._free)

    @property
    def requests(self) -> list[RequestID]:
        """The requests that have a table, oldest first."""
        return list(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty table.

        Args:
            request_id: The request.

        Raises:
            ValueError: It has one.
        """
        if request_id in self._entries:
            raise ValueError(f"KV cache: request {request_id} has a page table already")
        self._entries[request_id] = _Entry()

    def pages(self, request_id: RequestID) -> list[int]:
        """The table of a request: page ``i`` holds its tokens from ``i * page_size`` on.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has none.
        """
        return list(self._entry(request_id).pages)

    def reuse_prefix(self, request_id: RequestID, tokens: Tokens, salt: bytes = b"") -> int:
        """Fills an empty table with pages that hold the beginning of a request's tokens.

        At least one token is left to process, since its logits are needed.

        Args:
            request_id: The request; its table is empty.
            tokens: All its tokens.
            salt: Besides the tokens, what the cache depends on (an adapter, images).

        Returns:
            The number of tokens that are in the cache, a multiple of the page size.

        Raises:
            KeyError: The request has no table.
            ValueError: Its table is not empty.
        """
        entry = self._entry(request_id)
        if entry.pages:
            raise ValueError(f"KV cache: request {request_id} has pages; a prefix comes first")
        if not self.enable_prefix_caching:
            return 0
        parent = salt
        for index in range((len(tokens) - 1) // self.page_size):
            parent = self._hash(parent, tokens, index)
            page = self._page_of_hash.get(parent)
            if page is None:
                break
            self._free.pop(page, None)
            self._users[page] += 1
            entry.pages.append(page)
            entry.hashes.append(parent)
        reused = len(entry.pages) * self.page_size
        self.reused_tokens += reused
        return reused

    def missing_pages(self, request_id: RequestID, length: int) -> int:
        """How many pages a request lacks to hold so many tokens.

        Args:
            request_id: The request.
            length: The tokens.

        Raises:
            KeyError: It has no table.
        """
        have = len(self._entry(request_id).pages)
        return max(0, -(-length // self.page_size) - have)

    def reserve(self, request_id: RequestID, length: int) -> list[int]:
        """Extends a request's table so that it holds so many tokens; all or nothing.

        Args:
            request_id: The request.
            length: The tokens, those that are in the table already included.

        Returns:
            The new pages.

        Raises:
            KeyError: The request has no table.
            OutOfPagesError: There are too few free pages; nothing was changed.
        """
        missing = self.missing_pages(request_id, length)
        if missing > len(self._free):
            raise OutOfPagesError(missing, len(self._free), self.num_pages)
        new = [self._take() for _ in range(missing)]
        self._entries[request_id].pages.extend(new)
        return new

    def commit(self, request_id: RequestID, tokens: Tokens, salt: bytes = b"") -> None:
        """Tells that tokens are in the cache; full pages can serve other requests from now on.

        Args:
            request_id: The request.
            tokens: All its tokens that are in the cache, from the first on.
            salt: As in :meth:`reuse_prefix`.

        Raises:
            KeyError: The request has no table.
            ValueError: The table does not hold so many.
        """
        entry = self._entry(request_id)
        full = len(tokens) // self.page_size
        if len(tokens) > len(entry.pages) * self.page_size:
            raise ValueError(
                f"KV cache: {len(tokens)} tokens of request {request_id} in "
                f"{len(entry.pages)} pages of {self.page_size}"
            )
        if not self.enable_prefix_caching:
            return
        for index in range(len(entry.hashes), full):
            parent = entry.hashes[-1] if entry.hashes else salt
            mark = self._hash(parent, tokens, index)
            entry.hashes.append(mark)
            # two requests may have computed the same page at the same time: the first one serves
            if mark not in self._page_of_hash:
                page = entry.pages[index]
                self._page_of_hash[mark] = page
                self._hash_of_page[page] = mark

    def release(self, request_id: RequestID) -> None:
        """Takes a request's table away. Its full pages stay cached until they are needed.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has no table.
        """
        entry = self._entry(request_id)
        del self._entries[request_id]
        # the last page first: a prefix's beginning is of use to more requests than its end
        for page in reversed(entry.pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free[page] = None
                if page not in self._hash_of_page:
                    self._free.move_to_end(page, last=False)

    def forget_prefixes(self) -> None:
        """Makes all cached pages empty, and lets no page in use serve another request."""
        self._page_of_hash.clear()
        self._hash_of_page.clear()

    def check(self) -> None:
        """Checks that every page is in exactly one state; for tests.

        Raises:
            AssertionError: A page is lost or doubled.
        """
        users = [0] * self.num_pages
        for entry in self._entries.values():
            assert len(set(entry.pages)) == len(entry.pages), "a page twice in one table"
            assert len(entry.hashes) <= len(entry.pages), "hashes of pages that are not there"
            for page in entry.pages:
                users[page] += 1
        assert users == self._users, "user counts differ from the tables"
        assert set(self._free) == {p for p, n in enumerate(users) if n == 0}, "a page is lost"
        assert {m: p for p, m in self._hash_of_page.items()} == self._page_of_hash, "stale hash"

    def _entry(self, request_id: RequestID) -> _Entry:
        try:
            return self._entries[request_id]
        except KeyError:
            raise KeyError(f"KV cache: request {request_id} has no page table") from None

    def _take(self) -> int:
        page, _ = self._free.popitem(last=False)
        mark = self._hash_of_page.pop(page, None)
        if mark is not None:
            del self._page_of_hash[mark]
        self._users[page] = 1
        return page

    def _hash(self, parent: bytes, tokens: Tokens, index: int) -> bytes:
        block = tokens[index * self.page_size : (index + 1) * self.page_size]
        data = np.ascontiguousarray(block, dtype=np.int64).tobytes()
        return hashlib.blake2b(data, digest_size=16, key=parent[:64]).digest()
