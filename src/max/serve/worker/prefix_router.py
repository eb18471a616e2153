"""Chooses the replica of a request: the one that has the least to read for it, counted in tokens.

A page of a prompt is known by the hash of all tokens up to its end, the same as in the page manager. Replicas report
the pages that they gain and lose, all of them at first, so that a router that is started anew knows what it needs.
Between two reports the router expects the pages of requests that it has sent: of each replica as many of the latest
ones as its cache has. It has no tensors, no clock and no event loop, so that a simulation can run it as the server
does.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from max.pipelines.kv_cache.salts import NO_SALT, Salt

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
SEQUENCE_TOKENS = 64
"""What an open request costs the next one, in tokens to read: its own steps, and its share of each common step."""
QUEUED_TOKENS = 512
"""The same for a request that waits until another one ends, as all places of a batch are taken."""


_READ_WEIGHT = 5, 4
"""What a token that a request reads itself counts, as a fraction: others wait for it too, and it takes memory of cached
prefixes. With 3/2, requests queue where the prefix of most of them is.
"""
_LOAD = 1 << 32  # more than the open requests of a replica
_FEW = 32
"""The number of replicas up to which a loop over them is faster than NumPy arrays."""
MOST_REPORTED = 1 << 20
"""The pages of a replica that are noted; more can only come from one that reports wrong ones."""


@dataclass
class Route:
    """A request on its way to a replica.

    Args:
        replica: The number of the replica.
        cached_tokens: The tokens of its prompt that the replica should have.
        unread: Those that it has to read; 0 after they were read.
        pages: The hashes of the full pages of its prompt.
    """

    replica: int
    cached_tokens: int
    unread: int
    pages: list[bytes] = field(repr=False)


@dataclass
class _Place:
    """What the router knows of a replica."""

    number: int
    most_pages: int
    slots: int
    ranks: dict[int, int] = field(repr=False)
    """Those of all replicas by their numbers; the least loaded one has the least."""
    changed_ranks: set[int] = field(repr=False)
    """The numbers of replicas whose ranks have changed."""
    unread: int = 0
    open: int = 0
    others_unread: int = 0
    others_open: int = 0
    pages: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Those that are expected, the latest ones last."""
    reported_pages: set[bytes] = field(default_factory=set[bytes])
    salt_key: bytes = b""

    def __post_init__(self) -> None:
        self.bit = 1 << self.number
        """That of the replica in a mask of replicas; pages that only one has share it."""
        self.load = 0
        """The tokens to read before a new request, with what open requests cost."""
        self.weigh()

    def change(self, open_requests: int, unread: int) -> None:
        """Adds to the open requests and to the tokens that they have to read; each may be below 0."""
        self.open += open_requests
        self.unread += unread
        self.weigh()

    def weigh(self) -> None:
        """Computes the load."""
        all_open = self.open + self.others_open
        # with the request that is to be placed
        queued = max(all_open + 1 - self.slots, 0)
        unread = self.unread + self.others_unread
        self.load = unread + SEQUENCE_TOKENS * all_open + QUEUED_TOKENS * queued
        # of equal loads the one with fewer requests, those of other routers included
        self.ranks[self.number] = self.load * _LOAD + all_open
        self.changed_ranks.add(self.number)


class PrefixRouter:
    """Chooses among replicas, which are known by their numbers.

    Args:
        page_size: Tokens per page of the replicas' caches.
        by_prefix: Whether cached prefixes count; else requests go to the least loaded replica.
    """

    def __init__(self, page_size: int = 128, by_prefix: bool = True) -> None:
        self.page_size, self._by_prefix = page_size, by_prefix
        self._places: dict[int, _Place] = {}
        self._ranks: dict[int, int] = {}
        # the same as an array for choices among many, but for those that have changed since the last one
        self._rank_array, self._changed_ranks = np.zeros(0, np.int64), set[int]()
        # a bit for each replica that has a page
        self._holders: dict[bytes, int] = {}

    @property
    def replicas(self) -> list[int]:
        """The numbers of the replicas, in the order in which they were added."""
        return list(self._places)

    def add(self, replica: int, pages: int, slots: int) -> None:
        """Adds a replica, whose cache is empty.

        Args:
            replica: Its number, from 0; small numbers need less memory.
            pages: The pages of its cache.
            slots: The maximum number of requests that it runs at once.
        """
        self.remove(replica)
        self._places[replica] = _Place(
            replica, max(pages, 1), max(slots, 1), self._ranks, self._changed_ranks
        )

    def remove(self, replica: int) -> None:
        """Removes a replica, whose cache is lost; nothing happens if it is unknown.

        Args:
            replica: Its number.
        """
        place = self._places.pop(replica, None)
        if place is not None:
            del self._ranks[replica]
            self._drop(replica, place.reported_pages.union(place.pages))

    def forget(self, replica: int) -> None:
        """Notes that the cache of a replica was emptied.

        Args:
            replica: Its number.
        """
        place = self._places[replica]
        self._drop(replica, place.reported_pages.union(place.pages))
        place.pages.clear()
        place.reported_pages.clear()

    def note_changes(
        self,
        replica: int,
        new_pages: Iterable[bytes],
        lost_pages: Iterable[bytes] = (),
        is_anew: bool = False,
        salt_key: bytes = b"",
    ) -> None:
        """Notes what a replica reports of its cache.

        Args:
            replica: Its number.
            new_pages: The hashes of pages that it has now.
            lost_pages: The hashes of pages that it has lost.
            is_anew: Whether its cache was emptied before.
            salt_key: Its key of salts; empty: unknown.
        """
        # the report is of the cache after it was emptied
        if is_anew:
            self.forget(replica)
        place = self._places[replica]
        place.salt_key = salt_key or place.salt_key
        lost_here: list[bytes] = []
        for page in lost_pages:
            if page in place.reported_pages or page in place.pages:
                place.reported_pages.discard(page)
                place.pages.pop(page, None)
                lost_here.append(page)
        self._drop(replica, lost_here)
        for page in new_pages:
            if len(place.reported_pages) >= MOST_REPORTED:
                break
            place.pages.pop(page, None)
            place.reported_pages.add(page)
            self._hold(place, page)

    def load(self, replica: int) -> int:
        """The load of a replica, in tokens to read.

        Args:
            replica: Its number.
        """
        return self._places[replica].load

    def others(self, replica: int, open_requests: int, unread: int) -> None:
        """Notes what other routers have sent to a replica, as it reports.

        Args:
            replica: Its number.
            open_requests: Their requests that have not ended.
            unread: The tokens that are to be read for these.
        """
        place = self._places[replica]
        place.others_open, place.others_unread = open_requests, unread
        place.weigh()

    def others_open(self, replica: int) -> int:
        """The open requests that other routers have sent to a replica.

        Args:
            replica: Its number.
        """
        return self._places[replica].others_open

    def choose(
        self,
        among: Collection[int] | npt.NDArray[np.int64],
        tokens: Tokens,
        salt: Salt = NO_SALT,
        length: int = 0,
    ) -> Route:
        """The replica for a request, and notes that the request goes there.

        Args:
            among: The numbers of the replicas that can take it, at least one.
            tokens: The prompt; empty for a request that reuses no cache.
            salt: Requests with equal salts share pages.
            length: The size of the request in tokens where it has no prompt.
        """
        # a prompt without a full page needs no hashes of salts either
        has_pages = self._by_prefix and len(tokens) >= self.page_size
        hashes = self._hashes_by_key(among, tokens, salt) if has_pages else {}
        # hashes of different keys are different, so each finds replicas of its own
        found = [each for pages in hashes.values() for each in self._cached_tokens(pages)]
        # the last token is read in any case, as its logits are needed
        most = max(len(tokens) - 1, 0)
        best = self._least_to_read(among, found, most)
        known = next((min(count, most) for held, count in found if held >> best & 1), 0)
        pages = hashes.get(self._key_of(best, salt), []) if hashes else []
        route = Route(best, known, (len(tokens) or length) - known, pages)
        self._places[best].change(1, route.unread)
        self._note(best, pages)
        return route

    def note_start(self, route: Route, cached: int) -> None:
        """Notes how much of a prompt was cached, as the replica reports when it begins to read it.

        Args:
            route: The request.
            cached: The number of its tokens that were cached.
        """
        place = self._places.get(route.replica)
        if place is not None and route.unread:
            # not 0, which stands for a prompt that was read: its last token is read in any case
            unread = max(route.unread + route.cached_tokens - cached, 1)
            if unread != route.unread:
                place.change(0, unread - route.unread)
            route.unread, route.cached_tokens = unread, cached

    def read(self, route: Route) -> None:
        """Notes that a prompt was read: the request has its first token.

        Args:
            route: The request.
        """
        place = self._places.get(route.replica)
        if place is not None and route.unread:
            place.change(0, -route.unread)
        route.unread = 0

    def note_end(self, route: Route, tokens: Tokens = (), salt: Salt = NO_SALT) -> None:
        """Notes that a request has ended or has gone to another replica.

        Args:
            route: The request.
            tokens: Prompt and answer, which are cached now; empty: they are not.
            salt: The salt of the request.
        """
        self.read(route)
        place = self._places.get(route.replica)
        if place is None:
            return
        place.change(-1, 0)
        if self._by_prefix and len(tokens) >= self.page_size:
            digest = salt.digest(self._key_of(route.replica, salt))
            self._note(route.replica, self._hashes(tokens, digest, route.pages))

    def _key_of(self, replica: int, salt: Salt) -> bytes:
        """The key that the hashes of a request in a replica depend on; empty: they are the same in all replicas."""
        return self._places[replica].salt_key if salt.needs_key else b""

    def _hashes_by_key(
        self, replicas: Iterable[int], tokens: Tokens, salt: Salt
    ) -> dict[bytes, list[bytes]]:
        """The hashes of the full pages of a prompt, by the keys of replicas."""
        keys = {self._key_of(replica, salt) for replica in replicas} if salt.needs_key else {b""}
        return {key: self._hashes(tokens, salt.digest(key)) for key in keys}

    def _hashes(
        self, tokens: Tokens, digest: bytes, first_hashes: Sequence[bytes] = ()
    ) -> list[bytes]:
        """The hashes of the full pages of tokens; each covers all pages before it.

        Args:
            tokens: The tokens.
            digest: The digest of the salt.
            first_hashes: The hashes of the first pages.
        """
        size, hashes = self.page_size, list(first_hashes)
        count = len(tokens) // size
        if len(hashes) >= count:
            return hashes[:count]
        # 8 bytes a token, as the page manager hashes them
        rest = np.array(tokens[len(hashes) * size : count * size], np.int64).tobytes()
        parent = hashes[-1] if hashes else digest
        step = 8 * size
        for begin in range(0, len(rest), step):
            parent = hashlib.blake2b(
                rest[begin : begin + step], digest_size=16, key=parent
            ).digest()
            hashes.append(parent)
        return hashes

    def _least_to_read(
        self,
        among: Collection[int] | npt.NDArray[np.int64],
        found: list[tuple[int, int]],
        most: int,
    ) -> int:
        """The first of the replicas before which a request has the least to read.

        Args:
            among: The replicas.
            found: As of `_cached_tokens`.
            most: The most tokens of the prompt that can be cached.
        """
        # both are tokens to read: a long queue outweighs a cached prefix
        weight, divisor = _READ_WEIGHT
        gains = [(held, min(count, most) * weight // divisor * _LOAD) for held, count in found]
        if len(among) > _FEW:
            numbers = (
                among if isinstance(among, np.ndarray) else np.fromiter(among, np.int64, len(among))
            )
            costs = self._current_ranks()
            for held, gain in gains:
                # bits: [replicas] of 0 and 1
                data = np.frombuffer(held.to_bytes(len(costs) // 8 + 1, "little"), np.uint8)
                bits = np.unpackbits(data, count=len(costs), bitorder="little")
                costs[bits != 0] -= gain
            return int(numbers[costs[numbers].argmin()])
        ranks = self._ranks
        if gains:
            ranks = ranks.copy()
            for held, gain in gains:
                while held:
                    # the lowest bit that is set
                    lowest = held & -held
                    ranks[lowest.bit_length() - 1] -= gain
                    held ^= lowest
        return int(min(among, key=ranks.__getitem__))

    def _current_ranks(self) -> npt.NDArray[np.int64]:
        """The ranks of all replicas by their numbers, as a new array."""
        size = max(self._places) + 1
        if len(self._rank_array) < size:
            self._rank_array = np.zeros(size, np.int64)
            self._changed_ranks.update(self._places)
        for number in self._changed_ranks:
            # a replica may have been removed since
            if number in self._ranks:
                self._rank_array[number] = self._ranks[number]
        self._changed_ranks.clear()
        return self._rank_array.copy()

    def _cached_tokens(self, pages: Sequence[bytes]) -> list[tuple[int, int]]:
        """What replicas have of a prompt: a bit for each replica, and the tokens that these have; no replica is in two
        of the masks, and those that have none are in no mask.
        """
        left = -1  # all bits: each replica
        found: list[tuple[int, int]] = []
        for count, page in enumerate(pages):
            still = left & self._holders.get(page, 0)
            # those whose cache ends before this page
            if count and still != left:
                found.append((left & ~still, count * self.page_size))
            left = still
            if not left:
                return found
        if pages:
            found.append((left, len(pages) * self.page_size))
        return found

    def _note(self, replica: int, pages: Sequence[bytes]) -> None:
        """Enters pages as the latest ones of a replica; the oldest ones make room."""
        place = self._places[replica]
        latest = place.pages
        # the last page first: what follows a page is evicted before it, as in the page manager
        for page in reversed(pages):
            if page in place.reported_pages:
                continue
            if page in latest:
                latest.move_to_end(page)
            else:
                latest[page] = None
                self._hold(place, page)
        while len(latest) > place.most_pages:
            self._drop(replica, [latest.popitem(last=False)[0]])

    def _hold(self, place: _Place, page: bytes) -> None:
        """Adds a replica to the holders of a page."""
        holders = self._holders.get(page)
        # a mask of a thousand replicas has 160 bytes: most pages have one holder, whose mask is there already
        self._holders[page] = place.bit if holders is None else holders | place.bit

    def _drop(self, replica: int, pages: Iterable[bytes]) -> None:
        """Removes a replica from the holders of pages."""
        bit = 1 << replica
        for page in pages:
            if left := self._holders[page] & ~bit:
                self._holders[page] = left
            else:
                del self._holders[page]
