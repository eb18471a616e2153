"""What pages held, by the tokens before them: finds the longest common start within a page, and why no more is cached.

Full pages are found by their hashes. Text that changes within a page, or goes on after the last page of a sequence,
which is rarely full, is found here. Pages that were overwritten stay known for some time, so that a miss can be told
from text that was never read.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer[Any]]
MOST_SIBLINGS = 256
"""The maximum number of pages that are compared, the latest ones."""
_START = 16
"""The number of first tokens by which prompts of different salts are compared."""
_MOST_STARTS = 4096


class MissReason(str, Enum):
    """Why the tokens of a prompt after those in the cache are not there."""

    APPENDED = "appended"
    """The prompt goes on after a known sequence."""
    CHANGED = "changed"
    """A known sequence has other tokens at this position."""
    EVICTED = "evicted"
    """They were in the cache, and their pages were needed for other tokens."""
    NOT_COPIED = "not_copied"
    """They are in the cache, in a page that cannot be copied: no page is free, or the swap area has it."""
    OTHER_SALT = "other_salt"
    """A prompt with the same start was read for another tenant, key or ``cache_salt``."""
    NEVER_SEEN = "never_seen"
    """No known sequence has the first token."""
    NOT_SHARED = "not_shared"
    """The request or the model reads its prompt as a whole, for example for log-probabilities of the prompt."""


class Miss(NamedTuple):
    """Tokens of a prompt that are not in the cache, although the model must read only the last one.

    Args:
        reason: Why.
        position: The first of them.
        tokens: Their number, without the last token.
    """

    reason: MissReason
    position: int
    tokens: int


class _Page(NamedTuple):
    """The tokens of a page, and what they stand for, by place in the page."""

    tokens: npt.NDArray[np.int64]
    contents: tuple[tuple[int, bytes], ...]
    first: int


class Found(NamedTuple):
    """The pages after known tokens that start like a prompt goes on.

    Args:
        page_hash: The cached page with the longest common start; None: there is none.
        length: The tokens in common.
        cached_length: The same with the cached pages that cannot be copied.
        longest_length: The same with the pages that were overwritten.
        has_pages: Whether any page follows the known tokens.
        ends: Whether a sequence ended after the tokens in common.
    """

    page_hash: bytes | None
    length: int
    cached_length: int
    longest_length: int
    has_pages: bool
    ends: bool


class KnownPages:
    """The latest pages, in order of use.

    Args:
        most: The maximum number of pages; 0: no page is noted, nor the start of a prompt, and no miss is explained.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()
        self._children: dict[bytes, dict[bytes, _Page]] = {}
        # the start of a prompt without its salt, and the salts with which it was read
        self._starts: OrderedDict[bytes, set[bytes]] = OrderedDict()

    def add(
        self,
        parent: bytes,
        page_hash: bytes,
        tokens: Tokens,
        contents: tuple[tuple[int, bytes], ...],
    ) -> None:
        """Adds a page, or moves it to the end.

        Args:
            parent: The hash of the page before it; for a first page, the salt.
            page_hash: Its hash.
            tokens: Its tokens; fewer than a page has, if the sequence ended within it.
            contents: What they stand for, by place in the page.
        """
        if not self._most:
            return
        pages = self._children.setdefault(parent, {})
        # equal hashes have equal tokens: only the order of use changes
        if page_hash not in pages:
            pages[page_hash] = _Page(np.array(tokens, np.int64), contents, int(tokens[0]))
            self._parents[page_hash] = parent
        self.touch([page_hash])
        while len(self._parents) > self._most:
            oldest, its_parent = self._parents.popitem(last=False)
            siblings = self._children[its_parent]
            del siblings[oldest]
            if not siblings:
                del self._children[its_parent]

    def touch(self, hashes: Iterable[bytes | None]) -> None:
        """Moves pages to the end of the order.

        Args:
            hashes: Their hashes; those that are not known, and None, are left out.
        """
        for page_hash in hashes:
            if page_hash in self._parents:
                self._parents.move_to_end(page_hash)

    def forget(self) -> None:
        """Forgets all pages."""
        self._parents.clear()
        self._children.clear()
        self._starts.clear()

    def find(
        self,
        parent: bytes,
        tokens: Tokens,
        contents: tuple[tuple[int, bytes], ...],
        is_cached: Callable[[bytes], bool],
        can_be_copied: Callable[[bytes], bool],
    ) -> Found:
        """Compares tokens with the pages that follow a page.

        Args:
            parent: The hash of the page before the tokens; at the start of a prompt, its salt.
            tokens: The next tokens of the prompt, at most a page.
            contents: What they stand for.
            is_cached: Whether the page of a hash is in the cache.
            can_be_copied: Whether it can be copied, too.
        """
        pages = self._children.get(parent, {})
        best: bytes | None = None
        length = cached = longest = 0
        ends = False
        if not len(tokens):
            return Found(None, 0, 0, 0, bool(pages), False)
        first = int(tokens[0])
        # newest first: a later page replaces `best` only if it has more in common
        for number, (page_hash, page) in enumerate(reversed(pages.items())):
            if number >= MOST_SIBLINGS:
                break
            # most prompts differ in their first token
            if page.first != first:
                continue
            common = _common(page, tokens, contents)
            # `ends` is of the pages with the longest start: a longer one voids what shorter ones say
            if common > longest or (common == longest and common):
                ends = (ends and common == longest) or common == len(page.tokens)
                longest = common
            if is_cached(page_hash):
                cached = max(cached, common)
            if common > length and can_be_copied(page_hash):
                best, length = page_hash, common
        return Found(best, length, cached, longest, bool(pages), ends)

    def miss(
        self, tokens: Tokens, salt: bytes, num_reused: int, found_pages: Found, num_copied: int
    ) -> Miss | None:
        """Why the cache had no more tokens of a prompt, whose start is noted; None if it had all but the last.

        Args:
            tokens: The prompt.
            salt: Its salt.
            num_reused: The tokens that the cache had.
            found_pages: The pages that were compared with the next tokens.
            num_copied: How many of the reused tokens were copied from one of these.
        """
        if not self._most:
            return None
        only_others = self._note_start(tokens, salt)
        # the last token is read in any case, as its logits are needed
        missed = len(tokens) - 1 - num_reused
        if missed <= 0:
            return None
        reason = MissReason.CHANGED
        if found_pages.cached_length > num_copied:
            reason = MissReason.NOT_COPIED
        elif found_pages.longest_length > num_copied:
            reason = MissReason.EVICTED
        elif num_reused == 0:
            reason = MissReason.OTHER_SALT if only_others else MissReason.NEVER_SEEN
        elif found_pages.ends or not found_pages.has_pages:
            reason = MissReason.APPENDED
        return Miss(reason, num_reused, missed)

    def _note_start(self, tokens: Tokens, salt: bytes) -> bool:
        """Notes the start of a prompt; returns whether it was read before, only with other salts."""
        data = np.ascontiguousarray(tokens[:_START], dtype=np.int64).tobytes()
        start = hashlib.blake2b(data, digest_size=16).digest()
        salts = self._starts.setdefault(start, set())
        self._starts.move_to_end(start)
        only_others = bool(salts) and salt not in salts
        # a system prompt may start the prompts of every tenant: the set is bounded
        if len(salts) < MOST_SIBLINGS:
            salts.add(salt)
        if len(self._starts) > _MOST_STARTS:
            self._starts.popitem(last=False)
        return only_others


def _common(page: _Page, tokens: Tokens, contents: tuple[tuple[int, bytes], ...]) -> int:
    """The number of first tokens that a page and a prompt have in common, with what they stand for."""
    count = min(len(page.tokens), len(tokens))
    differs = np.flatnonzero(page.tokens[:count] != tokens[:count])
    if len(differs):
        count = int(differs[0])
    if page.contents != contents:
        # the first token that stands for something else
        both = set(page.contents) & set(contents)
        others = [place for place, what in (*page.contents, *contents) if (place, what) not in both]
        count = min([count, *others])
    return count
