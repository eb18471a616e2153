"""The page tables of requests over groups of layers, and prefix caching. No tensors.

A group contains the layers of one shape and one window. It has a pool of pages (`PagePool`), and a request has one
page table per pool. All tables of a request have the same length: if the window of a group has passed a page, the
page is released, but its table entry stays, so that page ``i`` is always at index ``i``. A prefix can be reused if
each group has cached the pages of the prefix's last window::

    tokens                  0 ……………………………… length - window + 1 ……… length
    table without a window  held      held     held             held   held
    table with a window     returned  returned held             held   held
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max.interfaces import RequestID
from max.pipelines.kv_cache.known_pages import Found, KnownPages, Miss
from max.pipelines.kv_cache.page_pool import PagePool, pages_of
from max.pipelines.kv_cache.page_tables import (
    Contents,
    GroupTable,
    OutOfPagesError,
    PageTable,
    Tail,
    Tokens,
    contents_within,
    page_hash_of,
    tail_hash_of,
)  # fmt: skip
from max.pipelines.kv_cache.prefix_lookup import PrefixLookup

if TYPE_CHECKING:
    from max.pipelines.kv_cache import swap_area
else:
    swap_area = lazy_module("max.pipelines.kv_cache.swap_area")


class PageManager:
    """Allocates the pages of a cache to requests.

    Args:
        num_pages: The number of pages of the first group of layers.
        page_size: Tokens per page, in all groups.
        enable_prefix_caching: Whether requests with equal first tokens share pages.
        window: The window of the first group, as in `PagePool`.
        swap: The swap area of the first group, as in `PagePool`.
        more: The pools of further groups.
        most_known: As of `KnownPages`; None: four times the pages of the largest group.

    Raises:
        ValueError: ``num_pages``, ``page_size`` or ``window`` is less than 1.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = False,
        window: int | None = None,
        swap: swap_area.SwapArea | None = None,
        more: Sequence[PagePool] = (),
        most_known: int | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"PageManager: {num_pages} pages of {page_size} tokens; expected at least 1 of each"
            )
        self.page_size, self.enable_prefix_caching = page_size, enable_prefix_caching
        self.pools = (PagePool(num_pages, window, swap), *more)
        """The pools of all groups."""
        self._lookup = PrefixLookup(self.pools, page_size)
        largest = max(pool.num_pages for pool in self.pools)
        self._known = KnownPages(4 * largest if most_known is None else most_known)
        self._windowed = any(pool.window is not None for pool in self.pools)
        self._tables: dict[RequestID, PageTable] = {}
        self._claims = 0
        self.reused_tokens = 0
        """The number of tokens that prefix caching saved; a request counts from its first step on."""

    @property
    def num_pages(self) -> int:
        """The number of pages of the first group."""
        return self.pools[0].num_pages

    @property
    def swap(self) -> swap_area.SwapArea | None:
        """The swap area of the first group."""
        return self.pools[0].swap

    @property
    def free_pages(self) -> int:
        """The number of pages in no table, of the group with the fewest."""
        return min(pool.free_pages for pool in self.pools)

    @property
    def used_pages(self) -> int:
        """The number of pages in tables, over all groups."""
        return sum(pool.num_pages - pool.free_pages for pool in self.pools)

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
            ValueError: The request already has one.
        """
        if request_id in self._tables:
            raise ValueError(f"KV cache: request {request_id} has a page table already")
        groups = [GroupTable() for _ in self.pools]
        self._tables[request_id] = PageTable(groups, number=self._claims)
        self._claims += 1

    def opening(self, request_id: RequestID) -> tuple[int, int]:
        """How many tables were opened before that of a request, and the number of reused tokens it started with.

        Raises:
            KeyError: The request has no table.
        """
        return (table := self._table(request_id)).number, table.prefix

    def pages(self, request_id: RequestID, group: int = 0) -> list[int]:
        """The table of a request: page ``i`` holds its tokens from ``i * page_size`` on.

        The entry of a page before the window is the number of pages of the pool, which is not a valid page.

        Args:
            request_id: The request.
            group: The group of layers.

        Raises:
            KeyError: The request has no table.
        """
        return list(self._table(request_id).groups[group].pages)

    def tables(self, request_id: RequestID) -> list[list[int]]:
        """The tables of a request, one per group, as in :meth:`pages`; the caller must not change them.

        Args:
            request_id: The request.

        Raises:
            KeyError: The request has no table.
        """
        return [group.pages for group in self._table(request_id).groups]

    def reuse_prefix(
        self,
        request_id: RequestID,
        tokens: Tokens,
        salt: bytes = b"",
        contents: Contents = (),
    ) -> int:
        """Fills an empty table with cached pages that hold the first tokens of a request.

        At least one token remains to be processed, as its logits are needed. In a group with a window, only the pages
        that the next token sees are added.

        Args:
            request_id: The request; its table is empty.
            tokens: All tokens of the request.
            salt: Identifies what all pages depend on besides the tokens, at most 64 bytes.
            contents: What tokens stand for; the pages from such a token on depend on it.

        Returns:
            The number of tokens that the tables of all groups now hold. Within a page they are those that a known
            page starts with, which is copied.

        Raises:
            KeyError: The request has no table.
            ValueError: Its table is not empty.
        """
        table = self._table(request_id)
        if len(table):
            raise ValueError(f"KV cache: request {request_id} has pages; a prefix comes first")
        if not self.enable_prefix_caching:
            return 0
        hashes = self._lookup.hashes(tokens, salt, contents)
        end = self._lookup.cached_pages(hashes)
        if not all(
            pool.has_room_for(hashes[self._lookup.first_visible(pool, end) : end])
            for pool in self.pools
        ):
            end = self._lookup.cached_pages(hashes, on_device=True)
        for pool, group in zip(self.pools, table.groups, strict=True):
            group.returned_pages = self._lookup.first_visible(pool, end)
            held = pool.hold(hashes[group.returned_pages : end])
            # num_pages stands for a page that the window has passed: no kernel reads it
            group.pages = [pool.num_pages] * group.returned_pages + held
        # the chain of hashes goes on from here when the next page is full
        table.hashes = hashes[:end]
        parent = table.hashes[-1] if end else salt
        begin = end * self.page_size
        next_tokens = tokens[begin : min(begin + self.page_size, len(tokens) - 1)]
        within = contents_within(contents, end, self.page_size)
        found = self._known.find(parent, next_tokens, within, self._is_cached, self._can_be_copied)
        self._known.touch([*table.hashes, found.page_hash])
        # a page that is not full is copied, as its owner still writes to it
        copied = found.length if self._add_copy(table, found) else 0
        table.reused_tokens = table.prefix = begin + copied
        table.miss = self._known.miss(tokens, salt, table.prefix, found, copied)
        return table.prefix

    def cached_length(self, tokens: Tokens, salt: bytes = b"", contents: Contents = ()) -> int:
        """The number of first tokens that :meth:`reuse_prefix` would find in full pages.

        Args:
            tokens: All tokens of the request.
            salt: As in :meth:`reuse_prefix`.
            contents: As in :meth:`reuse_prefix`.
        """
        if not self.enable_prefix_caching:
            return 0
        hashes = self._lookup.hashes(tokens, salt, contents)
        return self._lookup.cached_pages(hashes) * self.page_size

    def miss(self, request_id: RequestID) -> Miss | None:
        """Why the first tokens of a request were not in the cache; None if all but the last were.

        Args:
            request_id: The request; its prefix was looked up.

        Raises:
            KeyError: The request has no table.
        """
        return self._table(request_id).miss

    def _is_cached(self, page_hash: bytes) -> bool:
        return all(pool.is_cached(page_hash) for pool in self.pools)

    def _can_be_copied(self, page_hash: bytes) -> bool:
        # the swap area has full pages only to restore
        return all(pool.is_cached(page_hash, on_device=True) for pool in self.pools)

    def _add_copy(self, table: PageTable, found_pages: Found) -> bool:
        """Adds a copy of the start of a cached page to all tables of a request, or to none."""
        pages: list[int] = []
        for pool in self.pools:
            content, length = found_pages.page_hash, found_pages.length
            page = None if content is None else pool.copy_content(content, length)
            if page is None:
                # all groups or none: the tables of a request have equally many pages
                for taken, owner in zip(pages, self.pools, strict=False):
                    owner.drop(taken)
                return False
            pages.append(page)
        for page, group in zip(pages, table.groups, strict=True):
            group.pages.append(page)
        return True

    def page_shortage(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run because it needs more pages than a group has.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.

        Returns:
            The maximum number of pages that it holds at once, and the number of pages of that group; None: all groups
            have enough.
        """
        for pool in self.pools:
            needed = pool.most_pages(length, step, self.page_size)
            if needed > pool.num_pages:
                return needed, pool.num_pages
        return None

    def return_unseen(self, request_id: RequestID, length: int) -> int:
        """Releases the pages of a request that the windows have passed.

        Args:
            request_id: The request.
            length: The number of processed tokens; the next step begins after them.

        Returns:
            The number of released pages, over all groups.

        Raises:
            KeyError: The request has no table.
        """
        groups, count = self._table(request_id).groups, 0
        if not self._windowed:
            return 0
        for pool, group in zip(self.pools, groups, strict=True):
            end = min(pool.first_visible(length, self.page_size), len(group.pages))
            unseen = group.pages[group.returned_pages : end]
            for page in unseen:
                pool.drop(page)
            if unseen:
                group.pages[group.returned_pages : end] = [pool.num_pages] * len(unseen)
                group.returned_pages = end
                count += len(unseen)
        return count

    def missing_pages(self, request_id: RequestID, length: int) -> int:
        """The number of pages that a request lacks to hold a number of tokens, the same in each group.

        Args:
            request_id: The request.
            length: The number of tokens.

        Raises:
            KeyError: It has no table.
        """
        return max(0, pages_of(length, self.page_size) - len(self._table(request_id)))

    def reserve(self, request_id: RequestID, length: int) -> list[int]:
        """Extends a request's tables to hold a number of tokens, in all groups or in none.

        Args:
            request_id: The request.
            length: The number of tokens, including those that the tables already hold.

        Returns:
            The new pages of the first group.

        Raises:
            KeyError: The request has no table.
            OutOfPagesError: Too few pages of a group are free; nothing was changed.
        """
        missing = pages_of(length, self.page_size) - len(self._table(request_id))
        if missing <= 0:
            return []
        # check all groups before taking pages of any, so that a failure changes nothing
        for pool in self.pools:
            if missing > pool.free_pages:
                raise OutOfPagesError(missing, pool.free_pages, pool.num_pages)
        groups = self._tables[request_id].groups
        for pool, group in zip(self.pools, groups, strict=True):
            group.pages.extend([pool.take() for _ in range(missing)])
        return groups[0].pages[len(groups[0].pages) - missing :]

    def commit(
        self,
        request_id: RequestID,
        tokens: Tokens,
        salt: bytes = b"",
        contents: Contents = (),
    ) -> None:
        """Records that tokens are cached; from now on other requests can reuse the full pages.

        Args:
            request_id: The request.
            tokens: All tokens of the request that are in the cache, from the first on.
            salt: As in :meth:`reuse_prefix`.
            contents: As in :meth:`reuse_prefix`; those after the tokens have no effect.

        Raises:
            KeyError: The request has no table.
            ValueError: The table does not hold that many tokens.
        """
        table = self._table(request_id)
        if len(tokens) > len(table) * self.page_size:
            raise ValueError(
                f"KV cache: {len(tokens)} tokens of request {request_id} in "
                f"{len(table)} pages of {self.page_size}"
            )
        if not self.enable_prefix_caching:
            return
        self.reused_tokens += table.reused_tokens
        table.reused_tokens = 0
        # a view: the tokens are copied once, when the request ends, instead of once a step
        table.text = tokens, salt, contents
        # most steps fill no page
        for index in range(len(table.hashes), len(tokens) // self.page_size):
            parent = table.hashes[-1] if table.hashes else salt
            page_hash = page_hash_of(parent, tokens, index, self.page_size, contents)
            table.hashes.append(page_hash)
            begin = index * self.page_size
            page_tokens = tokens[begin : begin + self.page_size]
            self._known.add(
                parent, page_hash, page_tokens, contents_within(contents, index, self.page_size)
            )
            for pool, group in zip(self.pools, table.groups, strict=True):
                if index >= group.returned_pages:
                    pool.share(group.pages[index], page_hash)

    def truncate(self, request_id: RequestID, length: int) -> int:
        """Removes the last tokens of a request from its tables, and releases the pages after the others.

        A full page is never written again, as other requests may read it: if the new length is within one, the page is
        released too. If a window has passed pages that the next token would see, all pages are released. The request
        reads the tokens after the returned number again.

        Args:
            request_id: The request.
            length: The number of tokens to keep, of those that are in the cache.

        Returns:
            The number of tokens that the tables of all groups still hold, at most `length`.

        Raises:
            KeyError: The request has no table.
            ValueError: The tables do not hold that many tokens.
        """
        table, size = self._table(request_id), self.page_size
        if not 0 <= length <= len(table) * size:
            raise ValueError(
                f"KV cache: request {request_id} is cut to {length} tokens; its tables hold {len(table) * size}"
            )
        kept = length // size * size if length < len(table.hashes) * size else length
        groups = list(zip(self.pools, table.groups, strict=True))
        if any(group.returned_pages > pool.first_visible(kept, size) for pool, group in groups):
            kept = 0
        pages = pages_of(kept, size)
        for pool, group in groups:
            # the last page first, as in `release`
            for page in reversed(group.pages[max(pages, group.returned_pages) :]):
                pool.drop(page)
            del group.pages[pages:]
            group.returned_pages = min(group.returned_pages, pages)
        # these pages are written again, maybe with other tokens
        del table.hashes[kept // size :]
        table.reused_tokens = min(table.reused_tokens, kept)
        table.text = None
        return kept

    def trim(self, request_id: RequestID, length: int) -> None:
        """Releases the pages that a request does not need: those that the windows have passed, and those after its
        tokens, which were reserved for tokens that were not accepted.

        Args:
            request_id: The request.
            length: The number of tokens in the cache.

        Raises:
            KeyError: The request has no table.
        """
        if self._windowed:
            self.return_unseen(request_id, length)
        if len(self._table(request_id).groups[0].pages) * self.page_size >= length + self.page_size:
            self.truncate(request_id, length)

    def release(self, request_id: RequestID) -> None:
        """Removes a request's tables. Its full pages stay cached until their memory is needed.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has no table.
        """
        table = self._table(request_id)
        del self._tables[request_id]
        tail = table.tail(self.page_size)
        if tail is not None and not table.is_forgotten:
            self._share_tail(table, tail)
        for pool, group in zip(self.pools, table.groups, strict=True):
            # free the last page first, as cached pages are reused in this order and more requests share the start of a
            # prefix
            for page in reversed(group.pages[group.returned_pages :]):
                pool.drop(page)

    def _share_tail(self, table: PageTable, tail: Tail) -> None:
        """Keeps the last page of a request, which is not full, for sequences that go on after its tokens."""
        index, groups = len(table.hashes), zip(self.pools, table.groups, strict=True)
        # a window passes this page if tokens after it are not shared, as those of an image without a hash
        if not all(p.copy and g.returned_pages <= index for p, g in groups):
            return
        page_hash = tail_hash_of(tail)
        for pool, group in zip(self.pools, table.groups, strict=True):
            pool.share_part(group.pages[index], page_hash)
        self._known.add(tail.parent, page_hash, tail.tokens, tail.contents)

    def forget_prefixes(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
        self._known.forget()
        for table in self._tables.values():
            table.is_forgotten = True
        for pool in self.pools:
            pool.forget()

    def check(self) -> None:
        """Checks that every page is in exactly one state; for tests.

        Raises:
            AssertionError: A page is lost or counted twice.
        """
        for number, pool in enumerate(self.pools):
            users: list[int] = []
            for table in self._tables.values():
                group = table.groups[number]
                held = group.pages[group.returned_pages :]
                assert len(set(held)) == len(held), "a page twice in one table"
                assert len(group.pages) == len(table), "tables of two lengths"
                assert len(table.hashes) <= len(table), "more hashes than pages"
                returned = set(group.pages[: group.returned_pages])
                assert returned <= {pool.num_pages}, "a returned page is held"
                users += held
            pool.check(users)

    def _table(self, request_id: RequestID) -> PageTable:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"KV cache: request {request_id} has no page table") from None
