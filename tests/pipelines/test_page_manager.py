"""The page manager: no page is lost or has two owners, and a shared page holds the tokens of its prefix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from max.interfaces import RequestID
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import PagePool, pages_of
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.swap_area import SwapArea


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_pages_are_handed_out_and_come_back():
    pages, a, b = PageManager(4, 2), RequestID("a"), RequestID("b")
    pages.claim(a)
    pages.claim(b)
    assert (pages.opening(a), pages.opening(b)) == ((0, 0), (1, 0))
    assert pages.reserve(a, 3) == [0, 1]
    assert pages.reserve(a, 4) == []
    assert pages.reserve(b, 3) == [2, 3]
    with pytest.raises(OutOfPagesError, match="1 more pages are needed, 0 of 4 are free"):
        pages.reserve(a, 5)
    assert pages.pages(a) == [0, 1]
    pages.release(b)
    assert pages.free_pages == 2
    pages.reserve(a, 8)
    pages.check()


def test_a_lost_page_is_noticed():
    pages, a = PageManager(4, 2), RequestID("a")
    pages.claim(a)
    pages.reserve(a, 3)
    pages.check()
    pages.pools[0].take()
    with pytest.raises(AssertionError):
        pages.check()


def test_what_is_not_there_is_an_error():
    pages, a = PageManager(4, 2), RequestID("a")
    for use in (pages.pages, pages.release, lambda r: pages.reserve(r, 1)):
        with pytest.raises(KeyError, match="has no page table"):
            use(a)
    pages.claim(a)
    with pytest.raises(ValueError, match="has a page table already"):
        pages.claim(a)
    with pytest.raises(ValueError, match="3 tokens of request a in 0 pages of 2"):
        pages.commit(a, tokens(1, 2, 3))
    with pytest.raises(ValueError, match="at least 1"):
        PageManager(0, 2)


def test_a_common_beginning_is_shared():
    pages, a, b, c = PageManager(8, 2, True), RequestID("a"), RequestID("b"), RequestID("c")
    text = tokens(1, 2, 3, 4, 5)
    pages.claim(a)
    assert pages.reuse_prefix(a, text) == 0
    pages.reserve(a, 5)
    pages.commit(a, text)
    pages.claim(b)
    assert pages.reuse_prefix(b, text) == 4
    assert pages.pages(b) == pages.pages(a)[:2]
    pages.claim(c)
    assert pages.reuse_prefix(c, tokens(1, 2, 3, 9, 5)) == 2, "the second page differs"
    pages.release(a)
    pages.release(b)
    pages.release(c)
    assert pages.free_pages == 8
    pages.claim(a)
    assert pages.reuse_prefix(a, tokens(1, 2, 3, 4)) == 2, "one token must be left"
    assert pages.reused_tokens == 0, "nobody has run yet"
    pages.commit(a, tokens(1, 2))
    pages.commit(a, tokens(1, 2))
    assert pages.reused_tokens == 2, "each request counts once"
    pages.check()


def test_a_cached_page_is_taken_last_and_then_forgotten():
    pages, a, b = PageManager(3, 2, True), RequestID("a"), RequestID("b")
    pages.claim(a)
    pages.reserve(a, 4)
    pages.commit(a, tokens(1, 2, 3, 4))
    held = pages.pages(a)
    pages.release(a)
    pages.claim(b)
    assert pages.reserve(b, 2)[0] not in held, "the empty page first"
    assert pages.reserve(b, 4) == [held[1]], "then the end of the prefix"
    pages.claim(a)
    assert pages.reuse_prefix(a, tokens(1, 2, 3, 4, 5)) == 2
    pages.check()


def test_the_salt_separates():
    pages, a, b = PageManager(4, 2, True), RequestID("a"), RequestID("b")
    pages.claim(a)
    pages.reserve(a, 3)
    pages.commit(a, tokens(1, 2, 3), salt=b"one image")
    pages.claim(b)
    assert pages.reuse_prefix(b, tokens(1, 2, 3)) == 0
    assert pages.reuse_prefix(b, tokens(1, 2, 3), salt=b"one image") == 2


def table(pages: PageManager, name: str, *values: int) -> list[int]:
    """Returns the pages of a new request whose tokens are all cached."""
    key = RequestID(name)
    pages.claim(key)
    pages.reuse_prefix(key, tokens(*values))
    pages.reserve(key, len(values))
    pages.commit(key, tokens(*values))
    pages.check()
    return pages.pages(key)


def test_counts():
    pages = PageManager(1, 1)
    assert (pages.num_pages, pages.page_size, pages.free_pages, pages.used_pages) == (1, 1, 1, 0)
    pages = PageManager(5, 2)
    assert (pages.requests, pages.enable_prefix_caching) == ([], False)
    table(pages, "b", 1, 2, 3)
    table(pages, "a", 1)
    assert (pages.requests, pages.used_pages) == ([RequestID("b"), RequestID("a")], 3)
    assert RequestID("a") in pages and RequestID("c") not in pages
    with pytest.raises(OutOfPagesError) as error:
        pages.reserve(RequestID("a"), 9)
    assert (error.value.needed, error.value.free, error.value.total) == (4, 2, 5)
    for key in pages.requests:
        pages.release(key)
    assert (pages.requests, pages.used_pages, pages.reused_tokens) == ([], 0, 0)
    for size in ((0, 1), (1, 0)):
        with pytest.raises(
            ValueError, match=f"{size[0]} pages of {size[1]} tokens; expected at least 1"
        ):
            PageManager(*size)


@pytest.mark.parametrize(("length", "missing"), [(0, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_missing_pages(length, missing):
    pages, a = PageManager(1, 2), RequestID("a")
    pages.claim(a)
    pages.reserve(a, 2)
    assert pages.missing_pages(a, length) == missing


def test_without_prefix_caching_nothing_is_shared():
    pages = PageManager(6, 2)
    assert table(pages, "a", 1, 2, 3) == [0, 1]
    assert table(pages, "b", 1, 2, 3) == [2, 3]
    pages.release(RequestID("a"))
    pages.claim(c := RequestID("c"))
    assert pages.reuse_prefix(c, tokens(1, 2, 3)) == 0
    assert pages.reserve(c, 3) == [0, 1]


def test_a_prefix_comes_first():
    pages, a = PageManager(6, 2, True), RequestID("a")
    table(pages, "a", 1, 2)
    with pytest.raises(ValueError, match="request a has pages; a prefix comes first"):
        pages.reuse_prefix(a, tokens(1, 2))


def test_the_page_freed_first_is_taken_first():
    pages = PageManager(5, 2, True)
    assert table(pages, "a", 1, 2, 3, 4) == [0, 1]
    assert table(pages, "b", 5, 6, 7) == [2, 3]
    pages.release(RequestID("b"))
    pages.release(RequestID("a"))
    # pages 3 (not full) and 4 (never used) count as empty; then b's page, then a's from the last to the first
    assert table(pages, "c", *range(10, 20)) == [3, 4, 2, 1, 0]
    pages.release(RequestID("c"))
    assert table(pages, "d", 1, 2, 3, 4, 5) == [0, 1, 2], "what a had is gone"


def test_equal_pages_computed_twice():
    pages = PageManager(6, 2, True)
    a, b = RequestID("a"), RequestID("b")
    for key in (a, b):
        pages.claim(key)
        pages.reserve(key, 4)
    for key in (a, b):
        pages.commit(key, tokens(1, 2, 3, 4))
    pages.check()
    assert table(pages, "c", 1, 2, 3)[:1] == [0], "the first one's page serves"
    pages.release(b)
    assert table(pages, "d", 9, 9) == [2], "the other's page is empty"
    pages.check()


def test_pages_that_are_committed_in_parts():
    pages, a, text = PageManager(9, 3, True), RequestID("a"), tokens(*range(11))
    pages.claim(a)
    pages.reserve(a, 11)
    for length in range(1, 12):
        pages.commit(a, text[:length])
        pages.claim(b := RequestID(str(length)))
        assert pages.reuse_prefix(b, text) == length // 3 * 3
        pages.release(b)
    with pytest.raises(ValueError, match="13 tokens of request a in 4 pages of 3"):
        pages.commit(a, tokens(*range(13)))
    pages.commit(a, tokens(*range(12)))
    assert pages.reused_tokens == 0, "the others have not run"


def test_forgotten_prefixes_serve_nobody():
    pages = PageManager(8, 2, True)
    table(pages, "a", 1, 2, 3, 4)
    pages.release(RequestID("a"))
    table(pages, "b", 5, 6)
    pages.forget_prefixes()
    pages.check()
    for name, values in (("c", (1, 2, 3)), ("d", (5, 6, 7))):
        table(pages, name, *values)
    assert pages.reused_tokens == 0
    assert table(pages, "e", 1, 2, 9)[0] == pages.pages(RequestID("c"))[0]
    assert pages.reused_tokens == 2


def test_a_page_in_use_that_was_forgotten_serves_nobody():
    pages, b = PageManager(8, 2, True), RequestID("b")
    table(pages, "a", 1, 2, 3)
    assert table(pages, "b", 1, 2, 5)[0] == 0
    pages.forget_prefixes()
    for key in (RequestID("a"), b):
        pages.commit(key, tokens(1, 2, 3 if key != b else 5))
    pages.claim(c := RequestID("c"))
    assert pages.reuse_prefix(c, tokens(1, 2, 3)) == 0


def test_tokens_of_any_integer_type_and_layout_are_the_same():
    pages, a, b = PageManager(8, 2, True), RequestID("a"), RequestID("b")
    text = np.array([1, 2**31 - 1, 3, 4, 5], np.int64)
    pages.claim(a)
    pages.reserve(a, 5)
    pages.commit(a, np.repeat(text, 2)[::2])
    pages.claim(b)
    assert pages.reuse_prefix(b, text.astype(np.int32)) == 4


def test_pages_that_the_window_has_passed():
    """A window of seven tokens covers two pages of three tokens and part of a third; a prefix needs only those."""
    pages, a, b = PageManager(6, 3, True, window=7), RequestID("a"), RequestID("b")
    text = list(range(19))
    pages.claim(a)
    first = pages.reserve(a, 12)
    pages.commit(a, tokens(*text[:12]))
    # token 12 attends to tokens 6 to 12
    assert pages.return_unseen(a, 11) == 1 and pages.pages(a) == [6, *first[1:]]
    assert pages.return_unseen(a, 12) == 1
    assert pages.pages(a) == [6, 6, *first[2:]] and pages.free_pages == 4
    assert pages.missing_pages(a, 15) == 1
    pages.check()
    # the pages that a released are claimed last
    pages.claim(b)
    assert pages.reserve(b, 12)[2:] == first[:2]
    pages.check()
    pages.release(b)
    pages.claim(b)
    assert pages.reuse_prefix(b, tokens(*text[:12])) == 0, "tokens 3 to 8 are gone"
    pages.release(b)
    pages.claim(b)
    assert pages.reuse_prefix(b, tokens(*text)) == 12
    assert pages.pages(b) == pages.pages(a) == [6, 6, *first[2:]]
    pages.check()


@pytest.mark.parametrize(
    ("length", "step", "most"), [(100, 1, 3), (100, 3, 4), (100, 5, 5), (9, 100, 3), (0, 1, 0)]
)
def test_the_most_pages_of_a_request(length, step, most):
    assert PagePool(50, 7).most_pages(length, step, 3) == most
    assert PagePool(50).most_pages(length, step, 3) == pages_of(length, 3)
    # the second group may lack pages
    pages = PageManager(50, 3, more=[PagePool(3, 7)])
    assert pages.page_shortage(length, step) == ((most, 3) if most > 3 else None)
    assert PageManager(2, 3, more=[PagePool(9, 7)]).page_shortage(7, 1) == (3, 2)


@pytest.mark.parametrize("window", [1, 3, 4, 9])
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_long_text_needs_few_pages(window, size, step):
    """The table covers the window of the next step's first token, and has at most `most_pages` pages."""
    pages, key = PageManager(40, size, window=window), RequestID("a")
    pages.claim(key)
    held = 0
    for length in range(0, 60, step):
        pages.reserve(key, length + step)
        held = max(held, pages.used_pages)
        table = pages.pages(key)
        visible = range(max(0, length - window + 1), length + step)
        assert all(table[t // size] < 40 for t in visible)
        pages.return_unseen(key, length + step)
        assert pages.used_pages <= -(-(window - 1) // size) + 1
        pages.check()
    assert held <= pages.pools[0].most_pages(60 + step, step, size)


def test_the_most_pages_are_those_of_a_step_at_the_worst_place():
    """By all places of a step in a sequence, for all small sizes."""
    sizes = itertools.product(range(1, 6), range(1, 24), (None, *range(1, 10)), range(1, 8))
    for size, length, window, step in sizes:
        spans = [
            (0 if window is None else max(0, begin - window + 1), min(begin + step, length))
            for begin in range(length)
        ]
        most = max((end - 1) // size - first // size + 1 for first, end in spans)
        assert PagePool(9, window).most_pages(length, step, size) == most


def test_a_page_that_was_given_back_before_it_was_recorded_serves_nobody():
    pages, a = PageManager(6, 2, True, window=2), RequestID("a")
    pages.claim(a)
    pages.reserve(a, 6)
    assert pages.return_unseen(a, 5) == 2
    pages.commit(a, tokens(1, 2, 3, 4, 5, 6))
    pages.check()
    pages.claim(b := RequestID("b"))
    assert pages.reuse_prefix(b, tokens(1, 2, 3, 4, 5)) == 0


def test_groups_have_tables_of_one_length():
    """A group without a window keeps its pages, one with a window of 3 tokens releases them."""
    pages, a = PageManager(6, 2, more=[PagePool(4, 3)]), RequestID("a")
    pages.claim(a)
    pages.reserve(a, 5)
    assert (pages.free_pages, pages.used_pages) == (1, 6)
    with pytest.raises(OutOfPagesError, match="2 more pages are needed, 1 of 4 are free"):
        pages.reserve(a, 10)
    assert len(pages.pages(a, 0)) == len(pages.pages(a, 1)) == 3
    assert pages.return_unseen(a, 6) == 2
    assert pages.pages(a, 0) == [0, 1, 2] and pages.pages(a, 1) == [4, 4, 2]
    assert pages.missing_pages(a, 12) == 3
    pages.reserve(a, 12)
    assert pages.pages(a, 1)[:3] == [4, 4, 2] and pages.free_pages == 0
    pages.check()
    pages.release(a)
    pages.check()
    assert pages.used_pages == 0


def test_a_prefix_of_groups_needs_the_pages_that_each_group_sees():
    pages = PageManager(20, 2, True, more=[PagePool(5, 3)])
    a, b, text = RequestID("a"), RequestID("b"), list(range(12))
    pages.claim(a)
    for end in (4, 8, 12):
        pages.reserve(a, end)
        pages.commit(a, tokens(*text[:end]))
        pages.return_unseen(a, end)
    assert pages.pages(a, 1)[:5] == [5] * 5
    # the first page of the window's group was claimed again
    pages.claim(b)
    assert pages.reuse_prefix(b, tokens(*text[:3])) == 0
    assert pages.reuse_prefix(b, tokens(*text)) == 10
    assert pages.pages(b) == pages.pages(a)[:5]
    assert pages.pages(b, 1)[:4] == [5] * 4 and pages.pages(b, 1)[4] < 5
    pages.check()


class Copies:
    """Records the copies of a swap area in their order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, int]] = []

    def save(self, page: int, slot: int) -> None:
        self.log.append(("save", page, slot))

    def restore(self, slot: int, page: int) -> None:
        self.log.append(("restore", slot, page))


def test_a_page_that_was_taken_comes_back():
    copies = Copies()
    pages = PageManager(3, 2, True, swap=SwapArea(2, copies))
    key = RequestID("a")
    first = table(pages, "a", 1, 2, 3, 4, 5)
    pages.release(key)
    # the empty page is claimed first, then the end of the prefix
    second = table(pages, "b", 9, 9, 9, 9)
    assert second == [first[2], first[1]] and copies.log == [("save", first[1], 0)]
    pages.release(RequestID("b"))
    pages.check()
    pages.claim(key)
    assert pages.reuse_prefix(key, tokens(1, 2, 3, 4, 5)) == 4
    # the page that was freed first is evicted
    kind, slot, page = copies.log[-1]
    assert (kind, slot) == ("restore", 0) and pages.pages(key) == [first[0], page]
    assert (pages.swap.saved, pages.swap.restored) == (2, 1) and len(pages.swap) == 1
    pages.check()
    pages.forget_prefixes()
    assert not len(pages.swap)
    pages.check()


def test_no_page_comes_back_where_none_is_free():
    copies = Copies()
    pages = PageManager(3, 1, True, swap=SwapArea(3, copies))
    table(pages, "a", 1, 2)
    pages.release(RequestID("a"))
    table(pages, "b", 7, 8, 9)
    pages.claim(RequestID("a"))
    assert pages.reuse_prefix(RequestID("a"), tokens(1, 2, 3)) == 0
    assert [kind for kind, _, _ in copies.log] == ["save", "save"] and len(pages.swap) == 2
    pages.check()


def test_pages_that_come_back_are_not_dropped_for_those_that_give_way():
    """The area is full of the needed pages, and each restored page evicts a cached one."""
    copies = Copies()
    pages = PageManager(3, 1, True, swap=SwapArea(2, copies))
    for name, values in (("a", (1, 2, 3)), ("b", (7, 8, 9))):
        table(pages, name, *values)
        pages.release(RequestID(name))
    saved = {page: slot for kind, page, slot in copies.log if kind == "save"}
    assert len(saved) == 3 and len(pages.swap) == 2, "the page that was saved first was dropped"
    pages.claim(RequestID("a"))
    assert pages.reuse_prefix(RequestID("a"), tokens(1, 2, 9)) == 2
    assert pages.swap.restored == 2
    pages.check()


def test_each_use_of_a_page_for_new_tokens_is_counted():
    pool = PagePool(2)
    assert [pool.takes(page) for page in (0, 1)] == [0, 0]
    for _ in range(3):
        pool.drop(pool.take())
    assert [pool.takes(page) for page in (0, 1)] == [3, 0]


def test_room_counts_pages_that_are_free_and_cached_once():
    """A cached page that is free, and is needed itself, makes no room for one of the swap area."""
    pool = PagePool(2, swap=SwapArea(2, Copies()))
    held = [pool.take(), pool.take()]
    for page, page_hash in zip(held, (b"a", b"b"), strict=True):
        pool.share(page, page_hash)
        pool.drop(page)
    taken = pool.take()
    assert not pool.is_cached(b"a", on_device=True) and pool.is_cached(b"a")
    assert pool.has_room_for([b"b"]) and pool.has_room_for([b"a"])
    assert not pool.has_room_for([b"a", b"b"])
    pool.drop(taken)
    assert pool.has_room_for([b"a", b"b"])
    assert sorted(pool.hold([b"a", b"b"])) == [0, 1]
    assert not pool.has_room_for([b"c"])
    pool.check([0, 1])


def test_a_prefix_that_one_group_has_no_room_for_is_not_restored():
    pages = PageManager(
        4, 1, True, swap=SwapArea(4, Copies()), more=[PagePool(2, swap=SwapArea(4, Copies()))]
    )
    table(pages, "a", 1, 2)
    pages.release(RequestID("a"))
    table(pages, "b", 7, 8)  # in the second group it takes the pages of a
    pages.claim(RequestID("a"))
    assert pages.reuse_prefix(RequestID("a"), tokens(1, 2, 9)) == 0
    pages.release(RequestID("b"))
    assert pages.reuse_prefix(RequestID("a"), tokens(1, 2, 9)) == 2
    pages.check()


def test_a_prefix_is_restored_where_just_enough_pages_are_free():
    pages = PageManager(3, 1, True, swap=SwapArea(3, Copies()))
    for name, values in (("a", (1, 2, 3)), ("b", (7, 8, 9))):
        table(pages, name, *values)
        pages.release(RequestID(name))
    pages.claim(c := RequestID("c"))
    pages.reserve(c, 1)
    pages.claim(a := RequestID("a"))
    assert pages.reuse_prefix(a, tokens(1, 2, 9, 9)) == 2 and pages.free_pages == 0
    pages.check()


def test_a_prefix_that_was_forgotten_before_the_first_step_serves_nobody():
    pages = PageManager(8, 2, True)
    table(pages, "a", 1, 2, 3, 4, 5)
    pages.claim(b := RequestID("b"))
    assert pages.reuse_prefix(b, tokens(1, 2, 3, 4, 5)) == 4
    pages.forget_prefixes()
    pages.reserve(b, 6)
    pages.commit(b, tokens(1, 2, 3, 4, 5, 6))
    pages.claim(c := RequestID("c"))
    assert pages.reuse_prefix(c, tokens(1, 2, 3, 4, 5, 6, 7)) == 0


def test_the_first_group_is_the_one_that_is_reported():
    swap = SwapArea(1, Copies())
    pages, a = PageManager(6, 2, swap=swap, more=[PagePool(4)]), RequestID("a")
    assert (pages.num_pages, pages.swap) == (6, swap)
    pages.pools[0].take()
    pages.claim(a)
    assert pages.reserve(a, 3) == pages.pages(a) == [1, 2]
    assert pages.pages(a, 1) == [0, 1] and pages.tables(a) == [[1, 2], [0, 1]]
    assert pages.return_unseen(a, 3) == 0


def test_pools_of_no_pages_and_windows_of_no_tokens_are_errors():
    with pytest.raises(ValueError, match="PagePool: 0 pages; expected at least 1"):
        PagePool(0)
    with pytest.raises(ValueError, match="a window of 0 tokens; expected at least 1"):
        PagePool(1, 0)
    assert PagePool(1, 1).first_visible(5, 1) == 5


def test_kept_contents_go_to_empty_pages_only():
    pool = PagePool(3)
    assert pool.fill(b"a") == 0 and pool.cached_contents() == [(b"a", 0)]
    assert pool.fill(b"a") is None, "it is cached already"
    assert pool.take() == 1, "an empty page is taken before a cached one"
    assert pool.fill(b"b") == 2 and pool.cached_contents() == [(b"a", 0), (b"b", 2)]
    assert pool.fill(b"c") is None, "the free pages are cached"
    assert pool.hold([b"b", b"a"]) == [2, 0]
    assert pool.fill(b"c") is None and pool.cached_contents() == [], "no page is free"
    pool.check([0, 1, 2])


def test_an_area_has_a_slot():
    with pytest.raises(ValueError, match="SwapArea: 0 slots; expected at least 1"):
        SwapArea(0, Copies())
    swap = SwapArea(1, Copies())
    for page_hash in (b"a", b"b"):
        swap.save(page_hash, 0)
    assert (b"a" in swap, b"b" in swap, swap.num_slots) == (False, True, 1)


def test_a_lost_slot_is_noticed():
    swap = SwapArea(2, Copies())
    pages = PageManager(4, 2, True, swap=swap)
    swap.save(b"a", 0)
    swap.hold(b"a")
    with pytest.raises(AssertionError, match="a slot is lost or doubled"):
        pages.check()


class Memory:
    """The memory of a group's pages and of its swap area."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}
        self.area: dict[int, list[int]] = {}

    def save(self, page, slot):
        self.area[slot] = list(self.pages[page])

    def restore(self, slot, page):
        self.pages[page] = list(self.area[slot])


def first_visible(length: int, window: int | None) -> int:
    """The page of the first token that the token after `length` tokens sees."""
    return 0 if window is None else max(0, length + 1 - window) // 2


class Pages(RuleBasedStateMachine):
    """Random operations; a model of the cache's memory checks the contents of shared pages."""

    requests = Bundle("requests")

    windows: tuple[int | None, ...] = (None,)
    sizes: tuple[int, ...] = (6,)
    slots: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.memory = [Memory() for _ in self.windows]
        swaps = [
            SwapArea(slots, memory) if slots else None
            for slots, memory in zip(self.slots, self.memory, strict=True)
        ]
        groups = list(zip(self.sizes, self.windows, swaps, strict=True))
        size, window, swap = groups[0]
        more = [PagePool(*group) for group in groups[1:]]
        self.pages = PageManager(size, 2, True, window, swap, more)
        self.text: dict[RequestID, list[int]] = {}
        # for each request and group, the pages that the window has passed
        self.passed: dict[RequestID, list[int]] = {}

    def passes(self, key):
        """The window of each group passes the pages before what the next token sees."""
        now = [first_visible(len(self.text[key]), window) for window in self.windows]
        before = self.passed.get(key, [0] * len(now))
        self.passed[key] = [max(pair) for pair in zip(before, now, strict=True)]

    def tables(self, key):
        return [self.pages.pages(key, group) for group in range(len(self.windows))]

    @rule(target=requests, text=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, text):
        key = RequestID()
        self.pages.claim(key)
        reused = self.pages.reuse_prefix(key, tokens(*text))
        assert reused < len(text) and reused % 2 == 0
        self.check_held(key, text[:reused], "a shared page holds other tokens")
        self.text[key] = text[:reused]
        self.passes(key)
        self.extend(key, text[reused:])
        return key

    @rule(key=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def extend(self, key, more):
        text = self.text[key] + more
        before = self.pages.used_pages, self.tables(key)
        try:
            self.pages.reserve(key, len(text))
        except OutOfPagesError:
            assert (self.pages.used_pages, self.tables(key)) == before, "all or nothing"
            return
        for group, (table, memory) in enumerate(zip(self.tables(key), self.memory, strict=True)):
            for i in range(len(self.text[key]), len(text)):
                page = table[i // 2]
                users = [k for k in self.text if page in self.pages.pages(k, group)]
                assert users in ([], [key]), "a page of two requests is written"
                memory.pages.setdefault(page, [0, 0])[i % 2] = text[i]
        self.text[key] = text
        self.pages.commit(key, tokens(*text))
        self.pages.return_unseen(key, len(text))
        self.passes(key)
        for table, window, size in zip(self.tables(key), self.windows, self.sizes, strict=True):
            held = sum(page < size for page in table)
            assert held <= pages_of(len(text) if window is None else window, 2) + 1

    @rule(key=requests)
    def preempt(self, key):
        """A request loses its pages, and recomputes its tokens except the cached ones."""
        text = self.text.pop(key)
        self.pages.release(key)
        self.pages.claim(key)
        reused = self.pages.reuse_prefix(key, tokens(*text)) if text else 0
        self.check_held(key, text[:reused], "a page that came back holds other tokens")
        self.text[key] = text[:reused]
        del self.passed[key]
        self.passes(key)
        if text[reused:]:
            self.extend(key, text[reused:])

    @rule(key=requests, back=st.integers(0, 7), reserved=st.integers(0, 5))
    def truncate(self, key, back, reserved):
        """Pages that were reserved are given back, and the last tokens are removed; others may follow."""
        text = self.text[key]
        try:
            self.pages.reserve(key, len(text) + reserved)
        except OutOfPagesError:
            pass
        length = max(0, len(text) - back)
        kept = length
        if length % 2 and length < len(text) // 2 * 2:
            kept = length - 1  # the page is full: it may be shared, so it is not written again
        visible = [first_visible(kept, window) for window in self.windows]
        if any(passed > page for passed, page in zip(self.passed[key], visible, strict=True)):
            kept = 0  # the next token would see pages that the window has passed
        assert self.pages.truncate(key, length) == kept
        assert {len(table) for table in self.tables(key)} == {pages_of(kept, 2)}
        self.text[key] = text[:kept]
        if not kept:
            del self.passed[key]
            self.passes(key)

    @rule(key=requests, reserved=st.integers(0, 5))
    def trim(self, key, reserved):
        text = self.text[key]
        try:
            self.pages.reserve(key, len(text) + reserved)
        except OutOfPagesError:
            pass
        self.pages.trim(key, len(text))
        assert {len(table) for table in self.tables(key)} == {pages_of(len(text), 2)}

    @rule(key=consumes(requests))
    def end(self, key):
        del self.passed[key]
        self.pages.release(key)
        del self.text[key]

    @rule()
    def forget(self):
        self.pages.forget_prefixes()

    @invariant()
    def nothing_is_lost(self):
        self.pages.check()
        for key, text in self.text.items():
            self.check_held(key, text, "another request wrote into a page")

    def check_held(self, key, text, message):
        """Each group's table covers the tokens that the next token attends to."""
        for table, window, memory in zip(self.tables(key), self.windows, self.memory, strict=True):
            first = 0 if window is None else max(0, len(text) - window + 1)
            held = [memory.pages[table[i // 2]][i % 2] for i in range(first, len(text))]
            assert held == text[first:], message


class WindowPages(Pages):
    """The same machine with a window, which releases pages."""

    windows = (4,)


class SwappedPages(Pages):
    """The same machine with a swap area for preempted pages."""

    slots = (4,)


class SwappedWindowPages(Pages):
    """The same machine with a window and a swap area."""

    windows, slots = (3,), (2,)


class GroupedPages(Pages):
    """Layers without a window, and layers with one, whose pool is smaller."""

    windows, sizes, slots = (None, 3), (9, 6), (0, 0)


class SwappedGroupedPages(Pages):
    """Three groups, two of them with swap areas."""

    windows, sizes, slots = (None, 3, 5), (7, 5, 6), (3, 2, 0)


MACHINES = (Pages, WindowPages, SwappedPages, SwappedWindowPages, GroupedPages, SwappedGroupedPages)


def test_a_table_is_cut() -> None:
    pages, a, b = PageManager(9, 2, True), RequestID("a"), RequestID("b")
    for key in (a, b):
        pages.claim(key)
        pages.reuse_prefix(key, tokens(*range(7)))
        pages.reserve(key, 7)
        pages.commit(key, tokens(*range(7)))
    shared, own = pages.pages(a)[:3], pages.pages(a)[3]
    assert pages.pages(b)[:3] == shared and pages.used_pages == 5
    for length in (-1, 9):
        with pytest.raises(ValueError, match=f"a is cut to {length} tokens; its tables hold 8"):
            pages.truncate(a, length)
    assert pages.truncate(a, 8) == 8 and pages.truncate(a, 7) == 7
    assert pages.pages(a) == [*shared, own]
    assert pages.truncate(a, 5) == 4, "b reads the page of the fifth token"
    assert pages.pages(a) == shared[:2] and pages.used_pages == 4
    pages.reserve(a, 6)
    assert pages.pages(a)[2] not in pages.pages(b)
    pages.commit(a, tokens(0, 1, 2, 3, 9, 9))
    assert pages.pages(b)[:3] == shared
    assert pages.truncate(a, 0) == 0 and pages.pages(a) == [] and pages.used_pages == 4
    with pytest.raises(KeyError, match="c has no page table"):
        pages.truncate(RequestID("c"), 0)
    pages.check()


def test_tokens_that_are_removed_before_a_step_do_not_count_as_reused() -> None:
    pages, a, b = PageManager(9, 2, True), RequestID("a"), RequestID("b")
    pages.claim(a)
    pages.reserve(a, 6)
    pages.commit(a, tokens(*range(6)))
    pages.claim(b)
    assert pages.reuse_prefix(b, tokens(*range(7))) == 6
    assert pages.truncate(b, 3) == 2
    pages.reserve(b, 3)
    pages.commit(b, tokens(0, 1, 7))
    assert pages.reused_tokens == 2


@pytest.mark.parametrize("machine", MACHINES)
def test_random_use(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


def test_contents_that_are_kept_come_in_the_order_of_their_use() -> None:
    """Contents of free pages, the next one to be taken first, then those of tables, the first pages last."""
    pool = PagePool(7)
    pages = [pool.take() for _ in range(6)]
    for page in pages[:5]:
        pool.share(page, bytes([page]))
    pool.share(pages[5], bytes([pages[0]]))  # equal contents: the first page counts
    for page in (pages[3], pages[1]):
        pool.drop(page)
    pool.hold([bytes([pages[0]])])
    pool.drop(pages[0])  # one user is left
    assert [page for _, page in pool.with_content()] == [pages[i] for i in (3, 1, 4, 2, 0)]
    assert all(page_hash == bytes([page]) for page_hash, page in pool.with_content())
    pool.forget()
    assert pool.with_content() == []
