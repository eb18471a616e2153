"""The order of requests by priority and fairness between clients; no request starves."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.interfaces import RequestID
from max.pipelines.core import TextContext
from max.pipelines.scheduler import SchedulerLimits
from max.pipelines.scheduler.order import RequestOrder
from tests.pipelines.test_scheduler import LIMITS, REQUEST, Engine, generate

ONE = SchedulerLimits(max_batch_size=1)
RANKED = st.tuples(REQUEST, st.integers(-2, 2), st.sampled_from(["", "a", "b"]))


class RankedEngine(Engine):
    """An engine whose requests have priorities and clients; it records the order in which they end."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.order: list[str] = []
        self.names: dict = {}

    def put(self, name: str, priority: int = 0, client: str = "", prompt=(1, 2), new: int = 3):
        prompt = list(prompt)
        add = self.scheduler.add
        self.scheduler.add = lambda context: add(context, priority, client)
        context = self.add(prompt, new)
        self.scheduler.add = add
        self.names[context.request_id] = name
        return context

    def step(self) -> bool:
        before = set(self.ended)
        more = super().step()
        self.order += [self.names[key] for key in self.ended - before]
        return more


def engine() -> RankedEngine:
    return RankedEngine(64, 2, False, ONE)


@given(
    pages=st.integers(10, 30),
    prefix=st.booleans(),
    limits=LIMITS,
    requests=st.lists(st.tuples(RANKED, st.integers(0, 3)), min_size=1, max_size=12),
)
def test_every_request_ends_with_its_tokens(pages, prefix, limits, requests) -> None:
    one = RankedEngine(pages, 2, prefix, limits)
    contexts = []
    for number, (((prompt, new), priority, client), steps) in enumerate(requests):
        contexts.append((one.put(str(number), priority, client, prompt, new), prompt, new))
        for _ in range(steps):
            one.step()
    one.run()
    assert sorted(one.order, key=int) == [str(n) for n in range(len(requests))]
    for context, prompt, new in contexts:
        assert context.generated_tokens.tolist() == generate(prompt, len(prompt) + new)


def test_a_lower_value_comes_first() -> None:
    one = engine()
    for name, priority in (("c", 0), ("d", 5), ("a", -3), ("b", -3), ("e", 5)):
        one.put(name, priority)
    one.run()
    assert "".join(one.order) == "abcde"


def test_a_request_without_a_priority_has_that_of_0() -> None:
    one = engine()
    for name in "abcd":
        if name in "ac":
            one.put(name, 0)
        else:
            one.names[one.add([1, 2], 3).request_id] = name
    one.run()
    assert "".join(one.order) == "abcd"


def test_requests_of_one_client_keep_their_order() -> None:
    for client in ("", "a"):
        one = engine()
        for number in range(20):
            one.put(str(number), 0, client, [1] * (1 + number % 7), 1 + number % 5)
        one.run()
        assert one.order == [str(number) for number in range(20)]


def test_clients_share_the_engine() -> None:
    """A client that sends fifty requests at once does not delay another client."""
    one = engine()
    for number in range(50):
        one.put(f"a{number}", client="a")
    one.step()
    for number in range(5):
        one.put(f"b{number}", client="b")
    one.run()
    assert sum(name[0] == "b" for name in one.order[:11]) == 5, one.order[:11]
    assert [name for name in one.order if name[0] == "a"] == [f"a{n}" for n in range(50)]


def test_shares_are_of_tokens() -> None:
    one = engine()
    for number in range(12):
        one.put(f"a{number}", client="a", prompt=[1] * 30, new=10)
        one.put(f"b{number}", client="b", prompt=[1] * 6, new=4)
    one.run()
    until = one.order.index("b11") + 1
    ended = one.order[:until]
    # b's twelve requests have 10 tokens each, a's 40
    assert 2 <= sum(name[0] == "a" for name in ended) <= 5, ended


def test_a_client_that_was_away_has_saved_nothing_up() -> None:
    one = engine()
    for number in range(20):
        one.put(f"a{number}", client="a")
    for _ in range(25):
        one.step()
    for number in range(10):
        one.put(f"a{20 + number}", client="a")
        one.put(f"b{number}", client="b")
    begin = len(one.order)
    one.run()
    following = one.order[begin:]
    place = following.index("b9")
    assert sum(name[0] == "a" for name in following[:place]) >= 8


def test_a_priority_is_before_a_share() -> None:
    one = engine()
    for number in range(5):
        one.put(f"a{number}", 1, "a")
        one.put(f"b{number}", 0, "b")
    one.run()
    assert [name[0] for name in one.order] == ["b"] * 5 + ["a"] * 5


class Shares:
    """The order as its documentation states it: each client's requests, one after the other, in equal shares."""

    def __init__(self) -> None:
        self.now = 0
        self.ends: dict[str, int] = {}
        self.requests: list[tuple[int, int, int, TextContext, str]] = []
        self.arrived = 0

    def add(self, context: TextContext, priority: int, client: str) -> None:
        new = 1 if context.max_length is None else context.max_length - context.current_length
        # those of a client follow each other, unless it was away
        is_here = any(owner == client for *_, owner in self.requests)
        begin = max(self.now, self.ends[client]) if is_here else self.now
        self.ends[client] = begin + context.current_length + min(max(new, 1), 512)
        self.requests.append((priority, begin, self.arrived, context, client))
        self.arrived += 1

    def order(self) -> list[RequestID]:
        return [r[3].request_id for r in sorted(self.requests, key=lambda r: r[:3])]

    def start(self, key: RequestID) -> None:
        self.now = max(self.now, *(r[1] for r in self.requests if r[3].request_id == key))

    def remove(self, key: RequestID) -> None:
        self.requests = [r for r in self.requests if r[3].request_id != key]


@pytest.mark.parametrize("seed", range(60))
def test_clients_share_by_the_tokens_of_their_requests(seed: int) -> None:
    rng = random.Random(seed)
    order, shares = RequestOrder(), Shares()
    contexts: dict[RequestID, TextContext] = {}
    for number in range(40):
        if contexts and rng.random() < 0.5:
            key = rng.choice(list(contexts))
            if rng.random() < 0.4:
                order.start(contexts[key])
                shares.start(key)
            else:
                del contexts[key]
                shares.remove(key)
                assert order.remove(key)
            assert not order.remove(RequestID("unknown"))
        else:
            length = rng.choice((1, 2, 30, 500))
            context = TextContext(
                request_id=RequestID(str(number)),
                tokens=np.arange(length),
                max_length=length + rng.choice((1, 2, 40, 510, 511, 512, 513, 514, 9999)),
            )
            if rng.random() < 0.3:
                context.max_length = None
            priority, client = rng.choice((0, 0, 0, 1)), rng.choice("abc")
            order.add(context, priority, client)
            shares.add(context, priority, client)
            contexts[context.request_id] = context
        assert list(order.sorted_requests(contexts)) == shares.order()
        assert len(order) == len(contexts) and all(key in order for key in contexts)
        assert len({order.rank(context) for context in contexts.values()}) == len(contexts)
