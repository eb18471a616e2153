"""Finds the first tokens of a request among the cached pages of all groups of layers. No tensors.

A prefix is usable if each group has cached the pages of the prefix's last window: all of its pages in a group without a
window.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.page_tables import Contents, Tokens, page_hash_of


class PrefixLookup:
    """Looks up prefixes; takes no page.

    Args:
        pools: The pages of each group of layers.
        page_size: Tokens per page.
    """

    def __init__(self, pools: Sequence[PagePool], page_size: int) -> None:
        self._pools, self._page_size = pools, page_size

    def hashes(self, tokens: Tokens, salt: bytes, contents: Contents) -> list[bytes]:
        """The hashes of the full pages before the last token, up to the first that a group without a window lacks.

        Args:
            tokens: All tokens of the request.
            salt: Identifies what all pages depend on besides the tokens.
            contents: What tokens stand for.
        """
        unwindowed = [pool for pool in self._pools if pool.window is None]
        hashes: list[bytes] = []
        for index in range((len(tokens) - 1) // self._page_size):
            parent = hashes[-1] if hashes else salt
            hashes.append(page_hash_of(parent, tokens, index, self._page_size, contents))
            # no later page can help: hashes are chained, and such a group needs all of them
            if not all(pool.is_cached(hashes[-1]) for pool in unwindowed):
                break
        return hashes

    def cached_pages(self, hashes: list[bytes], on_device: bool = False) -> int:
        """The length in pages of the longest prefix whose last window is cached in every group.

        Args:
            hashes: The hashes of the first pages of a request.
            on_device: Whether to ignore swap areas.
        """
        # groups have different windows; a prefix is usable where all of them have what the next token sees
        ends = [self._cached_ends(pool, hashes, on_device) for pool in self._pools]
        return max(set.intersection(*ends))

    def _cached_ends(self, pool: PagePool, hashes: list[bytes], on_device: bool) -> set[int]:
        """The lengths in pages of all prefixes whose last window is cached in a pool; always contains 0."""
        ends, run = {0}, 0
        # `run` is the first page of the current run of cached pages
        for index, page_hash in enumerate(hashes):
            if not pool.is_cached(page_hash, on_device):
                run = index + 1
            elif run <= self.first_visible(pool, index + 1):
                ends.add(index + 1)
        return ends

    def first_visible(self, pool: PagePool, pages: int) -> int:
        """The first page that the token after some full pages sees.

        Args:
            pool: The pages of a group of layers.
            pages: The number of full pages.
        """
        return pool.first_visible(pages * self._page_size, self._page_size)
