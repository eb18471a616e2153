"""The router of replicas against a router that keeps whole texts, on random requests."""

from __future__ import annotations

import random

import pytest

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
def test_random_requests(seed: int) -> None:
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
                costs = {
                    n: (texts.load(n) - texts.cached(n, tokens, salt), texts.open[n]) for n in among
                }
                route = router.choose(among, tokens, salt, length)
                assert costs[route.replica] == min(costs.values())
                assert route.cached == texts.cached(route.replica, tokens, salt)
                assert route.unread == (len(tokens) or length) - route.cached
                texts.unread[route.replica] += route.unread
                texts.open[route.replica] += 1
                texts.note(route.replica, tokens, salt)
                running.append((route, tokens, salt))
            case "start" if running:
                route, tokens, _ = draw.choice(running)
                if route.replica in texts.pages and route.unread:
                    cached, before = draw.randint(0, max(len(tokens) - 1, 0)), route.unread
                    known = before + route.cached - cached
                    router.started(route, cached)
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
                router.ended(route, tokens + answer if known else (), salt)
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
        assert router.choose([replica], starts[0] or (1,), "a").cached == 0
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
    router.ended(route, prompt + answer)
    turn = router.choose((0, 1), prompt + answer + (8, 9))
    assert turn.cached == 40 and turn.replica == route.replica
