"""Starts of prompts within pages: copied pages hold what they say, and misses name their reason."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from max.interfaces import RequestID
from max.pipelines.kv_cache.known_pages import Found, KnownPages, Miss, MissReason
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.swap_area import SwapArea

PAGE = 8


class Cache:
    """A page manager with memory: each place of a page holds the token that was written there."""

    def __init__(self, pages: int, windows: tuple[int | None, ...] = (None,)) -> None:
        more = [PagePool(pages, window) for window in windows[1:]]
        self.pages = PageManager(pages, PAGE, True, windows[0], more=more)
        self.memories = [np.full((pages, PAGE), -1) for _ in windows]
        for pool, memory in zip(self.pages.pools, self.memories, strict=True):
            pool.copy = partial(self._copy, memory)
        self.count = 0

    @staticmethod
    def _copy(memory: np.ndarray, source: int, target: int, length: int) -> None:
        memory[target, :length], memory[target, length:] = memory[source, :length], -2

    def run(self, tokens: list[int], salt: bytes = b"", steps: int = 1, keep: bool = False):
        """Reads a sequence in some steps; returns what was reused, and the miss."""
        self.count += 1
        name, all_tokens = RequestID(str(self.count)), np.array(tokens)
        self.pages.claim(name)
        reused = self.pages.reuse_prefix(name, all_tokens, salt)
        self.check_memory(name, tokens[:reused])
        ends = sorted(
            {
                *(random.Random(self.count).choices(range(reused + 1, len(tokens) + 1), k=steps)),
                len(tokens),
            }
        )
        begin = reused
        for end in ends:
            self.pages.reserve(name, end)
            for table, memory in zip(self.pages.tables(name), self.memories, strict=True):
                for place in range(begin, end):
                    memory[table[place // PAGE], place % PAGE] = tokens[place]
            self.check_memory(name, tokens[:end])
            self.pages.commit(name, all_tokens[:end], salt)
            self.pages.trim(name, end)
            begin = end
        miss = self.pages.miss(name)
        self.pages.check()
        if not keep:
            self.pages.release(name)
            self.pages.check()
        return reused, miss

    def check_memory(self, name: RequestID, tokens: list[int]) -> None:
        """The tokens that the next one sees are in the pages of the table."""
        tables = self.pages.tables(name)
        for pool, table, memory in zip(self.pages.pools, tables, self.memories, strict=True):
            first = 0 if pool.window is None else max(0, len(tokens) - pool.window + 1)
            for place in range(first, len(tokens)):
                assert memory[table[place // PAGE], place % PAGE] == tokens[place]


def anything(page_hash: bytes) -> bool:
    return True


def common(one: list[int], other: list[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(8))
def test_every_known_start_is_reused(seed: int) -> None:
    """Conversations that go on, branch and change: each token of the longest known start is in the cache."""
    rng = random.Random(seed)
    cache, known = Cache(4096), list[list[int]]()
    for _ in range(60):
        if known and rng.random() < 0.85:
            earlier = rng.choice(known)
            kept = len(earlier) if rng.random() < 0.5 else rng.randrange(len(earlier) + 1)
            tokens = earlier[:kept] + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        else:
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        longest = max((common(tokens, each) for each in known), default=0)
        reused, miss = cache.run(tokens, steps=rng.randrange(1, 4))
        assert reused == min(longest, len(tokens) - 1)
        if miss is None:
            assert reused == len(tokens) - 1
        else:
            assert (miss.position, miss.tokens) == (reused, len(tokens) - 1 - reused)
            assert (miss.reason is MissReason.NEVER_SEEN) == (reused == 0)
        known.append(tokens)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(None,), (12, None), (None, 5)])
def test_copies_in_few_pages_and_with_windows(seed: int, windows) -> None:
    rng = random.Random(seed)
    cache, known = Cache(24, windows), [[0]]
    for _ in range(150):
        earlier = rng.choice(known[-12:])
        tokens = earlier[: rng.randrange(len(earlier) + 1)][:60]
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        reused, _ = cache.run(tokens, steps=rng.randrange(1, 4))
        assert reused <= max(common(tokens, each) for each in known)
        known.append(tokens)


def test_reasons_of_misses() -> None:
    cache = Cache(8)
    first = list(range(100, 130))
    assert cache.run(first)[1].reason is MissReason.NEVER_SEEN
    assert cache.run(first)[1] is None
    assert cache.run([*first, 1, 2, 3])[1].reason is MissReason.APPENDED
    changed = [*first[:20], 7, *first[21:]]
    reused, miss = cache.run(changed)
    assert (reused, miss.reason, miss.position) == (20, MissReason.CHANGED, 20)
    assert cache.run(first, b"other")[1].reason is MissReason.OTHER_SALT
    assert cache.run(first, b"other")[1] is None
    cache.run(list(range(64)))  # needs all pages
    reused, miss = cache.run(first)
    assert (reused, miss.reason) == (0, MissReason.EVICTED)
    cache.pages.forget_prefixes()
    assert cache.run(first)[1].reason is MissReason.NEVER_SEEN


def test_nothing_is_kept_of_requests_that_were_open_when_the_cache_was_emptied() -> None:
    cache = Cache(16)
    cache.run([1, 2, 3], keep=True)
    cache.pages.forget_prefixes()
    cache.pages.release(RequestID("1"))
    cache.pages.check()
    assert cache.run([1, 2, 3])[0] == 0


def test_pages_that_are_not_full_are_not_stored() -> None:
    cache = Cache(16)
    cache.run(list(range(20)))
    (pool,) = cache.pages.pools
    assert len(pool.with_content()) == len(pool.cached_contents()) == 2


@pytest.mark.parametrize("pages, reason", [(2, MissReason.EVICTED), (3, MissReason.NOT_COPIED)])
def test_no_page_is_left_for_a_copy(pages: int, reason: MissReason) -> None:
    """Another request has overwritten the page that is not full, or has taken the page that its copy would need."""
    cache = Cache(pages)
    cache.run(list(range(12)))
    cache.pages.claim(RequestID("a"))
    cache.pages.reserve(RequestID("a"), 1)
    cache.pages.claim(RequestID("b"))
    reused = cache.pages.reuse_prefix(RequestID("b"), np.arange(12))
    assert (reused, cache.pages.miss(RequestID("b"))) == (8, Miss(reason, 8, 3))
    cache.pages.check()


def test_all_groups_get_a_copy_or_none() -> None:
    pages = PageManager(6, PAGE, True, more=[PagePool(3)])
    for pool in pages.pools:
        pool.copy = lambda source, target, length: None
    first, holder, last = (RequestID(name) for name in "abc")
    pages.claim(first)
    pages.reserve(first, 12)
    pages.commit(first, np.arange(12))
    pages.release(first)
    pages.claim(holder)
    pages.reserve(holder, 1)
    # the second group has one free page beside the full one: the content that would be copied
    pages.claim(last)
    assert pages.reuse_prefix(last, np.arange(12)) == PAGE
    assert [len(table) for table in pages.tables(last)] == [1, 1]
    pages.check()
    pages.release(holder)
    pages.release(last)
    pages.claim(last)
    assert pages.reuse_prefix(last, np.arange(12)) == 11
    pages.check()


def test_a_cut_sequence_leaves_nothing_of_what_was_cut() -> None:
    numbers = random.Random(5)
    for _ in range(40):
        cache, name = Cache(8), RequestID("cut")
        tokens = [numbers.randrange(9) for _ in range(numbers.randrange(2, 4 * PAGE))]
        cache.pages.claim(name)
        cache.pages.reserve(name, len(tokens))
        for table, memory in zip(cache.pages.tables(name), cache.memories, strict=True):
            for place, token in enumerate(tokens):
                memory[table[place // PAGE], place % PAGE] = token
        cache.pages.commit(name, np.array(tokens))
        kept = cache.pages.truncate(name, numbers.randrange(len(tokens)))
        # an interrupted step has written other tokens, of which nothing was recorded
        cache.pages.reserve(name, kept + 1)
        for table, memory in zip(cache.pages.tables(name), cache.memories, strict=True):
            memory[table[kept // PAGE], kept % PAGE] = 50
        cache.pages.release(name)
        # `run` checks that what is reused has the tokens of the prompt
        for end in (len(tokens), len(tokens) - 1, PAGE):
            cache.run([*tokens[:end], 9, *tokens])


def test_a_start_that_is_used_stays_known() -> None:
    cache, start = Cache(4), [7] * PAGE
    cache.run([*start, 1])
    for number in range(20):
        cache.run([100 + number] * PAGE)
        cache.run([*start, 1])
    assert cache.run([*start[:5], 8, 8])[0] == 5


def test_a_page_that_is_copied_stays_known() -> None:
    cache, name = Cache(4), RequestID("copy")
    cache.run([7] * PAGE + [1])
    for number in range(20):
        cache.run([100 + number] * PAGE)
        cache.pages.claim(name)
        assert cache.pages.reuse_prefix(name, np.array([7] * 5)) == 4
        cache.pages.release(name)


def test_pages_of_the_largest_group_are_known() -> None:
    for sizes in ((2, 20), (20, 2)):
        pages = PageManager(sizes[0], PAGE, True, more=[PagePool(sizes[1])])
        miss = None
        for number in (*range(12), 0):
            name = RequestID(str(number))
            pages.claim(name)
            pages.reuse_prefix(name, np.full(PAGE + 1, number))
            miss = pages.miss(name)
            pages.reserve(name, PAGE)
            pages.commit(name, np.full(PAGE, number))
            pages.release(name)
        assert miss == Miss(MissReason.EVICTED, 0, PAGE)


class Nowhere:
    """Copies nothing."""

    def save(self, page: int, slot: int) -> None: ...

    def restore(self, slot: int, page: int) -> None: ...


def test_pages_in_the_swap_area_are_not_copied() -> None:
    pages = PageManager(2, PAGE, True, swap=SwapArea(4, Nowhere()))
    pages.pools[0].copy = lambda source, target, length: None
    for number in (7, 8, 9):
        name = RequestID(str(number))
        pages.claim(name)
        pages.reserve(name, PAGE)
        pages.commit(name, np.full(PAGE, number))
        pages.release(name)
    last = RequestID("last")
    pages.claim(last)
    assert pages.reuse_prefix(last, np.array([7] * 5 + [1])) == 0
    assert pages.miss(last) == Miss(MissReason.NOT_COPIED, 0, 5)


def test_a_part_is_kept_only_where_all_groups_can_copy_it() -> None:
    pages = PageManager(4, PAGE, True, more=[PagePool(4)])
    pages.pools[0].copy = lambda source, target, length: None
    name = RequestID("a")
    pages.claim(name)
    pages.reserve(name, 5)
    pages.commit(name, np.arange(5))
    pages.release(name)
    assert all(pool.with_content() == [] for pool in pages.pools)
    assert not any(pool.is_cached(h) for pool in pages.pools for h in pages._known._parents)


def test_trimmed_tables_have_no_pages_before_a_window_or_after_the_tokens() -> None:
    for window, held in ((None, 4), (4, 1), (PAGE, 2)):
        pages, name = PageManager(8, PAGE, window=window), RequestID("a")
        pages.claim(name)
        pages.reserve(name, 6 * PAGE)
        pages.trim(name, 3 * PAGE + 3)
        assert pages.used_pages == held
        pages.check()


def test_the_last_token_of_a_page_differs() -> None:
    cache = Cache(4)
    cache.run(list(range(PAGE + 1)))
    reused, miss = cache.run([*range(PAGE - 1), 99, 98, 97])
    assert (reused, miss) == (PAGE - 1, Miss(MissReason.CHANGED, PAGE - 1, 2))


def found_length(known: KnownPages, parent: bytes, tokens: Sequence[int], contents=()) -> int:
    return known.find(parent, np.array(tokens), contents, anything, anything).length


def test_the_oldest_pages_are_forgotten() -> None:
    known = KnownPages(3)
    for number in range(5):
        known.add(b"salt", bytes([number]), np.array([number, 1]), ())
        known.touch([b"\x00", b"unknown"])
    found = [found_length(known, b"salt", [n, 1]) for n in range(5)]
    assert found == [2, 0, 0, 2, 2]


def test_images_end_what_is_in_common() -> None:
    known = KnownPages(8)
    known.add(b"", b"one", np.arange(6), ((2, b"cat"),))
    for contents, length in (
        (((2, b"cat"),), 6),
        (((2, b"dog"),), 2),
        ((), 2),
        (((2, b"cat"), (4, b"x")), 4),
    ):
        assert found_length(known, b"", range(6), contents) == length


def test_the_longest_start_of_random_pages():
    """As a list of all pages says it: of equal starts the newest counts, and whether any page ends with them."""
    draw = random.Random(3)
    for _ in range(300):
        known, pages = KnownPages(50), list[tuple[bytes, list[int]]]()
        for index in range(draw.randint(0, 6)):
            page = draw.choices(range(2), k=draw.randint(1, 4))
            pages.append((bytes([index]), page))
            known.add(b"p", bytes([index]), np.array(page), ())
        tokens = draw.choices(range(2), k=draw.randint(0, 4))
        cached = {page_hash for page_hash, _ in pages if draw.random() < 0.8}
        copyable = {page_hash for page_hash in cached if draw.random() < 0.8}

        def common(page: list[int], tokens: list[int] = tokens) -> int:
            pairs = [a == b for a, b in zip(page, tokens, strict=False)]
            return (*pairs, False).index(False)

        longest = max([common(page) for _, page in pages], default=0)
        ends = any(common(page) == len(page) == longest for _, page in pages)
        there = max([common(page) for page_hash, page in pages if page_hash in cached], default=0)
        best = max([common(page) for page_hash, page in pages if page_hash in copyable], default=0)
        newest = [h for h, page in pages if h in copyable and common(page) == best and best]
        found = known.find(
            b"p", np.array(tokens, np.int64), (), cached.__contains__, copyable.__contains__
        )
        expected = Found(newest[-1] if newest else None, best, there, longest, bool(pages), ends)
        assert found == expected, (pages, tokens, cached, copyable)


def found_in(known: KnownPages, parent: bytes, *tokens: int) -> bytes | None:
    return known.find(parent, np.array(tokens), (), anything, anything).page_hash


def test_the_page_that_was_not_used_for_longest_is_forgotten():
    known = KnownPages(2)
    for name in (b"a", b"b", b"a", b"c"):
        known.add(name + b"parent", name, np.array([1]), ())
    assert found_in(known, b"aparent", 1) == b"a" and found_in(known, b"bparent", 1) is None
    assert b"bparent" not in known._children, "parents without pages take no memory"
    known.forget()
    known.add(b"aparent", b"d", np.array([1]), ())
    known.add(b"aparent", b"e", np.array([2]), ())
    known.add(b"aparent", b"f", np.array([3]), ())
    assert [found_in(known, b"aparent", token) for token in (1, 2, 3)] == [None, b"e", b"f"]


def test_the_newest_256_pages_are_compared():
    known = KnownPages(1000)
    for number in range(257):
        known.add(b"p", number.to_bytes(2, "little"), np.array([number]), ())
    assert found_in(known, b"p", 0) is None and found_in(known, b"p", 1) == b"\1\0"


NOTHING = Found(None, 0, 0, 0, False, False)


def reason_of(known: KnownPages, tokens: list[int], salt: bytes, reused: int = 0) -> MissReason:
    miss = known.miss(np.array(tokens), salt, reused, NOTHING, 0)
    assert miss is not None
    return miss.reason


def test_starts_are_those_of_16_tokens():
    known, start = KnownPages(9), list(range(16))
    assert reason_of(known, [*start, 1], b"a") is MissReason.NEVER_SEEN
    assert reason_of(known, [*start, 2], b"b") is MissReason.OTHER_SALT
    assert reason_of(known, [*start, 3], b"b") is MissReason.NEVER_SEEN, "its own salt"
    assert reason_of(known, [*start[:15], 99, 1], b"z") is MissReason.NEVER_SEEN
    assert reason_of(known, [*start, 1], b"c", reused=4) is MissReason.APPENDED
    known.forget()
    assert reason_of(known, [*start, 1], b"d") is MissReason.NEVER_SEEN


def test_256_salts_of_a_start_are_known():
    known, start = KnownPages(9), list(range(20))
    for number in range(257):
        reason_of(known, start, number.to_bytes(2, "little"))
    assert reason_of(known, start, (255).to_bytes(2, "little")) is MissReason.NEVER_SEEN
    assert reason_of(known, start, (256).to_bytes(2, "little")) is MissReason.OTHER_SALT


def test_4096_starts_are_known():
    known = KnownPages(9)

    def reason(number: int, salt: bytes) -> MissReason:
        return reason_of(known, [number, 1, 1], salt)

    for number in range(4096):
        reason(number, b"a")
    assert reason(0, b"b") is MissReason.OTHER_SALT, "and now it is the newest"
    reason(4096, b"a")
    assert reason(1, b"b") is MissReason.NEVER_SEEN
    # that has taken the place of another one
    assert reason(0, b"c") is MissReason.OTHER_SALT and reason(2, b"b") is MissReason.NEVER_SEEN


def test_what_the_reason_of_a_miss_is_if_pages_have_more_in_common():
    """The first token that the request lacks decides, where pages of several fates have it."""
    for cached, longest, copied, reason in (
        (6, 6, 4, MissReason.NOT_COPIED),
        (5, 6, 4, MissReason.NOT_COPIED),
        (4, 6, 4, MissReason.EVICTED),
        (4, 4, 4, MissReason.CHANGED),
        (1, 1, 0, MissReason.NOT_COPIED),
        (0, 1, 0, MissReason.EVICTED),
    ):
        found = Found(b"page", copied, cached, longest, True, False)
        tokens = np.arange(20)
        miss = KnownPages(9).miss(tokens, b"", 8 + copied, found, copied)
        assert miss == Miss(reason, 8 + copied, 11 - copied)


@pytest.mark.parametrize("seed", range(3))
def test_full_pages_are_reused_where_no_tokens_are_kept(seed: int) -> None:
    """As in a simulation: the same tables, but no miss is explained and no token of a page is kept."""
    draw = random.Random(seed)
    caches = [PageManager(12, PAGE, True), PageManager(12, PAGE, True, most_known=0)]
    texts = [draw.choices(range(2), k=draw.randint(1, 40)) for _ in range(6)]
    for number in range(60):
        tokens = np.array(draw.choice(texts)[: draw.randint(1, 40)])
        name, reused = RequestID(str(number)), []
        for cache in caches:
            cache.claim(name)
            reused.append(cache.reuse_prefix(name, tokens))
            cache.reserve(name, len(tokens))
            cache.commit(name, tokens)
        assert reused[0] == reused[1] and caches[0].pages(name) == caches[1].pages(name)
        assert caches[1].miss(name) is None
        for cache in caches:
            cache.release(name)
        if draw.random() < 0.05:
            for cache in caches:
                cache.forget_prefixes()
    assert caches[0].reused_tokens == caches[1].reused_tokens > 0
    known = caches[1]._known
    assert not known._parents and not known._children and not known._starts
