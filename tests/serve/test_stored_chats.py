"""Chat completions with `store`: read, listed, marked and deleted by OpenAI's client, in bounded memory."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from max.serve.errors import ApiError
from max.serve.openai.chat_store import ChatStore, StoredChat
from max.serve.openai.responses.pages import page_of
from max.serve.openai.stored_chats import check_metadata, stored_chat

ASKED: Any = {
    "model": "tiny",
    "max_tokens": 6,
    "temperature": 0,
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Norway?"}]},
    ],
}


def chat(name: str, size: int = 10, client: str = "", created: int = 0) -> StoredChat:
    return StoredChat(client, {"id": name, "created": created, "metadata": {}}, [], size)


def names(store: ChatStore, client: str = "") -> list[str]:
    return [each.completion["id"] for each in store.of_client(client)]


def test_the_oldest_are_dropped_where_the_memory_ends() -> None:
    store = ChatStore(most_bytes=30, most_entries=4)
    for number in range(4):
        store.put(str(number), chat(str(number)))
    assert names(store) == ["1", "2", "3"]
    store.put("large", chat("large", 31))  # drops no others
    assert names(store) == ["1", "2", "3"]
    store.put("2", chat("2", 20))  # in the place of the one before
    assert names(store) == ["3", "2"]
    assert store.delete("3", "") and not store.delete("3", "")
    store.put("4", chat("4"))
    assert names(store) == ["2", "4"]
    store = ChatStore(most_bytes=30, most_entries=2)
    for number in range(3):
        store.put(str(number), chat(str(number), 1))
    assert names(store) == ["1", "2"]


def test_clients_see_their_own_only() -> None:
    store = ChatStore()
    store.put("a", chat("a", client="x"))
    store.put("b", chat("b", client="y"))
    assert names(store, "x") == ["a"] and store.find("b", "x") is None
    assert not store.delete("b", "x") and store.delete("b", "y")


def test_a_list_is_in_the_order_of_the_times() -> None:
    store = ChatStore()
    for name, created in (("a", 3), ("b", 1), ("c", 2)):
        store.put(name, chat(name, created=created))
    assert names(store) == ["b", "c", "a"]


def test_the_size_is_that_of_the_texts() -> None:
    assert stored_chat("", {"id": "a"}, [{"content": "b"}]).size == len(
        '{"id":"a"}[{"content":"b"}]'
    )


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_pages_are_the_list(limit: int, order: Any) -> None:
    entries: list[dict[str, Any]] = [{"id": str(number)} for number in range(5)]
    wanted = entries if order == "asc" else entries[::-1]
    found, after = list[Any](), None
    while True:
        page = page_of(entries, limit, order, after)
        found += page["data"]
        assert page["object"] == "list" and len(page["data"]) <= limit
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], found[-1]["id"])
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert found == wanted
    assert page_of([], 5, order, None)["last_id"] is None
    for wrong in (0, 101):
        with pytest.raises(ApiError, match="limit"):
            page_of(entries, wrong, order, None)
    with pytest.raises(ApiError, match="'x'"):
        page_of(entries, 1, order, "x")


@pytest.mark.parametrize(
    "metadata",
    [{"a": 5}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(number): "" for number in range(17)}],
)
def test_metadata_that_is_not_stored(metadata: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        check_metadata(metadata)
    assert caught.value.param == "metadata"
    assert check_metadata({"a" * 64: "b" * 512}) and check_metadata(None) == {}


@pytest.mark.parametrize("streams", [False, True])
def test_a_completion_is_stored(client: openai.OpenAI, streams: bool) -> None:
    chats, marks = client.chat.completions, {"run": f"stored {streams}", "kind": "test"}
    common: Any = {**ASKED, "n": 2, "seed": 5, "store": True, "metadata": marks}
    made: Any = chats.create(**common, stream=streams)
    if streams:
        texts, chunks = ["", ""], list(made)
        for made in chunks:
            for choice in made.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content or "" for choice in made.choices]
    stored = chats.retrieve(made.id)
    assert [choice.message.content for choice in stored.choices] == texts and len(texts) == 2
    assert (stored.object, stored.created) == ("chat.completion", made.created)
    assert stored.usage is not None and stored.usage.completion_tokens == 12
    shown = stored.to_dict()
    assert (shown["metadata"], shown["seed"], shown["temperature"]) == (marks, 5, 0)

    listed = chats.list(metadata={"run": f"stored {streams}"})
    assert [each.id for each in listed] == [made.id]
    assert not list(chats.list(metadata={"run": f"stored {streams}", "kind": "other"}))
    assert not list(chats.list(metadata=marks, model="other"))
    system, user = chats.messages.list(made.id)
    assert (system.content, system.content_parts) == ("Be short.", None)
    assert user.content is None and user.content_parts is not None
    assert user.content_parts[0].to_dict() == ASKED["messages"][1]["content"][0]
    assert [each.id for each in chats.messages.list(made.id, order="desc")] == [user.id, system.id]
    assert [each.id for each in chats.messages.list(made.id, after=system.id)] == [user.id]

    changed = chats.update(made.id, metadata={"run": "over"})
    assert changed.to_dict() == {**shown, "metadata": {"run": "over"}}
    assert chats.retrieve(made.id) == changed and not list(chats.list(metadata=marks))
    assert chats.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        chats.delete(made.id)


def test_pages_of_stored_completions(client: openai.OpenAI) -> None:
    chats = client.chat.completions
    marks: Any = {"run": "pages"}
    common: Any = {**ASKED, "max_tokens": 1, "store": True, "metadata": marks}
    made = [chats.create(**common).id for _ in range(3)]
    listed = [each.id for each in chats.list(metadata=marks, limit=2)]  # reads all pages
    assert sorted(listed) == sorted(made)
    assert [each.id for each in chats.list(metadata=marks, order="desc")] == listed[::-1]


def test_nothing_is_stored_unasked(client: openai.OpenAI, http: httpx.Client) -> None:
    for more in ({}, {"store": False}):
        common: Any = {**ASKED, **more, "metadata": {"run": "unasked"}}
        made = client.chat.completions.create(**common)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(made.id)
    body = {**ASKED, "store": True, "metadata": {"a": 5}}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "metadata"
    # other routes below stay what they are
    for name in ("batch", "control", "input_tokens", "render", "batch/messages"):
        assert http.post(f"/v1/chat/completions/{name}", json={}).status_code == 501
    assert http.get("/v1/chat/completions/other").status_code == 404
