"""Responses that are kept: what they keep alive of each other counts once, and stays within the bound."""

from __future__ import annotations

import random

from max.serve.openai.responses.store import ResponseStore, StoredResponse

BOUND = 100


def stored(size: int, previous: StoredResponse | None = None, text: str = "") -> StoredResponse:
    inputs = ({"id": f"in {text}"},)
    return StoredResponse("a", previous, inputs, {"output": [{"id": f"out {text}"}]}, size)


def kept(store: ResponseStore, names: list[str]) -> list[str]:
    return [name for name in names if store.find(name, "a")]


def test_old_responses_are_dropped() -> None:
    store = ResponseStore(BOUND)
    names = [f"r{number}" for number in range(10)]
    for name in names:
        store.put(name, stored(BOUND // 4))
    assert kept(store, names) == names[6:]
    assert store.find("r9", "b") is None and not store.delete("r9", "b")
    assert store.delete("r9", "a") and not store.delete("r9", "a")
    store.put("r8", stored(BOUND // 2))  # once more
    assert kept(store, names) == names[6:9]


def test_a_conversation_has_the_items_of_all_its_responses() -> None:
    last: StoredResponse | None = None
    for number in range(3):
        last = stored(1, last, str(number))
    assert last is not None
    assert [item["id"] for item in last.items] == [
        "in 0",
        "out 0",
        "in 1",
        "out 1",
        "in 2",
        "out 2",
    ]
    assert last.history == last.items[:4]


def test_dropped_responses_count_while_later_ones_go_on_with_them() -> None:
    store = ResponseStore(BOUND)
    first = stored(40)
    store.put("first", first)
    store.put("second", stored(30, first))
    assert store.delete("first", "a")
    # 70 bytes are in memory still
    store.put("other", stored(40))
    assert kept(store, ["second", "other"]) == ["other"]
    # both are gone now, so there is room
    store.put("more", stored(60))
    assert kept(store, ["other", "more"]) == ["other", "more"]


def test_responses_share_what_is_before_them() -> None:
    store = ResponseStore(BOUND)
    first = stored(60)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        store.put(name, stored(10, first))
    assert kept(store, names) == names


def test_a_conversation_that_is_too_large_leaves_the_others() -> None:
    store = ResponseStore(BOUND)
    store.put("other", stored(30))
    last, names = None, [f"r{number}" for number in range(8)]
    for name in names:
        last = stored(25, last)
        store.put(name, last)
    # the first one was dropped for the fourth; each later one takes more than the bound
    assert kept(store, ["other", *names]) == names[:4]


def test_a_long_conversation_is_dropped_at_once() -> None:
    """Without a recursion over its responses."""
    store = ResponseStore(100_001)
    last = None
    for _ in range(100_000):
        last = stored(1, last)
    assert last is not None
    store.put("last", last)
    assert store.find("last", "a") is last
    del last
    store.put("next", stored(2))
    assert kept(store, ["last", "next"]) == ["next"]


def test_random_conversations_stay_within_the_bounds() -> None:
    """What is alive is found anew, from the responses that can be found."""
    for seed in range(40):
        rng = random.Random(seed)
        store = ResponseStore(BOUND, most_entries=8)
        made: dict[str, StoredResponse] = {}
        for number in range(60):
            findable = [name for name in made if name in store._entries]
            if findable and rng.random() < 0.2:
                store.delete(rng.choice(findable), "a")
                continue
            name = rng.choice(findable) if findable and rng.random() < 0.1 else f"r{number}"
            before = made[rng.choice(findable)] if findable and rng.random() < 0.7 else None
            made[name] = stored(rng.randint(0, 30), before)
            size = sum(each.size for each in made[name].chain())
            store.put(name, made[name])
            assert (name in store._entries) == (size <= BOUND), f"seed {seed}"
            alive = {id(e): e for r in store._entries.values() for e in r.chain()}
            total = sum(each.size for each in alive.values())
            assert total == store._bytes <= BOUND, f"seed {seed}"
            assert set(map(id, store._holders)) == set(alive), f"seed {seed}"
            assert len(store._entries) <= 8, f"seed {seed}"


def test_the_latest_used_of_a_number_are_kept() -> None:
    store = ResponseStore(BOUND, most_entries=3)
    for name in ("a", "b", "c"):
        store.put(name, stored(1, text=name))
    assert kept(store, ["c", "b", "a"]) == ["c", "b", "a"]
    assert store.find("c", "other") is None  # no use
    store.put("d", stored(1, text="d"))
    assert kept(store, ["a", "b", "c", "d"]) == ["a", "b", "d"]
    assert store.find_item("in c", "a") is None and store.find_item("out d", "b") is None
    assert store.find_item("in b", "a") == {"id": "in b"} == store._items["a", "in b"]
    # a later response has an item of the same name
    store.put("e", stored(1, text="d"))
    assert kept(store, ["a"]) == [] and store.delete("d", "a")
    assert store.find_item("out d", "a") == {"id": "out d"} and store.delete("e", "a")
    assert store.find_item("out d", "a") is None
    nameless = StoredResponse("a", None, ({"id": None}, {}), {"output": [{"id": 3}]}, 1)
    store.put("f", nameless)
    assert {*store._items} == {("a", "in b"), ("a", "out b")}
