"""The router of replicas against a router that keeps whole texts, on random requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from max.interfaces import RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.page_changes import Changes, PageChanges
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.salts import Salt
from max.pipelines.kv_cache.swap_area import SwapArea
from max.serve.worker import prefix_router
from max.serve.worker.prefix_router import QUEUED_TOKENS, SEQUENCE_TOKENS, PrefixRouter, Route

PAGE = 4


class Texts:
    """What replicas have cached, as pages of whole texts, and their loads; slow and plain."""

    def __init__(self) -> None:
        self.pages: dict[int, list[tuple]] = {}  # the oldest first
        self.most: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.unread: dict[int, int] = {}
        self.open: dict[int, int] = {}

    def add(self, replica: int, pages: int, slots: int) -> None:
        self.pages[replica], self.most[replica], self.slots[replica] = [], pages, slots
        self.unread[replica] = self.open[replica] = 0

    def cached(self, replica: int, tokens: tuple, salt: str) -> int:
        count = 0
        while count + PAGE <= len(tokens) and (salt, tokens[: count + PAGE]) in self.pages[replica]:
            count += PAGE
        return min(count, max(len(tokens) - 1, 0))

    def note(self, replica: int, tokens: tuple, salt: str) -> None:
        pages = self.pages[replica]
        for end in range(len(tokens) // PAGE * PAGE, 0, -PAGE):
            key = (salt, tokens[:end])
            if key in pages:
                pages.remove(key)
            pages.append(key)
        del pages[: max(len(pages) - self.most[replica], 0)]

    def load(self, replica: int) -> int:
        queued = max(self.open[replica] + 1 - self.slots[replica], 0)
        return self.unread[replica] + SEQUENCE_TOKENS * self.open[replica] + QUEUED_TOKENS * queued


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("few", [32, 0])
def test_random_requests(few: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With loops over replicas, and with arrays of them, as for many."""
    monkeypatch.setattr(prefix_router, "_FEW", few)
    draw, router, texts = random.Random(seed), PrefixRouter(PAGE), Texts()
    running: list[tuple[Route, tuple, str]] = []

    def add(replica: int) -> None:
        pages, slots = draw.randint(1, 30), draw.randint(1, 4)
        router.add(replica, pages, slots)
        texts.add(replica, pages, slots)

    for replica in draw.sample(range(70), 4):
        add(replica)
    starts = [tuple(draw.choices(range(9), k=draw.randint(0, 20))) for _ in range(3)]
    for _ in range(300):
        match draw.choice(("ask", "ask", "start", "read", "end", "end", "change")):
            case "ask":
                tokens = draw.choice(starts) + tuple(draw.choices(range(2), k=draw.randint(0, 9)))
                salt, length = draw.choice("ab"), draw.randint(1, 9)
                among = draw.sample(router.replicas, draw.randint(1, len(router.replicas)))
                # what a request reads itself counts 5/4
                costs = {
                    n: (texts.load(n) - texts.cached(n, tokens, salt) * 5 // 4, texts.open[n])
                    for n in among
                }
                route = router.choose(among, tokens, Salt(text=salt), length)
                # of equal ones the first
                assert route.replica == min(among, key=costs.__getitem__)
                assert route.cached_tokens == texts.cached(route.replica, tokens, salt)
                assert route.unread == (len(tokens) or length) - route.cached_tokens
                texts.unread[route.replica] += route.unread
                texts.open[route.replica] += 1
                texts.note(route.replica, tokens, salt)
                running.append((route, tokens, salt))
            case "start" if running:
                route, tokens, _ = draw.choice(running)
                if route.replica in texts.pages and route.unread:
                    cached, before = draw.randint(0, max(len(tokens) - 1, 0)), route.unread
                    known = before + route.cached_tokens - cached
                    router.note_start(route, cached)
                    texts.unread[route.replica] += max(known, 1) - before
            case "read" if running:
                route = draw.choice(running)[0]
                if route.replica in texts.pages:
                    texts.unread[route.replica] -= route.unread
                router.read(route)
            case "end" if running:
                route, tokens, salt = running.pop(draw.randrange(len(running)))
                answer = tuple(draw.choices(range(2), k=draw.randint(0, 6)))
                known = draw.random() < 0.8
                if route.replica in texts.pages:
                    texts.unread[route.replica] -= route.unread
                    texts.open[route.replica] -= 1
                    if known and tokens + answer:
                        texts.note(route.replica, tokens + answer, salt)
                router.note_end(route, tokens + answer if known else (), Salt(text=salt))
            case "change" if draw.random() < 0.3:
                replica = draw.choice(router.replicas)
                # the requests of a replica that is removed are forgotten, those of others stay
                running = [each for each in running if each[0].replica != replica]
                if draw.random() < 0.5:
                    router.remove(replica)
                    del texts.pages[replica]
                    add(draw.choice([n for n in range(70) if n not in texts.pages]))
                else:
                    add(replica)
        for replica in router.replicas:
            assert router.load(replica) == texts.load(replica)
    for replica in router.replicas:
        router.forget(replica)
        assert router.choose([replica], starts[0] or (1,), Salt(text="a")).cached_tokens == 0
    held = sum(min(len(starts[0]) // PAGE, 30) for _ in router.replicas)
    assert len(router._holders) <= held
    for replica in router.replicas:
        router.remove(replica)
    assert not router._holders and not router.replicas


def test_the_least_loaded_replica_where_prefixes_do_not_count() -> None:
    router = PrefixRouter(PAGE, by_prefix=False)
    for replica in range(3):
        router.add(replica, 100, 8)
    prompt = tuple(range(100))
    assert sorted(router.choose(range(3), prompt).replica for _ in range(6)) == [0, 0, 1, 1, 2, 2]


def test_an_answer_is_part_of_the_next_prompt() -> None:
    router = PrefixRouter(PAGE)
    for replica in range(2):
        router.add(replica, 100, 8)
    prompt, answer = tuple(range(10)), tuple(range(30, 60))
    route = router.choose((0, 1), prompt)
    router.note_end(route, prompt + answer)
    turn = router.choose((0, 1), prompt + answer + (8, 9))
    assert turn.cached_tokens == 40 and turn.replica == route.replica


@pytest.mark.parametrize("seed", range(8))
def test_reports_of_page_managers(seed: int) -> None:
    """Two replicas with real page managers, random salts and a router that is started anew: it knows their caches."""
    draw = random.Random(seed)
    caches = [Cache(draw) for _ in range(2)]
    router, late = PrefixRouter(PAGE), PrefixRouter(PAGE)
    for number, cache in enumerate(caches):
        router.add(number, cache.pages.total_num_pages, 4)
    starts = [tuple(draw.choices(range(9), k=draw.randint(0, 20))) for _ in range(3)]
    salts = [Salt(), Salt("x"), Salt("x", 0.5), Salt(text="a"), Salt("x", text="b\ud800")]
    for step in range(120):
        tokens = draw.choice(starts) + tuple(draw.choices(range(2), k=draw.randint(1, 9)))
        salt, number = draw.choice(salts), draw.randrange(2)
        cache = caches[number]
        route = router.choose([number], tokens, salt)
        assert cache.run(f"r{step}", tokens, salt) == route.cached_tokens // PAGE * PAGE
        router.note_end(route)
        if draw.random() < 0.05:
            cache.pages.forget_prefixes()
        # before the report, what was sent there is expected, and what is lost is not known
        router.note_changes(number, *cache.report())
        for each in range(2):
            assert router._places[each].reported_pages == caches[each].held
        if step == 60:
            for each, other in enumerate(caches):
                late.add(each, other.pages.total_num_pages, 4)
                known = router._places[each]
                late.note_changes(each, known.reported_pages, salt_key=known.salt_key)
        elif step > 60:
            late.note_changes(number, *cache.last)
            assert late._places[number].reported_pages == router._places[number].reported_pages
    everything = set().union(
        *(router._places[n].reported_pages | {*router._places[n].pages} for n in (0, 1))
    )
    assert set(router._holders) == everything
    for number in range(2):
        router.remove(number)
    assert not router._holders


class Cache:
    """The pages of an engine, without tensors."""

    def __init__(self, draw: random.Random) -> None:
        swap = SwapArea(draw.randint(1, 4), Copies()) if draw.random() < 0.5 else None
        self.pages = RequestPages(PageManager(draw.randint(8, 16), PAGE, True, swap=swap))
        self.pages.report_changes()
        self.last: tuple = ()

    def run(self, name: str, tokens: tuple, salt: Salt) -> int:
        """Reads a prompt; returns how many of its tokens were in full pages."""
        context = TextContext(
            tokens=np.array(tokens), max_length=99, request_id=RequestID(name),
            adapter=salt.adapter, adapter_scale=salt.scale, cache_salt=salt.text,
        )  # fmt: skip
        pages, key = self.pages.pages, RequestID(name)
        digest = self.pages._salt(context)
        pages.claim(key)
        cached = pages.reuse_prefix(key, np.array(tokens), digest)
        pages.reserve(key, len(tokens))
        pages.commit(key, np.array(tokens), digest)
        pages.release(key)
        return cached

    @property
    def held(self) -> set[bytes]:
        """The hashes of the full pages that it has, looked up from outside."""
        pool = self.pages.pages.pools[0]
        swapped = set() if pool.swap is None else set(pool.swap._slots)
        return (set(pool._page_of_hash) - pool._partial) | swapped

    def report(self) -> tuple:
        changes = self.pages.take_changes()
        self.last = (
            changes.new_pages,
            changes.lost_pages,
            changes.is_anew,
            self.pages.used_salt_key,
        )
        return self.last


class Copies:
    def save(self, page: int, slot: int) -> None:
        pass

    def restore(self, slot: int, page: int) -> None:
        pass


def test_a_replica_that_reports_too_much_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_router, "MOST_REPORTED", 5)
    router = PrefixRouter(PAGE)
    router.add(0, 3, 4)
    pages = [bytes([i]) * 16 for i in range(9)]
    router.note_changes(0, pages)
    assert set(router._holders) == set(pages[:5])
    router.note_changes(0, pages[5:], pages[:2])
    assert set(router._holders) == {*pages[2:5], *pages[5:7]}
    # unknown ones are not counted
    router.note_changes(0, (), pages[7:])
    assert set(router._holders) == {*pages[2:5], *pages[5:7]}


def test_changes_are_told_once_and_not_of_what_was_emptied() -> None:
    changes = PageChanges()
    assert not changes.pop()
    changes.note(b"a", True)
    changes.note(b"b", True)
    changes.note(b"a", False)
    assert changes.pop() == Changes((b"b",), (b"a",))
    changes.note(b"b", False)
    changes.forget()
    changes.note(b"c", True)
    changes.note(b"d", False)
    assert changes.pop() == Changes((b"c",), (), True)
    assert not changes.pop()
