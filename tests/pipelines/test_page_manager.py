"""The page manager: pages are neither lost nor doubled, and a shared page holds what it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from max.interfaces import RequestID
from max.pipelines.kv_cache.page_manager import OutOfPagesError, PageManager


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_pages_are_handed_out_and_come_back():
    pages, a, b = PageManager(4, 2), RequestID("a"), RequestID("b")
    pages.claim(a)
    pages.claim(b)
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


class Pages(RuleBasedStateMachine):
    """Random use; a model of the cache's memory shows whether a shared page holds what it should."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageManager(6, 2, True)
        self.memory: dict[int, list[int]] = {}
        self.text: dict[RequestID, list[int]] = {}

    @rule(target=requests, text=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, text):
        key = RequestID()
        self.pages.claim(key)
        reused = self.pages.reuse_prefix(key, tokens(*text))
        assert reused < len(text) and reused % 2 == 0
        held = [t for page in self.pages.pages(key) for t in self.memory[page]]
        assert held == text[:reused], "a shared page holds other tokens"
        self.text[key] = text[:reused]
        self.extend(key, text[reused:])
        return key

    @rule(key=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def extend(self, key, more):
        text = self.text[key] + more
        before = self.pages.free_pages, self.pages.pages(key)
        try:
            self.pages.reserve(key, len(text))
        except OutOfPagesError:
            assert (self.pages.free_pages, self.pages.pages(key)) == before, "all or nothing"
            return
        table = self.pages.pages(key)
        for i in range(len(self.text[key]), len(text)):
            row = self.memory.setdefault(table[i // 2], [0, 0])
            row[i % 2] = text[i]
        self.text[key] = text
        self.pages.commit(key, tokens(*text))

    @rule(key=consumes(requests))
    def end(self, key):
        self.pages.release(key)
        del self.text[key]

    @invariant()
    def nothing_is_lost(self):
        self.pages.check()
        for key, text in self.text.items():
            held = [t for page in self.pages.pages(key) for t in self.memory.get(page, [0, 0])]
            assert held[: len(text)] == text, "another request wrote into a page"


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
